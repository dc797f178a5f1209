"""The C best unary logits of a slot: finding them, and their logits with a gradient for the hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.losses.shaping import Shaping
from dflash2_train.losses.sweep import Workspace, sweep_budget

GROUP = 64  # logits that share one maximum in the search for the largest
_GATHERED_ELEMENTS = 1 << 22  # head elements that candidate_logits gathers at once


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries of each row, descending: values and ids [M, count]. ``count`` <= V.

    ``topk`` over a vocabulary costs more than its softmax, so the search has two stages. Column g of the groups holds
    the logits g, g + width, g + 2 width, ...; each of the largest logits makes its group one of the ``count`` groups
    with the largest maxima, so only those (and what is left over at the end) are searched.
    """
    vocab = logits.shape[1]
    width = vocab // GROUP
    if width < 2 * count:
        return _topk(logits, count)
    grouped = logits[:, : width * GROUP].unflatten(1, (GROUP, width))
    groups = grouped.amax(1).topk(count, dim=-1, sorted=False).indices  # [M, count]
    ids = (groups[:, None] + torch.arange(GROUP, device=logits.device)[:, None] * width).flatten(1)
    rest = torch.arange(width * GROUP, vocab, device=logits.device)
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
    vocab = head_weight.shape[0]
    budget = sweep_budget(hidden, head_weight, chunk_bytes, logit_share)
    chunk = max(1, budget // (vocab * head_weight.element_size()))
    values = torch.empty((len(hidden), top_k), dtype=hidden.dtype, device=hidden.device)
    ids = torch.empty((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
    raw = (workspace or Workspace()).take("raw", (min(chunk, len(hidden)), vocab), head_weight)
    for start in range(0, len(hidden), chunk):
        piece = slice(start, min(start + chunk, len(hidden)))
        logits = torch.mm(hidden[piece], head_weight.t(), out=raw[: piece.stop - start])
        values[piece], ids[piece] = top_candidates(logits, top_k)
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

    Head rows are gathered a chunk at a time, in the forward and again in the backward pass.

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
    logits: Tensor = _CandidateLogits.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight.detach(), candidate_ids, shaping
    )
    return logits


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


class _CandidateLogits(torch.autograd.Function):
    """Gathered head rows times hidden, chunked; see :func:`candidate_logits`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_weight: Tensor, candidate_ids: Tensor, shaping: Shaping) -> Tensor:
        work = torch.promote_types(hidden.dtype, torch.float32)
        logits = torch.empty(candidate_ids.shape, dtype=work, device=hidden.device)
        for piece in _gather_pieces(candidate_ids, hidden.shape[1]):
            head_rows = head_weight[candidate_ids[piece]]  # [M, C, H]
            logits[piece] = torch.bmm(head_rows, hidden[piece].unsqueeze(-1)).squeeze(-1)  # [M, C]
        shaping.apply_(logits)
        ctx.save_for_backward(head_weight, candidate_ids, logits if shaping.cap is not None else None)
        ctx.shaping, ctx.hidden_dtype = shaping, hidden.dtype
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        head_weight, candidate_ids, logits = ctx.saved_tensors
        slope = grad_output * (ctx.shaping.multiplier if logits is None else ctx.shaping.slope(logits))  # [N, C]
        gradient = torch.empty(len(slope), head_weight.shape[1], dtype=ctx.hidden_dtype, device=slope.device)
        for piece in _gather_pieces(candidate_ids, head_weight.shape[1]):
            head_rows = head_weight[candidate_ids[piece]].to(slope.dtype)  # [M, C, H]
            gradient[piece] = torch.bmm(slope[piece].unsqueeze(1), head_rows).squeeze(1)  # [M, H]
        return gradient, None, None, None


def _gather_pieces(candidate_ids: Tensor, hidden_size: int) -> list[slice]:
    """Row ranges whose gathered head rows stay within the element limit."""
    count, candidates = candidate_ids.shape
    step = max(1, _GATHERED_ELEMENTS // max(1, candidates * hidden_size))
    return [slice(start, start + step) for start in range(0, count, step)]
