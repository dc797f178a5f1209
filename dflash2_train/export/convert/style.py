"""What a style of drafter folders is: how it is recognised, read and written, and what it cannot say.

A style has two tables. *Names*: published tensor name -> its name, where they differ; used in both directions.
*Configuration*: its keys as a published ``config.json`` (:attr:`Style.publish`) and back (:attr:`Style.configure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.export.doctor.known_keys import NESTED, TOP
from dflash2_train.export.published import Header, published_name
from dflash2_train.model.drafter_config import DrafterShape

Config = Mapping[str, Any]
TARGET_LAYERS = "--target or --num-target-layers"
LOGIT_KEYS = ("output_multiplier", "final_logit_softcapping")


class ConvertError(UserError):
    """A folder that cannot be converted; the text says what was found, the rule, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Something that the target style cannot say, or that is not carried over."""

    what: str
    text: str
    drafts: bool = False  # the converted drafter drafts otherwise than its source


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What the user says where a format does not."""

    block_size: int | None = None
    num_target_layers: int | None = None
    verifier: str | None = None  # name of the target, for formats that hold one
    verifier_architectures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A folder as found, before anything of it is believed."""

    config: Config
    header: Header  # stored tensor name -> (safetensors dtype name, shape)
    files: frozenset[str]

    @property
    def nested(self) -> Config:
        """``dflash_config``, or nothing where it is no object."""
        value = self.config.get("dflash_config")
        return value if isinstance(value, Mapping) else {}

    @property
    def is_published(self) -> bool:
        """Whether it is in the published layout, of whichever tool."""
        names = set(map(published_name, self.header))
        return isinstance(self.config.get("dflash_config"), Mapping) and set(PUBLISHED_MARKS) <= names


PUBLISHED_MARKS = ("fc.weight", "hidden_norm.weight", "norm.weight")
LAYOUT = f"dflash_config and tensors {', '.join(PUBLISHED_MARKS)}"


@dataclass(frozen=True, kw_only=True)
class Described:
    """A drafter's description, in no tool's terms but the published ones."""

    shape: DrafterShape
    generation: int  # 1 or 2
    published: Config  # config.json as this project would write it
    dtype: str  # torch name


def nothing_lost(_described: Described) -> list[Loss]:
    """Of a style that can say everything."""
    return []


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to store a drafter.

    Attributes:
        name: as ``--to`` takes it.
        title: for people.
        marks: what a folder of this style is known by.
        recognises: whether a folder has these marks.
        publish: its configuration as a published ``config.json``; ConvertError for what no drafter here computes.
        configure: its configuration, from a description.
        loses: what of a drafter has no place in it. The mask vector is judged apart, see ``keeps_mask``.
        names: published tensor name -> its own, where they differ.
        unused: tensors that it stores and that drafting does not need.
        keeps_mask: whether it has a place for a trained mask vector.
        keeps_embedding: whether it holds an input embedding of its own, whose mask row then is the vector's place.
        has_second: whether it has a place for convolution and selector.
        is_layout: whether it is the published layout, which the doctor checks.
        keys: of its own at the top level, beside those of the published layout.
    """

    name: str
    title: str
    marks: str
    recognises: Callable[[Seen], bool]
    publish: Callable[[Config, Hints], dict[str, Any]]
    configure: Callable[[Described, Hints], dict[str, Any]]
    loses: Callable[[Described], list[Loss]] = nothing_lost
    names: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    keeps_mask: bool = False
    keeps_embedding: bool = False
    has_second: bool = True
    is_layout: bool = False
    keys: frozenset[str] = frozenset()

    def stored_name(self, published: str) -> str:
        """Name of a tensor in this style."""
        return self.names.get(published, published)

    def published_names(self, stored: Header) -> dict[str, str]:
        """Stored name -> name that :func:`published.by_published_name` understands, without unused tensors."""
        back = {own: published for published, own in self.names.items()}
        return {name: back.get(name, name) for name in stored if name not in self.unused}


def refuse_unknown(nested: Config, known: frozenset[str] = NESTED | TOP) -> None:
    """Raise ConvertError for a key of ``dflash_config`` whose meaning for the drafts is not known here."""
    unknown = sorted(nested.keys() - known)
    if unknown:
        listed = ", ".join(f"{key}={nested[key]!r}" for key in unknown)
        raise ConvertError(
            f"dflash_config: {listed}: not known here, and such keys change what a drafter computes. "
            "Remove them only if its maker says that they do not."
        )


def required(config: Config, key: str, instead: str = "") -> Any:
    """``config[key]``; ConvertError where it is missing or null.

    Args:
        config: of any style.
        key: to read.
        instead: what the style's own tool would take, for the message.
    """
    if config.get(key) is None:
        raise ConvertError(
            f"config.json: {key} is missing{instead}. Write the value that the drafter was trained with."
        )
    return config[key]


def hinted(stated: int | None, hint: int | None, key: str, option: str) -> int:
    """A number that the configuration states or else the user; ConvertError for neither or two different ones."""
    if stated is None and hint is None:
        raise ConvertError(f"config.json does not state {key}. Say it by {option}.")
    if stated is not None and hint is not None and stated != hint:
        raise ConvertError(
            f"{key}: config.json states {stated}, {option} says {hint}. One of them is of another drafter."
        )
    return int(stated if stated is not None else hint or 0)


def lost_logit_scale(described: Described, reader: str) -> list[Loss]:
    """The output scale and soft cap, for a style without a place for them."""
    nested = described.published["dflash_config"]
    return [
        Loss(what=key, text=f"{reader} has no {key}; the drafter has {nested[key]}", drafts=True)
        for key in LOGIT_KEYS
        if key in nested
    ]
