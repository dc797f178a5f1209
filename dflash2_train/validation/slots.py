"""What the drafter does in every block of a row: one forward pass over a few hundred blocks at a time.

The sweep of the training loss gives candidates and normaliser, so no logits of a whole row ever exist. Of each slot
only a few flags and numbers leave the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dflash2_train.blocks import BlockBatch, build_blocks
from dflash2_train.data import PackedBatch
from dflash2_train.losses import UnaryLoss, candidate_logits
from dflash2_train.objective import Objective
from dflash2_train.paths import block_paths

BLOCKS_AT_ONCE = 512  # as many as the recipe trains on in a document


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The n blocks of a row, by ascending anchor, on the CPU. Flags and numbers are False and 0 where unsupervised."""

    anchors: Tensor  # [n] int64, index in the row
    supervised: Tensor  # [n, K] bool
    selector: Tensor  # [n, K] bool: the walked path holds the data token
    unary: Tensor  # [n, K] bool: the best unary logit is the data token's
    oracle: Tensor  # [n, K] bool: the data token is among the candidates
    confidence: Tensor  # [n, K] fp32, the drafter's probability of its best token
    judged: Tensor  # [n, K] bool: a teacher's row is there
    overlap: Tensor  # [n, K] fp32, sum over the teacher's ids of min(p, q): at most the acceptance of a sampled draft
    overlap_bound: Tensor  # [n, K] fp32, with the rest of the vocabulary as one token more: at least that

    @classmethod
    def joined(cls, parts: Iterable[BlockTable]) -> BlockTable:
        """Consecutive parts of a row as one."""
        listed = list(parts)
        return cls(**{one.name: torch.cat([getattr(part, one.name) for part in listed]) for one in fields(cls)})

    def kept(self, chosen: Tensor) -> BlockTable:
        """The blocks that ``chosen`` [n] bool flags."""
        return BlockTable(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


@torch.no_grad()
def read_blocks(objective: Objective, batch: PackedBatch) -> BlockTable:
    """Every block of one row that has a label at all.

    Args:
        objective: whose drafter drafts; its parameters must be whole on this rank.
        batch: one row with all its anchors, on the objective's device and in its dtype.
    """
    shape = objective.drafter.shape
    parts = []
    for start in range(0, batch.anchor_positions.shape[1], BLOCKS_AT_ONCE):
        span = slice(start, start + BLOCKS_AT_ONCE)
        some = replace(
            batch, anchor_positions=batch.anchor_positions[:, span], anchor_valid=batch.anchor_valid[:, span]
        )
        blocks = build_blocks(some, block_size=shape.block_size, mask_token_id=shape.mask_token_id)
        parts.append(_read(objective, some, blocks))
    table = BlockTable.joined(parts)
    return table.kept(table.supervised[:, 0])


def coarse_overlap(log_q: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ``sum_V min(p, q)`` from the teacher's stored top-T, [N] each.

    The lower one sums over T alone. The upper one takes all the rest of the vocabulary for one token.

    Args:
        log_q: [N, T] drafter log-probabilities of the teacher's ids.
        teacher_logprobs: [N, T], -inf where an entry is not part of T. In half precision they may add up to a little
            over 1; such rows are scaled to 1, as in the loss.
    """
    present = teacher_logprobs > -torch.inf
    p = torch.where(present, teacher_logprobs, -torch.inf).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=1.0)
    q = torch.where(present, log_q.exp(), 0.0)
    inside = torch.minimum(p, q).sum(-1)
    return inside, inside + torch.minimum(1.0 - p.sum(-1), 1.0 - q.sum(-1)).clamp(min=0.0)


def _read(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> BlockTable:
    hidden, unary = objective.read_slots(batch, blocks)
    mask = blocks.supervised[0]  # [n, K]
    path = block_paths(
        objective.drafter.candidate_selector, blocks, hidden, unary.candidate_logits, unary.candidate_ids
    )
    teacher_logprobs = blocks.teacher_logprobs[0][mask]  # [N, T]
    overlap, bound = _overlap(objective, hidden, unary, blocks.teacher_ids[0][mask], teacher_logprobs)
    inside = (unary.candidate_ids == blocks.target_ids[0][mask][:, None]).any(-1)  # [N]
    confidence = (unary.candidate_logits[:, 0] - unary.log_normaliser).exp()
    judged = (teacher_logprobs > -torch.inf).any(-1)
    return BlockTable(
        anchors=blocks.anchor_positions[0].cpu(),
        supervised=mask.cpu(),
        selector=((path == blocks.target_ids)[0] & mask).cpu(),
        unary=_lay_out(unary.top1_correct, mask),
        oracle=_lay_out(inside, mask),
        confidence=_lay_out(confidence, mask),
        judged=_lay_out(judged, mask),
        overlap=_lay_out(overlap * judged, mask),
        overlap_bound=_lay_out(bound * judged, mask),
    )


def _overlap(
    objective: Objective, hidden: Tensor, unary: UnaryLoss, teacher_ids: Tensor, teacher_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    shape = objective.drafter.shape
    logits = candidate_logits(
        hidden,
        objective.frozen.head,
        teacher_ids,
        output_multiplier=shape.output_multiplier,
        final_logit_softcapping=shape.final_logit_softcapping,
    )
    return coarse_overlap(logits - unary.log_normaliser[:, None], teacher_logprobs)


def _lay_out(flat: Tensor, mask: Tensor) -> Tensor:
    """Values [N] of the True places of ``mask`` [n, K] as [n, K] on the CPU, zeros elsewhere."""
    full = flat.new_zeros(mask.shape)
    full[mask] = flat
    return full.cpu()
