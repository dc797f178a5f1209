"""The selector's loss: cross-entropy over the candidates that it chooses from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SelectorLoss(NamedTuple):
    """Of one micro-batch. Only ``loss_sum`` is meant to be differentiated."""

    loss_sum: Tensor  # [] fp32, weighted; part of the graph of the scores even where no row counts
    counted: Tensor  # [N] bool, rows that are supervised and hold their data token
    cross_entropy: Tensor  # [N] fp32, nats; log C where a row does not count


def selector_loss(
    scores: Tensor, candidate_ids: Tensor, target_ids: Tensor, weights: Tensor, *, injected: bool
) -> SelectorLoss:
    """Cross-entropy of the selector over its candidates, fp32.

    Args:
        scores: [N, C] selector scores.
        candidate_ids: [N, C] int64; after :func:`inject_gold` where ``injected``.
        target_ids: [N] int64.
        weights: [N] fp32; 0 is unsupervised.
        injected: every supervised row must hold its data token. Otherwise one that does not has weight 0.

    Raises:
        ValueError: shapes, or a miss although ``injected``.
    """
    per_row = scores.shape[:1]
    if scores.dim() != 2 or candidate_ids.shape != scores.shape or not target_ids.shape == weights.shape == per_row:
        raise ValueError(
            f"scores {tuple(scores.shape)}, candidate_ids {tuple(candidate_ids.shape)}, target_ids "
            f"{tuple(target_ids.shape)} and weights {tuple(weights.shape)} must be [N, C], [N, C], [N] and [N]."
        )
    supervised = weights > 0
    matches = candidate_ids == target_ids[:, None]  # [N, C]
    hits = matches.any(-1) & supervised
    if injected and not torch.equal(hits, supervised):
        raise ValueError("injected=True: a supervised row lacks its data token. Call inject_gold before scoring.")
    work = torch.promote_types(scores.dtype, torch.float32)
    counted = torch.where(hits[:, None], scores.to(work), 0.0)  # rows that do not count must not spread a NaN
    gold = counted.gather(-1, matches.to(torch.int8).argmax(-1, keepdim=True)).squeeze(-1)
    cross_entropy = counted.logsumexp(-1) - gold  # [N]
    return SelectorLoss((cross_entropy * torch.where(hits, weights, 0.0)).sum(), hits, cross_entropy.detach())
