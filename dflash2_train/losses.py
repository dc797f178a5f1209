"""The training losses of a drafter, from hidden states to differentiable sums.

A block slot k = 1..K weighs ``w_k = exp(-(k - 1) / gamma)``. With drafter logits z over the whole vocabulary,
``q = softmax(z)``, data token y, the teacher's stored top-T ids with probabilities p (exact softmax of the target),
``P = sum_T p`` and ``Q = sum_T q``, the unary loss of a slot is ``ce_weight * CE + kl_weight * KL``:

    CE            -log q_y
    tail_bucket   sum_T p (log p - log q) + (1 - P) [log(1 - P) - log(1 - Q)]      >= 0, minimal at q = p on T
    truncated     sum_T p (log p - log q)                                          may be negative
    renormalised  sum_T (p / P) [log(p / P) - log(q / Q)]                          ratios inside T only

Logits are ``softcap(output_multiplier * hidden @ head^T)``, the product in the parameters' dtype as served, all
that follows in fp32. The head is frozen: nothing here makes a gradient for it. :func:`unary_loss` never holds
[N, V]: it sweeps the supervised rows in chunks and turns each chunk of logits into a chunk of hidden gradient before
the next one. With ``r = (1 - P) / (1 - Q)`` the gradient of every variant has the shape

    dKL/dz_j = row_scale * q_j + [j in T] correction_j
    tail_bucket   row_scale = P - r Q   correction = r q - p      (that is 1 - r off T, q - p on T)
    truncated     row_scale = P         correction = -p
    renormalised  row_scale = 0         correction = q / Q - p / P

so one softmax buffer is scaled by row, corrected at T + 1 places and multiplied by the head.

Letters: N rows (slots of all blocks), M rows of a chunk, V vocabulary, H hidden, T teacher ids, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.config import KL_KINDS, MISSING_CANDIDATE

MIN_TAIL = 1e-6  # floor of 1 - Q in the tail bucket; its gradient stops there too
_LOGIT_BYTES = 4  # one fp32 logit, the unit of chunk_bytes
_GATHERED_ELEMENTS = 1 << 22  # head elements that candidate_logits gathers at once


class UnaryLoss(NamedTuple):
    """What one sweep over the logits yields. Only ``loss_sum`` carries a gradient.

    Rows without weight hold zeros (False) in every per-row field.
    """

    loss_sum: Tensor  # [] fp32, sum_n w_n (ce_weight CE_n + kl_weight KL_n)
    ce_sum: Tensor  # [] fp32, sum_n w_n CE_n, nats
    kl_sum: Tensor  # [] fp32, sum_n w_n KL_n, nats
    candidate_ids: Tensor  # [N, C] int64, the C largest logits, descending
    log_normaliser: Tensor  # [N] fp32, log sum_V exp(z)
    top1_correct: Tensor  # [N] bool, argmax z == target id
    sum_min_pq: Tensor  # [N] fp32, sum_T min(p, q): a lower bound of the acceptance probability sum_V min(p, q)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    ce_weight: float
    kl_weight: float
    kl_kind: str
    top_k: int
    output_multiplier: float
    final_logit_softcapping: float | None


class _Rows(NamedTuple):
    """Supervised rows of the batch, or a chunk of them."""

    hidden: Tensor  # [M, H]
    target_ids: Tensor  # [M]
    weights: Tensor  # [M] fp32
    teacher_ids: Tensor  # [M, T]
    teacher_logprobs: Tensor  # [M, T] fp32

    def chunk(self, start: int, stop: int) -> _Rows:
        return _Rows(*(tensor[start:stop] for tensor in self))


class _RowResults(NamedTuple):
    """Per-row results of a sweep."""

    ce: Tensor  # [M] fp32
    kl: Tensor  # [M] fp32
    candidate_ids: Tensor  # [M, C] int64
    log_normaliser: Tensor  # [M] fp32
    top1_correct: Tensor  # [M] bool
    sum_min_pq: Tensor  # [M] fp32


class _TeacherTerms(NamedTuple):
    """The KL of each row and its gradient by the logits, see the module's formulas."""

    kl: Tensor  # [M]
    row_scale: Tensor  # [M]
    corrections: Tensor  # [M, T]
    sum_min_pq: Tensor  # [M]


def position_weights(num_drafted: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """Slot weights ``exp(-(k - 1) / gamma)`` for k = 1..K, [K] fp32."""
    return torch.exp(-torch.arange(num_drafted, dtype=torch.float32, device=device) / gamma)


def unary_loss(
    hidden: Tensor,
    head_weight: Tensor,
    target_ids: Tensor,
    weights: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
    kl_kind: str,
    top_k: int,
    chunk_bytes: int,
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
) -> UnaryLoss:
    """Weighted CE and top-T KL of the drafter's own logits, in one sweep that never holds [N, V].

    Args:
        hidden: [N, H] drafter states after the final norm; the only input that gets a gradient.
        head_weight: [V, H] frozen output head, same dtype as ``hidden``.
        target_ids: [N] int64 data tokens.
        weights: [N] fp32; rows at 0 are left out of the sweep altogether.
        teacher_ids: [N, T] int64, unique within a row.
        teacher_logprobs: [N, T] log-probabilities of the target. An entry at -inf is not part of T; a row of them
            only is a row without teacher and has KL 0.
        ce_weight: factor of the CE.
        kl_weight: factor of the KL (beta).
        kl_kind: ``tail_bucket``, ``truncated`` or ``renormalised``.
        top_k: C, candidates a row.
        chunk_bytes: fp32 logits alive at once, bytes; at least one row is swept at a time. A 16-bit model holds
            half as much again for the raw product, softcapping as much again for its slope.
        output_multiplier: factor of the raw logits, positive.
        final_logit_softcapping: c of ``c * tanh(z / c)``, or None.

    Raises:
        ValueError: shapes that do not belong together or an unknown ``kl_kind``.
        TypeError: ``hidden`` and ``head_weight`` differ in dtype.
    """
    _check_unary_inputs(hidden, head_weight, target_ids, weights, teacher_ids, teacher_logprobs)
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind={kl_kind!r}: must be one of {KL_KINDS}.")
    settings = _Settings(
        ce_weight=ce_weight,
        kl_weight=kl_weight,
        kl_kind=kl_kind,
        top_k=top_k,
        output_multiplier=output_multiplier,
        final_logit_softcapping=final_logit_softcapping,
    )
    supervised = (weights > 0).nonzero().squeeze(-1)  # [Ns]
    rows = _Rows(
        hidden.index_select(0, supervised),
        target_ids[supervised],
        weights[supervised],
        teacher_ids[supervised],
        teacher_logprobs[supervised],
    )
    chunk_rows = max(1, chunk_bytes // (_LOGIT_BYTES * head_weight.shape[0]))
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    results, gradient = _sweep(rows, head_weight, settings, chunk_rows, with_gradient)
    ce_sum = (results.ce * rows.weights).sum()
    kl_sum = (results.kl * rows.weights).sum()
    loss_sum = ce_weight * ce_sum + kl_weight * kl_sum
    if gradient is not None:
        loss_sum = _AttachGradient.apply(rows.hidden, loss_sum, gradient)  # type: ignore[no-untyped-call]
    spread = (_spread(result, supervised, hidden.shape[0]) for result in results[2:])
    return UnaryLoss(loss_sum, ce_sum, kl_sum, *spread)


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
    _check_head(hidden, head_weight)
    logits: Tensor = _CandidateLogits.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight.detach(), candidate_ids, output_multiplier, final_logit_softcapping
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


def selector_loss(
    scores: Tensor,
    candidate_ids: Tensor,
    target_ids: Tensor,
    weights: Tensor,
    missing_candidate: str,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the selector over its candidates, fp32.

    Args:
        scores: [N, C] selector scores.
        candidate_ids: [N, C] int64; for ``missing_candidate="inject"`` after :func:`inject_gold`.
        target_ids: [N] int64.
        weights: [N] fp32; 0 is unsupervised.
        missing_candidate: ``mask``: a row whose data token is no candidate has weight 0. ``inject``: there is no such
            row.

    Returns:
        The weighted sum [] fp32, part of the graph of ``scores`` even where no row counts, and the rows [N] bool that
        are supervised and hold their data token.

    Raises:
        ValueError: shapes, an unknown ``missing_candidate``, or a miss under ``inject``.
    """
    if missing_candidate not in MISSING_CANDIDATE:
        raise ValueError(f"missing_candidate={missing_candidate!r}: must be one of {MISSING_CANDIDATE}.")
    per_row = scores.shape[:1]
    if scores.dim() != 2 or candidate_ids.shape != scores.shape or not target_ids.shape == weights.shape == per_row:
        raise ValueError(
            f"scores {tuple(scores.shape)}, candidate_ids {tuple(candidate_ids.shape)}, target_ids "
            f"{tuple(target_ids.shape)} and weights {tuple(weights.shape)} must be [N, C], [N, C], [N] and [N]."
        )
    supervised = weights > 0
    matches = candidate_ids == target_ids[:, None]  # [N, C]
    hits = matches.any(-1) & supervised
    if missing_candidate == "inject" and not torch.equal(hits, supervised):
        raise ValueError(
            "missing_candidate='inject': a supervised row lacks its data token. Call inject_gold before scoring."
        )
    work = torch.promote_types(scores.dtype, torch.float32)
    counted = torch.where(hits[:, None], scores.to(work), 0.0)  # rows that do not count must not spread a NaN
    gold = counted.gather(-1, matches.to(torch.int8).argmax(-1, keepdim=True)).squeeze(-1)
    cross_entropy = counted.logsumexp(-1) - gold  # [N]
    return (cross_entropy * torch.where(hits, weights, 0.0)).sum(), hits


def _check_head(hidden: Tensor, head_weight: Tensor) -> None:
    if head_weight.dim() != 2 or hidden.shape[-1] != head_weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)} must share their last axis, H."
        )
    if hidden.dtype != head_weight.dtype:
        raise TypeError(
            f"hidden is {hidden.dtype}, head_weight {head_weight.dtype}: load the frozen head in the drafter's dtype."
        )


def _check_unary_inputs(
    hidden: Tensor,
    head_weight: Tensor,
    target_ids: Tensor,
    weights: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
) -> None:
    _check_head(hidden, head_weight)
    rows = hidden.shape[:1]
    if hidden.dim() != 2 or target_ids.shape != rows or weights.shape != rows:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, target_ids {tuple(target_ids.shape)} and weights {tuple(weights.shape)} "
            "must be [N, H], [N] and [N]."
        )
    if teacher_ids.dim() != 2 or teacher_ids.shape[:1] != rows or teacher_logprobs.shape != teacher_ids.shape:
        raise ValueError(
            f"teacher_ids {tuple(teacher_ids.shape)} and teacher_logprobs {tuple(teacher_logprobs.shape)} "
            f"must both be [N, T] with N={rows[0]}."
        )


@torch.no_grad()
def _sweep(
    rows: _Rows, head_weight: Tensor, settings: _Settings, chunk_rows: int, with_gradient: bool
) -> tuple[_RowResults, Tensor | None]:
    """All rows, ``chunk_rows`` at a time, through buffers made once."""
    count = len(rows.hidden)
    buffers = _Buffers(min(chunk_rows, count), head_weight, settings)
    gradient = torch.empty_like(rows.hidden) if with_gradient else None
    chunks = []
    for start in range(0, count, chunk_rows):
        stop = min(start + chunk_rows, count)
        piece = None if gradient is None else gradient[start:stop]
        chunks.append(_sweep_chunk(rows.chunk(start, stop), head_weight, settings, buffers, piece))
    if not chunks:
        return _empty_results(rows, settings.top_k, buffers.work_dtype), gradient
    return _RowResults(*(torch.cat(parts) for parts in zip(*chunks, strict=True))), gradient


def _sweep_chunk(
    rows: _Rows, head_weight: Tensor, settings: _Settings, buffers: _Buffers, gradient: Tensor | None
) -> _RowResults:
    """Logits, losses and (written to ``gradient`` [M, H]) the weighted gradient of the chunk's hidden states."""
    logits, slope = buffers.logits(rows.hidden, head_weight, settings)  # [M, V]
    top_logits, candidate_ids = logits.topk(settings.top_k, dim=-1)  # [M, C]
    targets = rows.target_ids[:, None]  # [M, 1]
    gold = logits.gather(-1, targets).squeeze(-1)
    teacher_logits = logits.gather(-1, rows.teacher_ids)  # [M, T]
    softmax = torch.softmax(logits, -1, out=logits)  # in place: the logits are spent
    largest = softmax.gather(-1, candidate_ids[:, :1]).squeeze(-1)
    log_normaliser = top_logits[:, 0] - largest.log()  # one look-up in place of a pass over V
    teacher = _teacher_terms(
        teacher_logits - log_normaliser[:, None], rows.teacher_logprobs.to(logits.dtype), settings.kl_kind
    )
    if gradient is not None:
        weights = rows.weights.to(logits.dtype)
        softmax.mul_((weights * (settings.ce_weight + settings.kl_weight * teacher.row_scale))[:, None])
        softmax.scatter_add_(-1, rows.teacher_ids, teacher.corrections * (settings.kl_weight * weights)[:, None])
        softmax.scatter_add_(-1, targets, (-settings.ce_weight * weights)[:, None])
        buffers.write_hidden_gradient(softmax, slope, head_weight, gradient)
    return _RowResults(
        log_normaliser - gold,
        teacher.kl,
        candidate_ids,
        log_normaliser,
        candidate_ids[:, 0] == rows.target_ids,
        teacher.sum_min_pq,
    )


class _Buffers:
    """The [M, V] memory of a sweep, made once: fresh pages cost more than the arithmetic done on them.

    ``raw`` holds the product in the parameters' dtype and later the logit gradient cast back to it; ``work`` the
    logits, then the softmax, then their gradient (the same memory as ``raw`` for fp32 parameters); ``slope`` the
    derivative of softcapped logits by the raw product, only where there is a softcap.
    """

    def __init__(self, chunk_rows: int, head_weight: Tensor, settings: _Settings) -> None:
        shape = (chunk_rows, head_weight.shape[0])
        self.work_dtype = torch.promote_types(head_weight.dtype, torch.float32)
        self._raw = torch.empty(shape, dtype=head_weight.dtype, device=head_weight.device)
        self._work = self._raw
        if self.work_dtype != head_weight.dtype:
            self._work = torch.empty(shape, dtype=self.work_dtype, device=head_weight.device)
        self._slope = None if settings.final_logit_softcapping is None else torch.empty_like(self._work)
        self._multiplier = settings.output_multiplier

    def logits(self, hidden: Tensor, head_weight: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None]:
        """Logits [M, V] in the work dtype and the softcap's slope [M, V] or None; both are views of the buffers."""
        count = len(hidden)
        raw, logits = self._raw[:count], self._work[:count]
        torch.mm(hidden, head_weight.t(), out=raw)
        if logits.dtype != raw.dtype:
            logits.copy_(raw)
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        cap = settings.final_logit_softcapping
        if cap is None or self._slope is None:
            return logits, None
        logits.div_(cap).tanh_()
        slope = self._slope[:count]
        torch.mul(logits, logits, out=slope)
        slope.neg_().add_(1.0)  # d cap*tanh(u / cap) / du = 1 - tanh^2
        logits.mul_(cap)
        return logits, slope

    def write_hidden_gradient(
        self, logit_gradient: Tensor, slope: Tensor | None, head_weight: Tensor, gradient: Tensor
    ) -> None:
        """Chain the logits' gradient [M, V] through softcap, multiplier and head into ``gradient`` [M, H]."""
        if slope is not None:
            logit_gradient.mul_(slope)
        if self._multiplier != 1.0:
            logit_gradient.mul_(self._multiplier)
        raw = self._raw[: len(logit_gradient)]
        if raw.dtype != logit_gradient.dtype:
            raw.copy_(logit_gradient)
        torch.mm(raw, head_weight, out=gradient)


def _teacher_terms(log_q: Tensor, teacher_logprobs: Tensor, kl_kind: str) -> _TeacherTerms:
    """KL against the stored top-T and its gradient by the logits.

    Args:
        log_q: [M, T] drafter log-probabilities of the teacher's ids.
        teacher_logprobs: [M, T], -inf where an entry is not part of T. Stored in half precision they may add up to a
            little over 1; such rows are scaled to 1.
        kl_kind: one of ``KL_KINDS``.
    """
    present = teacher_logprobs > -torch.inf
    q = torch.where(present, log_q.exp(), 0.0)
    p = torch.where(present, teacher_logprobs, -torch.inf).exp()
    excess = p.sum(-1, keepdim=True).clamp(min=1.0)  # [M, 1]
    p = p / excess
    log_p = teacher_logprobs - excess.log()
    mass_p, mass_q = p.sum(-1), q.sum(-1)  # [M]
    sum_min = torch.minimum(p, q).sum(-1)
    if kl_kind == "renormalised":
        within_p = p / mass_p.clamp(min=torch.finfo(p.dtype).tiny)[:, None]
        log_within_p = log_p - mass_p.log()[:, None]
        log_within_q = log_q - torch.where(present, log_q, -torch.inf).logsumexp(-1, keepdim=True)
        kl = _sum_where(present, within_p * (log_within_p - log_within_q))
        within_q = torch.where(present, log_within_q.exp(), 0.0)
        return _TeacherTerms(kl, torch.zeros_like(kl), within_q - within_p, sum_min)
    kl = _sum_where(present, p * (log_p - log_q))
    if kl_kind == "truncated":
        return _TeacherTerms(kl, mass_p, -p, sum_min)
    tail_p = (1.0 - mass_p).clamp(min=0.0)
    free_q = 1.0 - mass_q
    tail_q = free_q.clamp(min=MIN_TAIL)
    kl = kl + torch.xlogy(tail_p, tail_p) - tail_p * tail_q.log()
    ratio = torch.where(free_q >= MIN_TAIL, tail_p / tail_q, 0.0)  # a clamped tail is a constant
    return _TeacherTerms(kl, mass_p - ratio * mass_q, ratio[:, None] * q - p, sum_min)


def _sum_where(present: Tensor, terms: Tensor) -> Tensor:
    return torch.where(present, terms, 0.0).sum(-1)


def _empty_results(rows: _Rows, top_k: int, dtype: torch.dtype) -> _RowResults:
    per_row = rows.weights.new_empty(0, dtype=dtype)
    candidate_ids = rows.target_ids.new_empty(0, top_k)
    return _RowResults(
        per_row, per_row, candidate_ids, per_row, rows.target_ids.new_empty(0, dtype=torch.bool), per_row
    )


def _spread(compact: Tensor, supervised: Tensor, count: int) -> Tensor:
    """Rows of the sweep back at their places among all N; zeros elsewhere."""
    full = compact.new_zeros(count, *compact.shape[1:])
    full[supervised] = compact
    return full


class _AttachGradient(torch.autograd.Function):
    """A value whose gradient by ``hidden`` is already known: backward only scales it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # Promoted first: a 16-bit tensor times a scalar tensor would round the scalar as well.
        scaled = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * grad_output
        return scaled.to(gradient.dtype), None, None


class _CandidateLogits(torch.autograd.Function):
    """Gathered head rows times hidden, chunked; see :func:`candidate_logits`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, candidate_ids: Tensor, multiplier: float, cap: float | None
    ) -> Tensor:
        work = torch.promote_types(hidden.dtype, torch.float32)
        logits = torch.empty(candidate_ids.shape, dtype=work, device=hidden.device)
        for piece in _gather_pieces(candidate_ids, hidden.shape[1]):
            head_rows = head_weight[candidate_ids[piece]]  # [M, C, H]
            logits[piece] = torch.bmm(head_rows, hidden[piece].unsqueeze(-1)).squeeze(-1)  # [M, C]
        logits.mul_(multiplier)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        ctx.save_for_backward(head_weight, candidate_ids, logits if cap is not None else None)
        ctx.multiplier, ctx.cap, ctx.hidden_dtype = multiplier, cap, hidden.dtype
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        head_weight, candidate_ids, logits = ctx.saved_tensors
        slope = grad_output * ctx.multiplier  # [N, C]
        if logits is not None:
            slope = slope * (1.0 - (logits / ctx.cap) ** 2)
        gradient = torch.empty(len(slope), head_weight.shape[1], dtype=ctx.hidden_dtype, device=slope.device)
        for piece in _gather_pieces(candidate_ids, head_weight.shape[1]):
            head_rows = head_weight[candidate_ids[piece]].to(slope.dtype)  # [M, C, H]
            gradient[piece] = torch.bmm(slope[piece].unsqueeze(1), head_rows).squeeze(1)  # [M, H]
        return gradient, None, None, None, None


def _gather_pieces(candidate_ids: Tensor, hidden_size: int) -> list[slice]:
    """Row ranges whose gathered head rows stay within the element limit."""
    count, candidates = candidate_ids.shape
    step = max(1, _GATHERED_ELEMENTS // max(1, candidates * hidden_size))
    return [slice(start, start + step) for start in range(0, count, step)]
