"""The memory of every place against what it has, and settings that fit where these do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash2_train.config import RunConfig
from dflash2_train.planning.activations import activation_items
from dflash2_train.planning.buffers import buffer_items, read_ahead_bytes, target_bytes
from dflash2_train.planning.libraries import library_items
from dflash2_train.planning.losses import loss_items
from dflash2_train.planning.setting import Setting, fullest_batch, make_setting
from dflash2_train.planning.state import save_host_bytes, state_items
from dflash2_train.planning.timeline import SAVE, Item, Timeline, timeline_of

FITS, TIGHT, SHORT, UNKNOWN = "fits", "fits usual rows", "does not fit", "unknown"
GB = 1e9
ANCHORS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS_MIB = (64, 128, 256, 512, 1024, 2048)
MAX_ROWS = 64


def device_timeline(setting: Setting) -> Timeline:
    """Everything on one device; on a CPU, in one process."""
    tensors = timeline_of(
        state_items(setting),
        activation_items(setting),
        loss_items(setting),
        buffer_items(setting),
    )
    return timeline_of(tensors.items, library_items(setting, tensors))


def host_timeline(config: RunConfig, setting: Setting) -> Timeline:
    """What the processes of one machine with GPUs take of its own memory, all of them together."""
    return timeline_of(
        [
            Item(group="data", name="windows read and ahead, pinned", size=setting.ranks * read_ahead_bytes(setting)),
            Item(group="state", name="state gathered for saving", size=save_host_bytes(setting), moments=(SAVE,)),
            Item(group="frozen", name="target, for attestation or decoding", size=target_bytes(config)),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One place."""

    place: str
    needed: int  # bytes at the peak, for rows as they usually are
    needed_fullest: int  # for a row with a block at every token
    available: float | None  # bytes that may be taken; None = unknown

    @property
    def word(self) -> str:
        """Fits | fits usual rows | does not fit | unknown."""
        if self.available is None:
            return UNKNOWN
        if self.needed > self.available:
            return SHORT
        return FITS if self.needed_fullest <= self.available else TIGHT


def room(config: RunConfig) -> float | None:
    """Bytes of one device, or of one rank's part of a CPU's memory, that may be taken."""
    hardware = config.plan.hardware
    if hardware.memory_gb is None:
        return None
    whole = hardware.memory_gb * GB * config.plan.memory_share
    return whole if hardware.kind == "cuda" else whole / hardware.devices


def device_verdict(config: RunConfig) -> Verdict:
    """The device, with the config as it is."""
    setting = make_setting(config)
    fullest = setting.with_batch(fullest_batch(config))
    place = "a GPU" if setting.device == "cuda" else "a process"
    return Verdict(
        place=place,
        needed=device_timeline(setting).peak,
        needed_fullest=device_timeline(fullest).peak,
        available=room(config),
    )


def host_verdict(config: RunConfig) -> Verdict | None:
    """The machine around the GPUs; None for a CPU, where there is nothing beside the processes."""
    hardware, setting = config.plan.hardware, make_setting(config)
    if hardware.kind == "cpu":
        return None
    needed = host_timeline(config, setting).peak
    whole = None if hardware.host_memory_gb is None else hardware.host_memory_gb * GB * config.plan.memory_share
    return Verdict(place="host", needed=needed, needed_fullest=needed, available=whole)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Overrides of the command line, what they do, and what the device then takes."""

    overrides: dict[str, object]
    reason: str
    needed: int  # bytes

    @property
    def words(self) -> str:
        """As typed."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.overrides.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_overrides(config: RunConfig, overrides: dict[str, object]) -> RunConfig:
    """A copy of the config with dotted ``train.*`` and ``loss.*`` keys set."""
    parts: dict[str, dict[str, object]] = {"train": {}, "loss": {}}
    for key, value in overrides.items():
        section, name = key.split(".")
        parts[section][name] = value
    train = replace(config.train, **parts["train"])  # type: ignore[arg-type]
    return replace(config, train=train, loss=replace(config.loss, **parts["loss"]))  # type: ignore[arg-type]


def needed(config: RunConfig, overrides: dict[str, object]) -> int:
    """Bytes that the device would take with these overrides, for rows as they usually are."""
    return device_timeline(make_setting(with_overrides(config, overrides))).peak


def first_that_fits(config: RunConfig) -> Suggestion | None:
    """The mildest change that makes the step fit; None where none of those known does."""
    limit = room(config)
    assert limit is not None
    for reason, overrides in _ways_down(config):
        size = needed(config, overrides)
        if size <= limit:
            return Suggestion(overrides=overrides, reason=reason, needed=size)
    return None


def _ways_down(config: RunConfig) -> Iterator[tuple[str, dict[str, object]]]:
    """Changes that take less memory, those first that leave training as it is."""
    train, loss = config.train, config.loss
    same: dict[str, object] = {}
    if train.rows > 1:
        same = {"train.rows": 1, "train.accumulation": train.accumulation * train.rows}
        yield "one row at a time, the same window", dict(same)
    if not train.gradient_checkpointing:
        same["train.gradient_checkpointing"] = True
        yield "layers run again in the backward pass; same gradients, about a third more time", dict(same)
    if loss.chunk_mib > CHUNKS_MIB[0]:
        same["loss.chunk_mib"] = CHUNKS_MIB[0]
        yield "smaller chunks of logits as well", dict(same)
    if train.zero_stage == 1:
        same["train.zero_stage"] = 2
        yield "gradients shared out as well", dict(same)
    for anchors in reversed(ANCHORS):
        if anchors < train.anchors_per_document:
            yield "fewer blocks a document: this changes training", {**same, "train.anchors_per_document": anchors}


def largest(config: RunConfig, key: str, values: tuple[int, ...], **fixed: object) -> Suggestion | None:
    """The largest value of one key that fits, the others as configured or ``fixed``."""
    limit, best = room(config), None
    assert limit is not None
    for value in values:
        overrides = {**fixed, key: value}
        size = needed(config, overrides)
        if size <= limit:
            best = Suggestion(overrides=overrides, reason="the most that fits", needed=size)
    return best


def suggestions(config: RunConfig) -> list[Suggestion]:
    """What a step that fits could grow to, one key at a time; without and with checkpointing for the rows."""
    rows = tuple(range(1, MAX_ROWS + 1))
    plain = "train.gradient_checkpointing"
    found: list[Suggestion | None] = [
        _named(largest(config, "train.rows", rows, **{plain: False}), "most rows a rank, nothing computed again"),
        _named(largest(config, "train.rows", rows, **{plain: True}), "most rows a rank with checkpointing"),
        _named(largest(config, "train.anchors_per_document", ANCHORS), "most blocks a document of those tried"),
        _named(largest(config, "loss.chunk_mib", CHUNKS_MIB), "largest chunk of logits of those tried"),
    ]
    return [suggestion for suggestion in found if suggestion is not None]


def _named(suggestion: Suggestion | None, reason: str) -> Suggestion | None:
    return None if suggestion is None else replace(suggestion, reason=reason)
