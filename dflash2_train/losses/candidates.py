"""The C best unary logits of a slot: finding them, and their logits with a gradient for the hidden states."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash2_train.losses.products import raw_logits
from dflash2_train.losses.shaping import Shaping
from dflash2_train.losses.sweep import Workspace, sweep_budget, tile_plan
from dflash2_train.model.gathered import gathered_dots
from dflash2_train.shapes import padded_rows


class CandidateSearch:
    """The ``count`` largest logits of each row of [M, V], of which tiles of columns come one after the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
        """Search a tile [M, n] of ids from ``first_id`` on; its own best values and columns, descending."""
        values, columns = top_candidates(logits, min(self._count, logits.shape[1]))
        self._found.append((values, columns + first_id))
        return values, columns

    def best(self) -> tuple[Tensor, Tensor]:
        """Values and ids [M, count] of all tiles so far, descending."""
        if len(self._found) == 1:
            return self._found[0]
        values, ids = (torch.cat(parts, 1) for parts in zip(*self._found, strict=True))
        largest, places = _topk(values, self._count)
        return largest, ids.gather(1, places)


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries of each row, descending: values and ids [M, count]. ``count`` <= V.

    ``topk`` over a vocabulary costs more than its softmax, so the search has two stages. Column g of the groups holds
    the logits g, g + width, g + 2 width, ...; each of the largest logits makes its group one of the ``count`` groups
    with the largest maxima, so only those (and what is left over at the end) are searched. The group size makes both
    stages about as long.
    """
    vocab = logits.shape[1]
    group = 1 << max(0, round(math.log2(max(1.0, vocab / count)) / 2))
    width = vocab // group
    if width < 2 * count:
        return _topk(logits, count)
    grouped = logits[:, : width * group].unflatten(1, (group, width))
    groups = grouped.amax(1).topk(count, dim=-1, sorted=False).indices  # [M, count]
    ids = (groups[:, None] + torch.arange(group, device=logits.device)[:, None] * width).flatten(1)
    rest = torch.arange(width * group, vocab, device=logits.device)
    return best_of(logits, torch.cat([ids, rest.expand(len(ids), -1)], 1), count)


def best_of(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of the logits [M, V] at ``ids`` [M, n], descending: values and ids [M, count]."""
    values, places = _topk(logits.gather(1, ids), count)
    return values, ids.gather(1, places)


def _topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found = logits.topk(count, dim=-1)
    return found.values, found.indices


@torch.no_grad()
def unary_candidates(
    hidden: Tensor,
    head_weight: Tensor,
    top_k: int,
    *,
    chunk_bytes: int,
    logit_share: float = 0.1,
    shaping: Shaping,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest logits of each row without a loss: values [N, C] fp32 and ids [N, C], descending.

    Args:
        hidden: [N, H].
        head_weight: [V, H], same dtype.
        top_k: C.
        chunk_bytes: memory, as in :func:`unary_loss`.
        logit_share: likewise.
        shaping: what the model does to raw logits.
        workspace: as in :func:`unary_loss`.
    """
    check_head(hidden, head_weight)
    padded, workspace = padded_rows(hidden), workspace or Workspace()
    budget = sweep_budget(hidden, head_weight, chunk_bytes, logit_share)
    plan = tile_plan(head_weight, len(padded), budget, capped=False)
    values = torch.empty((len(hidden), top_k), dtype=hidden.dtype, device=hidden.device)
    ids = torch.empty((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), plan.rows):
        states = padded[start : start + plan.rows]
        piece = slice(start, min(start + plan.rows, len(hidden)))
        search = CandidateSearch(top_k)
        for columns in plan.tiles(len(head_weight)):
            raw = raw_logits(states, head_weight[columns], workspace)
            search.add(raw[: piece.stop - start], columns.start)
        values[piece], ids[piece] = search.best()
    return shaping.apply(values), ids


def candidate_logits(
    hidden: Tensor,
    head_weight: Tensor,
    candidate_ids: Tensor,
    *,
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
) -> Tensor:
    """The drafter's own logits of given candidates, differentiable in ``hidden`` only.

    Args:
        hidden: [N, H].
        head_weight: [V, H] frozen, same dtype as ``hidden``.
        candidate_ids: [N, C] int64.
        output_multiplier: factor of the raw logits, as in :func:`unary_loss`.
        final_logit_softcapping: c of ``c * tanh(z / c)``, or None.

    Returns:
        [N, C] fp32 (fp64 for fp64 inputs).
    """
    if hidden.dim() != 2 or candidate_ids.dim() != 2 or len(hidden) != len(candidate_ids):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and candidate_ids {tuple(candidate_ids.shape)} must be [N, H] and [N, C]."
        )
    check_head(hidden, head_weight)
    shaping = Shaping(multiplier=output_multiplier, cap=final_logit_softcapping)
    return shaping.differentiable(gathered_dots(hidden, head_weight.detach(), candidate_ids))


def inject_gold(candidate_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Candidates in which the data token replaces the last one where it is missing.

    For the loss only: recall and acceptance are measured on the candidates as served, before this.

    Args:
        candidate_ids: [N, C] int64, descending by logit.
        target_ids: [N] int64.

    Returns:
        [N, C] int64, a new tensor.
    """
    missing = ~(candidate_ids == target_ids[:, None]).any(-1)  # [N]
    injected = candidate_ids.clone()
    injected[:, -1] = torch.where(missing, target_ids, candidate_ids[:, -1])
    return injected


def check_head(hidden: Tensor, head_weight: Tensor) -> None:
    """Refuse a head that does not fit the states.

    Raises:
        ValueError: they do not share H.
        TypeError: they differ in dtype.
    """
    if head_weight.dim() != 2 or hidden.shape[-1] != head_weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)} must share their last axis, H."
        )
    if hidden.dtype != head_weight.dtype:
        raise TypeError(
            f"hidden is {hidden.dtype}, head_weight {head_weight.dtype}: load the frozen head in the drafter's dtype."
        )
