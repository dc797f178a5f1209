"""Walking the selector over the blocks of a batch, from its flat supervised slots.

Supervision is a prefix of each block and flat slots are ordered by block, so the slots of consecutive blocks are
consecutive.

Letters: n blocks with a supervised slot, K drafted slots, N supervised slots of them all, H hidden, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2_train.blocks import BlockBatch
from dflash2_train.model.selector import CandidateSelector


@torch.no_grad()
def walk_paths(
    selector: CandidateSelector,
    hidden: Tensor,
    candidate_logits: Tensor,
    candidate_ids: Tensor,
    supervised: Tensor,
    anchor_ids: Tensor,
) -> Tensor:
    """The ids that the selector walks in every block, from the anchor on.

    Args:
        selector: of the drafter.
        hidden: [N, H] states of the supervised slots, block by block.
        candidate_logits: [N, C] fp32; with Gumbel noise added the walk is a draw at temperature 1.
        candidate_ids: [N, C].
        supervised: [n, K] bool, a prefix of each row; N True.
        anchor_ids: [n] token that each block starts from.

    Returns:
        [n, K] int64, meaningful where supervised.
    """
    if len(supervised) == 0:
        return torch.zeros(supervised.shape, dtype=torch.int64, device=hidden.device)
    hidden, logits, ids = (_lay_out(flat, supervised) for flat in (hidden, candidate_logits, candidate_ids))
    path, _ = selector.walk(hidden, logits, ids, anchor_ids)
    return path


@torch.no_grad()
def block_paths(
    selector: CandidateSelector, blocks: BlockBatch, hidden: Tensor, candidate_logits: Tensor, candidate_ids: Tensor
) -> Tensor:
    """:func:`walk_paths` over all blocks of a batch: [B, A, K] int64, meaningful where supervised."""
    started = blocks.supervised[..., 0]  # [B, A]
    path = torch.zeros_like(blocks.target_ids)
    anchors = blocks.block_ids[..., 0][started]  # [n]
    path[started] = walk_paths(selector, hidden, candidate_logits, candidate_ids, blocks.supervised[started], anchors)
    return path


def _lay_out(flat: Tensor, mask: Tensor) -> Tensor:
    """Rows [m, ...] of the True places of ``mask`` [n, K] as [n, K, ...], zeros elsewhere."""
    full = flat.new_zeros(*mask.shape, *flat.shape[1:])
    full[mask] = flat
    return full
