"""Scheduled sampling: the selector trains, now and then, behind a token of its own choice.

In the text every slot follows the right token; when serving, a slot follows whatever the path chose before it. With
some probability a slot's predecessor is therefore the token at the slot before of a path that the present drafter
draws at temperature 1 from the candidates as served. The first slot follows the anchor, always.

Draws hang on (seed, step, sample id, anchor, slot) alone.

Letters: B rows, A blocks a row, K drafted slots, N supervised slots, H hidden, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash2_train.blocks import BlockBatch
from dflash2_train.draws import document_keys, gumbel, uniform
from dflash2_train.losses import Moment, UnaryLoss
from dflash2_train.model.selector import CandidateSelector
from dflash2_train.paths import block_paths


@torch.no_grad()
def partly_sampled(
    selector: CandidateSelector,
    blocks: BlockBatch,
    hidden: Tensor,
    unary: UnaryLoss,
    *,
    share: float,
    moment: Moment,
    sample_ids: Sequence[Sequence[str]],
) -> Tensor:
    """Predecessors of the supervised slots, [N] int64.

    Args:
        selector: of the drafter.
        blocks: of the batch.
        hidden: [N, H] states of the supervised slots.
        unary: of the same slots.
        share: probability of a sampled predecessor.
        moment: seed and step of the draws.
        sample_ids: of each row's documents.
    """
    keys = document_keys(sample_ids, seed=moment.seed, purpose="predecessor", device=hidden.device)  # [B, D]
    keys = keys.gather(1, blocks.block_document_ids.clamp(min=0))[..., None, None]  # [B, A, 1, 1]
    anchor = blocks.block_position_ids[..., :1, None]  # [B, A, 1, 1]
    slot = torch.arange(blocks.supervised.shape[-1], device=hidden.device)[:, None]  # [K, 1]
    candidate = torch.arange(unary.candidate_ids.shape[-1], device=hidden.device)  # [C]
    noise = gumbel(keys, moment.step, anchor, slot, candidate)  # [B, A, K, C]
    noisy = unary.candidate_logits + noise[blocks.supervised].to(unary.candidate_logits.dtype)
    path = block_paths(selector, blocks, hidden, noisy, unary.candidate_ids)  # [B, A, K]
    own = uniform(keys, moment.step, anchor, slot, -1).squeeze(-1) < share  # [B, A, K]; no candidate has rank -1
    predecessors = blocks.predecessor_ids.clone()
    predecessors[..., 1:] = torch.where(own[..., 1:], path[..., :-1], predecessors[..., 1:])
    return predecessors[blocks.supervised]
