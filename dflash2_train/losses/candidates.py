"""The C best unary logits of a slot: finding them, and their logits with a gradient for the hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.losses.products import raw_logits
from dflash2_train.losses.shaping import Shaping
from dflash2_train.losses.sweep import Workspace, sweep_budget, tile_plan
from dflash2_train.model.gathered import gathered_dots, gathered_sums
from dflash2_train.shapes import padded_rows

MERGED_SHARE = 4  # groups found are merged once they are more than one for so many candidates


class CandidateSearch:
    """The ``count`` largest logits of each row of [M, V], of which tiles of columns come one after the other.

    A tile is searched by groups as in :func:`top_candidates`. Once a row has ``count`` candidates, only groups whose
    maximum is above the least of them are looked into: after some tiles, hardly any. What is found waits until it is
    worth a merge, which raises that least.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._values = self._ids = torch.empty(0, 0)  # [M, up to count] each, descending
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []  # rows [P], logits and ids [P, members] of groups

    def add(self, logits: Tensor, first_id: int) -> Tensor:
        """Search a tile [M, n] of ids from ``first_id`` on; its largest logit of each row, [M]."""
        groups = _Groups(logits, self._count)
        if self._values.shape[1] == self._count and groups.width >= 2 * self._count:
            maxima = groups.maxima()
            rows, columns = (maxima > self._values[:, -1:]).nonzero(as_tuple=True)
            if len(rows) <= self._values.numel():
                values, ids = groups.members(rows, columns)
                if self._found and self._found[-1][1].shape[1] != values.shape[1]:  # of a tile of another size
                    self._merge_found()
                self._found.append((rows, values, ids + first_id))
                if sum(len(rows) for rows, *_ in self._found) > self._values.numel() // MERGED_SHARE:
                    self._merge_found()
                return maxima.amax(1)
        values, ids = top_candidates(logits, min(self._count, logits.shape[1]))
        self._merge(values, ids + first_id)
        return values[:, 0]

    def best(self) -> tuple[Tensor, Tensor]:
        """Values and ids [M, count] of all tiles so far, descending."""
        if self._found:
            self._merge_found()
        return self._values, self._ids

    def _merge_found(self) -> None:
        rows, values, ids = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        self._found = []
        group, member = (values > self._values[rows, -1:]).nonzero(as_tuple=True)
        rows, order = rows[group].sort(stable=True)  # [Q]
        values, ids = values[group, member][order], ids[group, member][order]
        counts = rows.bincount(minlength=len(self._values))  # [M]
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]  # among the row's own
        shape = (len(counts), int(counts.max()))
        table, table_ids = values.new_full(shape, -torch.inf), ids.new_zeros(shape)
        table[rows, place], table_ids[rows, place] = values, ids
        self._merge(table, table_ids)

    def _merge(self, values: Tensor, ids: Tensor) -> None:
        if self._values.numel() > 0:
            values, ids = torch.cat([self._values, values], 1), torch.cat([self._ids, ids], 1)
        self._values, places = _topk(values, min(self._count, values.shape[1]))
        self._ids = ids.gather(1, places)


class _Groups:
    """Logits [M, n] in groups: number g holds the columns g, g + width, g + 2 width, ...

    The group size makes a search for the largest maxima and one through ``count`` groups about as long.
    """

    def __init__(self, logits: Tensor, count: int) -> None:
        vocab = logits.shape[1]
        self.size = 1 << max(0, round(math.log2(max(1.0, vocab / count)) / 2))
        self.width = vocab // self.size
        self._logits = logits
        self._steps = torch.arange(0, vocab, self.width, device=logits.device)

    def maxima(self) -> Tensor:
        """[M, width]."""
        whole = self.width * self.size
        maxima = self._logits[:, :whole].unflatten(1, (self.size, self.width)).amax(1)
        rest = self._logits[:, whole:]  # fewer than ``size``: one more member of the first groups
        if rest.shape[1] > 0:
            first = maxima[:, : rest.shape[1]]
            torch.maximum(first, rest, out=first)
        return maxima

    def members(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and columns [P, members] of the groups at ``rows`` and ``columns`` [P]; -inf where there is none."""
        ids = columns[:, None] + self._steps
        if len(self._steps) == self.size:  # all groups are as long
            return self._logits[rows[:, None], ids], ids
        last = self._logits.shape[1] - 1
        return self._logits[rows[:, None], ids.clamp(max=last)].masked_fill(ids > last, -torch.inf), ids


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries of each row, descending: values and ids [M, count]. ``count`` <= V.

    ``topk`` over a vocabulary costs more than its softmax, so the search has two stages: each of the largest logits
    makes its group one of the ``count`` groups with the largest maxima, so only those are searched.
    """
    groups = _Groups(logits, count)
    if groups.width < 2 * count:
        return _topk(logits, count)
    columns = groups.maxima().topk(count, dim=-1, sorted=False).indices  # [M, count]
    rows = torch.arange(len(logits), device=logits.device)
    found, ids = groups.members(rows.repeat_interleave(count), columns.flatten())  # [M * count, members]
    values, places = _topk(found.view(len(logits), -1), count)
    return values, ids.view(len(logits), -1).gather(1, places)


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


def known_logits(
    hidden: Tensor,
    head_weight: Tensor,
    candidate_ids: Tensor,
    logits: Tensor,
    *,
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
) -> Tensor:
    """:func:`candidate_logits` whose values [N, C] a sweep has found already: only the gradient gathers the head."""
    check_head(hidden, head_weight)
    shaping = Shaping(multiplier=output_multiplier, cap=final_logit_softcapping)
    arguments = (hidden, logits, head_weight.detach(), candidate_ids, shaping)
    known: Tensor = _KnownLogits.apply(*arguments)  # type: ignore[no-untyped-call]
    return known


class _KnownLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logits: Tensor, head_weight: Tensor, candidate_ids: Tensor, shaping: Shaping
    ) -> Tensor:
        ctx.save_for_backward(logits, head_weight, candidate_ids)
        ctx.shaping, ctx.dtype = shaping, hidden.dtype
        return logits.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, head_weight, candidate_ids = ctx.saved_tensors
        by_raw = slope * ctx.shaping.slope(logits)
        return gathered_sums(by_raw, head_weight, candidate_ids).to(ctx.dtype), None, None, None, None


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
