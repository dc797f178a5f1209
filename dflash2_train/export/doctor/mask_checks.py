"""``mask_embedding.pt``: there, safe to read, of the right form, and trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash2_train.export.doctor.findings import RUNNER, VLLM, WARNING
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter
from dflash2_train.export.payload import MASK, MIN_MASK_NORM

check = DRAFTER_CHECKS.check
FLAT = 1e-3  # spread against the largest value, below which all elements count as equal


def recorded_mask(drafter: OpenedDrafter) -> bool:
    """Whether the drafter's own record says that it was exported with a mask vector."""
    return "mask_embedding_norm" in drafter.recorded_export


def usable_vector(drafter: OpenedDrafter) -> Tensor | None:
    """The vector as float32 [H], where it is one of numbers and of the right length."""
    vector = drafter.mask.vector if drafter.mask else None
    if vector is None or not vector.is_floating_point() or vector.numel() != drafter.top("hidden_size"):
        return None
    return vector.float().reshape(-1)


@check(
    "mask-missing",
    group="mask",
    rule=f"{MASK} lies beside config.json where the drafter was trained with a mask vector",
    servers=(VLLM, RUNNER),
    next_step="Copy the file too: without it vLLM drafts from the target's own row and says nothing",
)
def _missing(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.mask is None and recorded_mask(drafter):
        yield f"{MASK} is missing, and run.json says that this drafter has one"


@check(
    "mask-absent",
    group="mask",
    severity=WARNING,
    rule=f"{MASK} lies beside config.json where the drafter was trained with a mask vector",
    servers=(VLLM, RUNNER),
    next_step="Right only for a drafter trained with the target's own row of mask_token_id: ask its maker",
)
def _absent(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.mask is None and not recorded_mask(drafter):
        yield f"there is no {MASK}"


@check(
    "mask-code",
    group="mask",
    rule=f"{MASK} holds tensors and plain values",
    servers=(VLLM, RUNNER),
    next_step="Do not load it in any other way: it would run code. Ask its maker for a plain tensor",
)
def _code(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.mask and drafter.mask.code:
        yield f"{MASK} is a pickle that asks for code ({drafter.mask.code}); nothing of it was run"


@check(
    "mask-payload",
    group="mask",
    rule=f"{MASK} holds a tensor [H], or a dict with it under 'embedding'",
    servers=(VLLM, RUNNER),
    next_step="Save the bare bfloat16 tensor with torch.save, the one form that every loader takes",
)
def _payload(drafter: OpenedDrafter) -> Iterator[str]:
    mask, hidden = drafter.mask, drafter.top("hidden_size")
    if mask is None or mask.code:
        return
    if mask.vector is None:
        yield f"{MASK}: {mask.unusable}"
    elif hidden and mask.vector.numel() != hidden:
        yield f"{MASK} is {list(mask.vector.shape)}, hidden_size={hidden}"
    elif not mask.vector.is_floating_point() or mask.vector.element_size() < 2:
        yield f"{MASK} is {mask.vector.dtype}"


@check(
    "mask-form",
    group="mask",
    severity=WARNING,
    rule=f"{MASK} has a form that every loader takes",
    servers=(RUNNER,),
    next_step="Save the bare bfloat16 tensor [H]",
)
def _form(drafter: OpenedDrafter) -> Iterator[str]:
    mask, hidden = drafter.mask, drafter.top("hidden_size")
    if mask is None or mask.vector is None or usable_vector(drafter) is None:
        return
    if mask.is_dict and mask.stored_id is None:
        yield f"{MASK} is a dict without mask_token_id, so nothing tells which drafter it belongs to"
    if tuple(mask.vector.shape) not in ((hidden,), (1, hidden)):
        yield f"{MASK} is {list(mask.vector.shape)}: vLLM flattens it, others may not"


@check(
    "mask-owner",
    group="mask",
    rule="the id beside the vector is mask_token_id",
    servers=(VLLM, RUNNER),
    next_step="Take vector and config.json from one export; vLLM refuses this pair",
)
def _owner(drafter: OpenedDrafter) -> Iterator[str]:
    stored = drafter.mask.stored_id if drafter.mask else None
    if stored is not None and stored != drafter.mask_token_id:
        yield f"{MASK} is of token {stored}, mask_token_id={drafter.mask_token_id}"


@check(
    "mask-finite",
    group="mask",
    rule="the mask vector is finite",
    servers=(VLLM, RUNNER),
    next_step="Export from an earlier checkpoint",
)
def _finite(drafter: OpenedDrafter) -> Iterator[str]:
    vector = usable_vector(drafter)
    if vector is not None and not bool(torch.isfinite(vector).all()):
        yield f"{MASK} holds values that are not finite"


@check(
    "mask-untrained",
    group="mask",
    rule="the mask vector was trained",
    servers=(VLLM, RUNNER),
    next_step="Export from a later checkpoint",
)
def _untrained(drafter: OpenedDrafter) -> Iterator[str]:
    vector = usable_vector(drafter)
    if vector is None or not bool(torch.isfinite(vector).all()):
        return
    norm = float(vector.norm())
    if norm < MIN_MASK_NORM:
        yield f"{MASK} has norm {norm:.2e}, so it was never trained or was zeroed"
    elif float(vector.std(unbiased=False)) < FLAT * float(vector.abs().max()):
        yield f"{MASK}: all elements are equal"
