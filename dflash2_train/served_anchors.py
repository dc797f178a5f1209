"""Moving a share of the anchors to where a server would start its blocks.

A server starts a block just behind a rejection or behind a block that was accepted whole; uniform anchors start
anywhere. To draw from the served starts without replaying a whole document token by token, a chosen anchor is moved
by a few rounds of drafting: the present drafter drafts from it, the drafts are compared with the text, and the anchor
moves to the token that ends the round (accepted drafts and one of the target's own). Every hop is one forward pass
over the chosen blocks without gradient. After the first hop each start lies behind a rejection or a whole block;
further hops let it forget where it began.

The text is a sample of the target, so "the draft equals the text" happens with the probability with which the target
would have accepted a greedy draft there: the replay has the law of the served chain.

What is chosen and where it goes hangs on (seed, sample id, anchor) and the weights alone. Anchors that meet are kept
once.

Letters: B rows, S context tokens, A blocks a row, K drafted slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dflash2_train.blocks import build_blocks
from dflash2_train.data import PackedBatch
from dflash2_train.draws import document_keys, uniform
from dflash2_train.losses import Moment
from dflash2_train.objective import Objective


@torch.no_grad()
def move_anchors(objective: Objective, batch: PackedBatch, *, block_size: int, moment: Moment) -> PackedBatch:
    """The batch with ``loss.served_anchor_share`` of its anchors moved by ``loss.served_anchor_hops`` rounds.

    Args:
        objective: whose drafter drafts; its parameters must be whole on this rank.
        batch: on the device of training.
        block_size: of the rounds, the anchor included.
        moment: for the run's seed.
    """
    share = objective.loss.served_anchor_share
    if share == 0:
        return batch
    chosen = _chosen(batch, share, moment.seed)  # [B, A]
    count = int(chosen.sum(1).max())
    if count == 0:
        return batch
    order = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :count]  # the chosen ones first
    valid = chosen.gather(1, order)
    positions = batch.anchor_positions.gather(1, order)
    for _ in range(objective.loss.served_anchor_hops):
        round_start = replace(batch, anchor_positions=positions, anchor_valid=valid)
        positions = torch.where(valid, next_anchors(objective, round_start, block_size), positions)
    merged = batch.anchor_positions.scatter(1, order, positions)
    return _without_repeats(batch, merged)


def next_anchors(objective: Objective, batch: PackedBatch, block_size: int) -> Tensor:
    """Where the next block of each anchor starts, [B, A]; the anchor itself where no block fits behind it."""
    blocks = build_blocks(batch, block_size=block_size, mask_token_id=objective.drafter.shape.mask_token_id)
    path = objective.drafted_path(batch, blocks)  # [B, A, K]
    hits = (path == blocks.target_ids) & blocks.supervised
    moved = batch.anchor_positions + hits.long().cumprod(-1).sum(-1) + 1
    last = batch.input_ids.shape[1] - 1
    here, label = moved.clamp(max=last), (moved + 1).clamp(max=last)
    documents = batch.document_ids
    fits = (moved < last) & batch.loss_mask.gather(1, here) & batch.loss_mask.gather(1, label)
    for place in (here, label):
        fits &= documents.gather(1, place) == blocks.block_document_ids
    return torch.where(fits, moved, batch.anchor_positions)


def _chosen(batch: PackedBatch, share: float, seed: int) -> Tensor:
    """Valid anchors that are to be moved, bool [B, A]."""
    keys = document_keys(batch.sample_ids, seed=seed, purpose="served anchor", device=batch.input_ids.device)
    documents = batch.document_ids.gather(1, batch.anchor_positions).clamp(min=0)  # [B, A]
    positions = batch.position_ids.gather(1, batch.anchor_positions)
    return batch.anchor_valid & (uniform(keys.gather(1, documents), positions) < share)


def _without_repeats(batch: PackedBatch, positions: Tensor) -> PackedBatch:
    """The batch with these anchors [B, A], ascending, each once."""
    length = batch.input_ids.shape[1]
    ascending = torch.where(batch.anchor_valid, positions, length).sort(1).values
    repeated = torch.zeros_like(batch.anchor_valid)
    repeated[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
    valid = (ascending < length) & ~repeated
    return replace(batch, anchor_positions=ascending.masked_fill(~valid, 0), anchor_valid=valid)
