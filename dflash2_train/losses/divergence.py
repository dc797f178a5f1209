"""Divergence of the drafter from the teacher's stored top-T, and its gradient by the logits; formulas in ``losses``.

All arithmetic is on [M, T], so it costs nothing beside the vocabulary and is the same for every implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_TAIL = 1e-6  # floor of 1 - Q in the tail bucket; its gradient stops there too


class TeacherTerms(NamedTuple):
    """The divergence of each row and its gradient: ``dKL/dz_j = row_scale q_j + [j in T] correction_j``."""

    kl: Tensor  # [M]
    row_scale: Tensor  # [M]
    corrections: Tensor  # [M, T]
    sum_min_pq: Tensor  # [M]


class _TopK(NamedTuple):
    """Drafter and teacher on the T ids; entries that are absent have probability 0."""

    present: Tensor  # [M, T] bool
    p: Tensor  # [M, T]
    q: Tensor  # [M, T]
    log_p: Tensor  # [M, T], -inf where absent
    log_q: Tensor  # [M, T]
    mass_p: Tensor  # [M]
    mass_q: Tensor  # [M]


def teacher_terms(log_q: Tensor, teacher_logprobs: Tensor, kl_kind: str) -> TeacherTerms:
    """Divergence against the stored top-T and its gradient by the logits.

    Args:
        log_q: [M, T] drafter log-probabilities of the teacher's ids.
        teacher_logprobs: [M, T], -inf where an entry is not part of T. Stored in half precision they may add up to a
            little over 1; such rows are scaled to 1.
        kl_kind: one of ``KL_KINDS`` that is defined on a top-T.
    """
    present = teacher_logprobs > -torch.inf
    q = torch.where(present, log_q.exp(), 0.0)
    p = torch.where(present, teacher_logprobs, -torch.inf).exp()
    excess = p.sum(-1, keepdim=True).clamp(min=1.0)  # [M, 1]
    p = p / excess
    top = _TopK(present, p, q, teacher_logprobs - excess.log(), log_q, p.sum(-1), q.sum(-1))
    kl, row_scale, corrections = _KINDS[kl_kind](top)
    return TeacherTerms(kl, row_scale, corrections, torch.minimum(p, q).sum(-1))


def _tail_bucket(top: _TopK) -> tuple[Tensor, Tensor, Tensor]:
    tail_p = (1.0 - top.mass_p).clamp(min=0.0)
    free_q = 1.0 - top.mass_q
    tail_q = free_q.clamp(min=MIN_TAIL)
    kl = _truncated(top)[0] + torch.xlogy(tail_p, tail_p) - tail_p * tail_q.log()
    ratio = torch.where(free_q >= MIN_TAIL, tail_p / tail_q, 0.0)  # a clamped tail is a constant
    return kl, top.mass_p - ratio * top.mass_q, ratio[:, None] * top.q - top.p


def _truncated(top: _TopK) -> tuple[Tensor, Tensor, Tensor]:
    return _sum_where(top.present, top.p * (top.log_p - top.log_q)), top.mass_p, -top.p


def _renormalised(top: _TopK) -> tuple[Tensor, Tensor, Tensor]:
    within_p = top.p / top.mass_p.clamp(min=torch.finfo(top.p.dtype).tiny)[:, None]
    log_within_p = top.log_p - top.mass_p.log()[:, None]
    log_within_q = top.log_q - torch.where(top.present, top.log_q, -torch.inf).logsumexp(-1, keepdim=True)
    kl = _sum_where(top.present, within_p * (log_within_p - log_within_q))
    within_q = torch.where(top.present, log_within_q.exp(), 0.0)
    return kl, torch.zeros_like(kl), within_q - within_p


def _total_variation(top: _TopK) -> tuple[Tensor, Tensor, Tensor]:
    missing = top.mass_q - top.mass_p  # minus the difference in the tail
    has_teacher = top.present.any(-1)
    distance = 0.5 * ((top.p - top.q).abs().sum(-1) + missing.abs())
    by_q = 0.5 * ((top.q - top.p).sign() + missing.sign()[:, None])  # d distance / d q_i
    pull = by_q * top.q
    kl = torch.where(has_teacher, distance, 0.0)
    return kl, -pull.sum(-1), pull


_KINDS = {
    "tail_bucket": _tail_bucket,
    "truncated": _truncated,
    "renormalised": _renormalised,
    "total_variation": _total_variation,
}


def _sum_where(present: Tensor, terms: Tensor) -> Tensor:
    return torch.where(present, terms, 0.0).sum(-1)
