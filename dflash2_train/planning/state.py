"""Weights, gradients and optimizer state of one rank, as DeepSpeed 0.19 and the engine lay them out.

Which of DeepSpeed's optimizers runs hangs on stage and dtype (``engine._configure_optimizer``):

| stage, dtype  | weights | gradients                                     | masters | moments |
|---------------|---------|-----------------------------------------------|---------|---------|
| 0, fp32       | 4 P     | 4 P, and a bucket of them                     | none    | 8 P     |
| 1, bf16       | 2 P     | 2 P, and sums in fp32 of all parameters, 4 P  | 4 P / R | 8 P / R |
| 1, fp32       | 4 P     | 4 P, and a bucket of them                     | 4 P / R | 8 P / R |
| 2, bf16, fp32 | e P     | a bucket; the own share in fp32, 2 or 3 times | 4 P / R | 8 P / R |
| 3 (not offered) | e P / R, and one layer whole | as stage 2               | 4 P / R | 8 P / R |

P counts the flat buffers, padding included. The moving average (``train.ema_decay``) is one more share of masters.
"""

from __future__ import annotations

from dataclasses import replace

from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.planning.parameters import count_parameters, largest_parameter, optimizer_groups, parameter_sizes
from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import LAYERS, LOSS, SAVE, STEP, UPDATE, Item

BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size, and of the fallback's buffer
FULL = 4  # bytes of fp32
GROUP = "state"


def flat_elements(setting: Setting) -> int:
    """P of the table: elements of all flat buffers; stage 0 has none, so there it is the parameters' own number."""
    if setting.train.zero_stage == 0:
        return count_parameters(setting.shape)
    return sum(optimizer_groups(setting.shape, setting.train, setting.ranks).values())


def state_items(setting: Setting) -> list[Item]:
    """Everything that stays from step to step, and what the optimizer step takes beside it."""
    stage, e, ranks = setting.train.zero_stage, setting.itemsize, setting.ranks
    whole, share = flat_elements(setting), flat_elements(setting) // ranks
    weights = e * whole if stage < 3 else e * share + e * _largest_layer(setting.shape)
    items = [Item(group=GROUP, name="weights", size=weights), *gradient_items(setting)]
    if stage > 0:
        items.append(Item(group=GROUP, name="fp32 masters", size=FULL * share))
    moments = share if stage > 0 else whole
    items.append(Item(group=GROUP, name="AdamW's two moments", size=2 * FULL * moments))
    if setting.train.ema_decay is not None:
        items.append(Item(group=GROUP, name="moving average", size=FULL * moments))
    return [*items, *save_items(setting)]


def gradient_items(setting: Setting) -> list[Item]:
    """Gradients in the training dtype, their fp32 sums, and the buffers in which they are reduced.

    A gradient lives from its backward pass to the end of the step. While most activations are alive, the first
    micro-batch of a window has made those of the selector alone.
    """
    stage, e, whole = setting.train.zero_stage, setting.itemsize, flat_elements(setting)
    share = whole // setting.ranks
    early = whole if setting.train.accumulation > 1 else _selector(setting.shape)
    items = []
    if stage < 2:
        items.append(Item(group=GROUP, name="gradients so far", size=e * early, moments=(LOSS, LAYERS)))
        items.append(Item(group=GROUP, name="gradients", size=e * whole, moments=(UPDATE,)))
    groups = list(optimizer_groups(setting.shape, setting.train, setting.ranks).values())
    if stage == 0:
        # ``buffered_allreduce_fallback`` lays a bucket of gradients side by side, on one rank too.
        copies = reduce_buffer_bytes(list(parameter_sizes(setting.shape).values()))
        items.append(Item(group=GROUP, name="bucket of gradients to reduce", size=copies, moments=(UPDATE,)))
    elif stage == 1 and setting.train.dtype == "bfloat16":
        items.append(Item(group=GROUP, name="fp32 sums of gradients", size=FULL * whole))
        buffer = reduce_buffer_bytes(groups)
        items.append(Item(group=GROUP, name="gradients to reduce", size=buffer, moments=(UPDATE,)))
    elif stage == 1:
        # The own share is laid side by side when the gradients it comes from are gone.
        items.append(Item(group=GROUP, name="reduce bucket", size=_bucket(setting), moments=(UPDATE,)))
    else:
        # The share of earlier micro-batches; then that of the last one, and both laid side by side.
        again = setting.train.accumulation > 1
        items.append(Item(group=GROUP, name="reduce bucket", size=_bucket(setting), moments=STEP))
        if setting.train.dtype == "bfloat16":  # summed over the ranks in fp32
            wide = _bucket(setting) // e * FULL
            items.append(Item(group=GROUP, name="reduce bucket, fp32", size=wide, moments=STEP))
        earlier = FULL * share if again else 0
        items.append(Item(group=GROUP, name="own share of gradients, fp32", size=earlier, moments=STEP))
        last = (3 if again else 2) * FULL * share
        items.append(Item(group=GROUP, name="own share of gradients, fp32", size=last, moments=(UPDATE,)))
    return items


def reduce_buffer_bytes(sizes: list[int]) -> int:
    """Of ``buffered_allreduce_fallback`` over fp32 gradients, one by one or by groups: a bucket laid side by side.

    Buckets are filled with whole ones until they hold more than ``BUCKET`` elements; a lone one is not copied.
    """
    return FULL * max(size if several else 0 for size, several in _buckets(sizes))


def _buckets(sizes: list[int]) -> list[tuple[int, bool]]:
    """Elements of each bucket, and whether it holds more than one tensor."""
    buckets, held, members = [], 0, 0
    for size in sizes:
        held, members = held + size, members + 1
        if held > BUCKET:
            buckets.append((held, members > 1))
            held, members = 0, 0
    return buckets + ([(held, members > 1)] if members else [])


def _bucket(setting: Setting) -> int:
    """DeepSpeed's contiguous reduce bucket; a CPU has only the part of it that was written."""
    size = BUCKET if setting.device == "cuda" else min(BUCKET, flat_elements(setting))
    return setting.itemsize * size


def _selector(shape: DrafterShape) -> int:
    """Elements of the selector, whose gradients come first."""
    return sum(size for name, size in parameter_sizes(shape).items() if name.startswith("candidate_selector."))


def _largest_layer(shape: DrafterShape) -> int:
    """Elements of a layer, or of a codebook if that is more: what stage 3 holds whole at a time."""
    sizes = parameter_sizes(shape)
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    return max(layer, largest_parameter(shape))


def save_items(setting: Setting) -> list[Item]:
    """``engine.gather`` on the first rank: one kind of state whole in fp32, and the masters it stands in for.

    On a GPU only the tensor that is being gathered is on the device; :func:`save_host_bytes` is the rest.
    """
    one = FULL * largest_parameter(setting.shape)
    items = [Item(group=GROUP, name="a tensor being gathered", size=one, moments=(SAVE,))]
    if setting.device == "cpu":
        items.append(
            Item(group=GROUP, name="state gathered for saving", size=save_host_bytes(setting), moments=(SAVE,))
        )
    return items


def save_host_bytes(setting: Setting) -> int:
    """Host memory of ``engine.gather``: a kind of state whole in fp32, and a copy of this rank's masters."""
    whole = FULL * count_parameters(setting.shape)
    return whole + FULL * flat_elements(setting) // (setting.ranks if setting.train.zero_stage > 0 else 1)


def state_by_stage(setting: Setting) -> dict[int, int]:
    """Bytes in the optimizer step at every ZeRO stage that the dtype allows, and at stage 3 for comparison."""
    totals: dict[int, int] = {}
    for stage in (0, 1, 2, 3):
        if stage == 0 and setting.train.dtype == "bfloat16":
            continue  # DeepSpeed has no bf16 with fp32 accumulation there
        at_stage = replace(setting, train=replace(setting.train, zero_stage=stage))
        totals[stage] = sum(item.size for item in state_items(at_stage) if UPDATE in item.moments)
    return totals
