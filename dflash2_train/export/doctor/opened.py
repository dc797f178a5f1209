"""A drafter's configuration as found, read without trust: a value of another kind than it should have reads as None.

Checks must be able to look at a broken file, so nothing here raises. The check of required keys tells what is missing;
all others look at what is there.

Letters: H hidden size, L drafter layers, T taps, V vocabulary, W block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash2_train.export.doctor.findings import Registry
from dflash2_train.export.doctor.mask_file import MaskFile, read_mask_file
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.doctor.weights import Weights
from dflash2_train.export.payload import MASK, RECORD, TOOL, read_json
from dflash2_train.export.published import NO_SECOND, SECOND_KEYS, expected_tensors
from dflash2_train.model.drafter_config import ARCHITECTURE, DrafterShape

SIZE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def whole(value: object) -> int | None:
    """``value`` if it is a whole number, true and false not counted."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """``value`` if it is a number, true and false not counted."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def tensor_shape(sizes: Sequence[int | None], second: Sequence[int | None], num_taps: int) -> DrafterShape | None:
    """The drafter's shape as far as tensors have one; fields without a share in them get neutral values.

    Args:
        sizes: values of ``SIZE_KEYS``.
        second: values of ``SECOND_KEYS``.
        num_taps: T.

    Returns:
        None where a value is missing or the values fit no drafter, which checks of their own report.
    """
    if num_taps < 1 or None in sizes or None in second:
        return None
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab = (size or 0 for size in sizes)
    kernel, group, rank, width = (size or 0 for size in second)
    try:
        return DrafterShape(
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=max(kv_heads, 1),
            head_dim=head_dim,
            intermediate_size=intermediate,
            vocab_size=vocab,
            target_layer_ids=tuple(range(num_taps)),
            num_target_layers=num_taps,
            block_size=2,
            mask_token_id=0,
            layer_types=("full_attention",) * layers,
            sliding_window=None,
            conv_kernel_size=kernel,
            conv_group_size=max(group, 1),
            selector_rank=rank,
            selector_top_k=width,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=1,
        )
    except ValueError:
        return None


class OpenedDrafter:
    """A drafter folder, or its configuration alone where ``folder`` is None."""

    def __init__(self, config: dict[str, Any], folder: Path | None = None, target: TargetFacts | None = None) -> None:
        self.config = config
        self.folder = folder
        self.target = target
        nested = config.get("dflash_config")
        self.nested: dict[str, Any] = nested if isinstance(nested, dict) else {}

    def either(self, key: str) -> Any:
        """A key that readers take from ``dflash_config`` first and from the top level then."""
        return self.nested[key] if self.nested.get(key) is not None else self.config.get(key)

    def top(self, key: str) -> int | None:
        """A whole number at the top level."""
        return whole(self.config.get(key))

    @cached_property
    def architectures(self) -> list[Any]:
        """``architectures``, or an empty list."""
        stated = self.config.get("architectures")
        return stated if isinstance(stated, list) else []

    @cached_property
    def is_second(self) -> bool:
        """DFlash 2: with convolutions and selector. DFlash says nothing of them."""
        return ARCHITECTURE in self.architectures or any(key in self.nested for key in SECOND_KEYS)

    @cached_property
    def layer_types(self) -> list[Any] | None:
        """One entry a layer, or None where none are stated."""
        stated = self.config.get("layer_types")
        return stated if isinstance(stated, list) else None

    @property
    def has_sliding_layers(self) -> bool:
        """Whether any layer says that it slides."""
        return "sliding_attention" in (self.layer_types or [])

    @cached_property
    def taps(self) -> list[int] | None:
        """``target_layer_ids`` if it is a filled list of whole numbers."""
        stated = self.either("target_layer_ids")
        if not isinstance(stated, list) or not stated or any(whole(tap) is None for tap in stated):
            return None
        return list(stated)

    @property
    def block_size(self) -> int | None:
        """W, the anchor counted."""
        return whole(self.either("block_size"))

    @property
    def num_proposals(self) -> int | None:
        """Tokens that servers are to propose: as its record says, else all slots but the anchor."""
        recorded = whole(self.recorded_export.get("num_proposals"))
        return recorded if recorded is not None or self.block_size is None else self.block_size - 1

    @property
    def mask_token_id(self) -> int | None:
        """The id whose embedding stands in the slots to be drafted."""
        return whole(self.either("mask_token_id"))

    @cached_property
    def expected_tensors(self) -> dict[str, tuple[int, ...]] | None:
        """Name -> shape of exactly the published tensors, or None where the configuration does not give them."""
        shape = self._tensor_shape()
        return None if shape is None else expected_tensors(shape, 2 if self.is_second else 1)

    def _tensor_shape(self) -> DrafterShape | None:
        second = [whole(self.nested.get(key)) for key in SECOND_KEYS] if self.is_second else list(NO_SECOND)
        return tensor_shape([self.top(key) for key in SIZE_KEYS], second, len(self.taps or []))

    @cached_property
    def weights(self) -> Weights:
        """The tensors; of a configuration alone there are none."""
        return Weights(self.folder)

    @cached_property
    def mask(self) -> MaskFile | None:
        """The trained mask vector's file, or None where there is none."""
        return None if self.folder is None else read_mask_file(self.folder / MASK)

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """``run.json`` if it is there and readable."""
        if self.folder is None or not (self.folder / RECORD).exists():
            return None
        try:
            return read_json(self.folder / RECORD)
        except ValueError:
            return None

    @property
    def recorded_export(self) -> dict[str, Any]:
        """How this project exported it, as ``run.json`` says; empty for anyone else's drafter."""
        record = self.record or {}
        settings = record.get("export") if record.get("tool") == TOOL else None
        return settings if isinstance(settings, dict) else {}


DRAFTER_CHECKS: Registry[OpenedDrafter] = Registry()
