"""Batches on their way, the target's frozen tables, and the target itself where the host loads it."""

from __future__ import annotations

from dflash2_train.config import RunConfig
from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import STEP, Item

INDEX, FULL, STORED = 8, 4, 2  # bytes of int64, fp32, and of a tap state in bf16


def micro_batch_bytes(setting: Setting) -> int:
    """One packed micro-batch as it is read (``data.PackedBatch``), tap states in bf16.

    A token: T H tap states, k teacher ids (int64) and log-probabilities (fp32), three ids and a mask.
    """
    shape = setting.shape
    states = STORED * shape.num_taps * shape.hidden_size
    return setting.batch.context * (states + setting.teacher_top_k * (INDEX + FULL) + 3 * INDEX + 1)


def block_batch_bytes(setting: Setting) -> int:
    """The blocks of a micro-batch (``blocks.BlockBatch``): teacher, labels and predecessors of K slots, ids of W."""
    batch = setting.batch
    label = setting.teacher_top_k * (INDEX + FULL) + 2 * INDEX + 1
    return batch.labels * label + batch.slots * 2 * INDEX


def window_bytes(setting: Setting) -> int:
    """All micro-batches of a window as they are read."""
    return setting.train.accumulation * micro_batch_bytes(setting)


def device_window_bytes(setting: Setting) -> int:
    """What a window takes where it is trained on, beside :func:`window_bytes` on a CPU.

    The blocks of all micro-batches; on a GPU the moved batches; tap states again where they are cast to fp32.
    """
    blocks = setting.train.accumulation * block_batch_bytes(setting)
    states = setting.train.accumulation * setting.batch.context * setting.shape.num_taps * setting.shape.hidden_size
    cast = states * setting.itemsize if setting.itemsize != STORED else 0
    moved = 0 if setting.device == "cpu" else window_bytes(setting)
    return blocks + cast + moved


def read_ahead_bytes(setting: Setting) -> int:
    """Windows on the host (``prefetch.Prefetcher``): those ahead, and the one that is trained on."""
    return (setting.train.prefetch_windows + 1) * window_bytes(setting)


def frozen_bytes(setting: Setting) -> int:
    """The target's embedding [V, H] and head [V, H] in the training dtype; one table where they are tied."""
    tables = 1 if setting.tied else 2
    return tables * setting.itemsize * setting.shape.vocab_size * setting.shape.hidden_size


def buffer_items(setting: Setting) -> list[Item]:
    """Lines of the table for the place that is trained on."""
    items = [
        Item(
            group="frozen", name="embedding and head" + (", tied" if setting.tied else ""), size=frozen_bytes(setting)
        ),
        Item(group="data", name="window in training", size=device_window_bytes(setting), moments=STEP),
    ]
    if setting.device == "cpu":
        items.append(Item(group="data", name="windows read and ahead", size=read_ahead_bytes(setting)))
    return items


def target_bytes(config: RunConfig) -> int:
    """The target itself, where the host loads it: for attestation, and for decoding while validating."""
    loaded = config.data.attest.tokens > 0 or config.train.validation.decode_prompts > 0
    weights = config.target.num_parameters
    return 0 if weights is None or not loaded else int(weights * (2 if config.target.dtype == "bfloat16" else 4))
