"""One module from a packed batch to a loss: blocks, masks, drafter, losses. This is what the engine wraps.

    loss = scale * (sum_n w_n (ce * CE_n + beta * KL_n) + ramp * alpha * sum_n w_n SEL_n) / D

n runs over the supervised slots of this micro-batch, w is the position weight, and D the sum of w over the
whole global window (all ranks, all micro-batches), known before the forward because it hangs on masks alone.
``scale`` undoes the engine's division by world size and accumulation, so one global window gives one update, however it
is spread. The frozen embedding and head are held outside the module tree: the engine neither shards, casts nor
saves them.

Letters: B rows, S context tokens, A blocks a row, W block size, K = W - 1, N supervised slots, H hidden, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dflash2_train.blocks import BlockBatch
from dflash2_train.config import LossConfig
from dflash2_train.data import PackedBatch
from dflash2_train.losses import (
    UnaryLoss,
    candidate_logits,
    inject_gold,
    position_weights,
    selector_loss,
    unary_loss,
)
from dflash2_train.masks import context_masks
from dflash2_train.metrics import MetricSums, prefix_acceptance
from dflash2_train.model.drafter import Drafter
from dflash2_train.target import FrozenHead

WALKED_BLOCKS = 256  # blocks a micro-batch on which the served path is walked for the record; bounds its memory


class StepOutput(NamedTuple):
    """Scalar loss for the engine, and additive sums for the record."""

    loss: Tensor
    sums: MetricSums


class _Slots(NamedTuple):
    """The N supervised slots of a micro-batch, flat."""

    hidden: Tensor  # [N, H]
    target_ids: Tensor  # [N]
    predecessor_ids: Tensor  # [N]
    weights: Tensor  # [N] fp32


class Objective(nn.Module):
    """The drafter with its losses.

    Args:
        drafter: trained.
        frozen: the target's embedding [V, H] and head [V, H], on the device and in the dtype of training.
        loss: weights and variants.
    """

    def __init__(self, drafter: Drafter, frozen: FrozenHead, loss: LossConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss = loss
        self.frozen: FrozenHead
        self.__dict__["frozen"] = frozen  # past nn.Module's registration, on purpose

    def window_weight(self, blocks: BlockBatch) -> Tensor:
        """Sum of position weights over the supervised slots of one micro-batch, scalar fp32."""
        weights = position_weights(blocks.supervised.shape[-1], self.loss.gamma, blocks.supervised.device)
        return (blocks.supervised.to(torch.float32) * weights).sum()

    def forward(
        self, batch: PackedBatch, blocks: BlockBatch, *, denominator: Tensor, scale: float, selector_ramp: float
    ) -> StepOutput:
        """Loss and sums of one micro-batch.

        Args:
            batch: B rows of S tokens; tap states in the training dtype.
            blocks: their A blocks a row, of the drafter's block size or shorter.
            denominator: D, scalar fp32.
            scale: world size times accumulation.
            selector_ramp: factor 0..1 on the selector's weight.
        """
        slots = self._slots(batch, blocks)
        unary = self._unary(slots, blocks)
        scores, offered = self._selector_scores(slots, unary)
        selector_sum, _ = selector_loss(scores, offered, slots.target_ids, slots.weights, self.loss.missing_candidate)
        total = unary.loss_sum + selector_ramp * self.loss.selector_weight * selector_sum
        sums = self._sums(blocks, slots, unary, selector_sum)
        return StepOutput(loss=total * (scale / denominator), sums=sums)

    def _slots(self, batch: PackedBatch, blocks: BlockBatch) -> _Slots:
        shape, supervised = self.drafter.shape, blocks.supervised  # [B, A, K]
        context = self.drafter.encode_context(batch.tap_hidden)  # [B, S, H]
        embedded = self.drafter.embed_blocks(blocks.block_ids, self.frozen.embedding)  # [B, A, W, H]
        visible = context_masks(
            shape.layer_types,
            shape.sliding_window,
            anchor_positions_local=blocks.block_position_ids[..., 0],
            block_document_ids=blocks.block_document_ids,
            block_valid=blocks.block_valid,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
            block_size=blocks.block_ids.shape[-1],
        )
        hidden = self.drafter(embedded, context, blocks.block_position_ids, batch.position_ids, visible)
        weights = position_weights(supervised.shape[-1], self.loss.gamma, hidden.device)  # [K]
        return _Slots(
            hidden=hidden[:, :, 1:][supervised],  # [B, A, W, H] without the anchor's slot -> [N, H]
            target_ids=blocks.target_ids[supervised],
            predecessor_ids=blocks.predecessor_ids[supervised],
            weights=weights.expand_as(supervised)[supervised],
        )

    def _unary(self, slots: _Slots, blocks: BlockBatch) -> UnaryLoss:
        shape, loss = self.drafter.shape, self.loss
        return unary_loss(
            slots.hidden,
            self.frozen.head,
            slots.target_ids,
            slots.weights,
            blocks.teacher_ids[blocks.supervised],
            blocks.teacher_logprobs[blocks.supervised],
            ce_weight=loss.ce_weight,
            kl_weight=loss.kl_weight,
            kl_kind=loss.kl_kind,
            top_k=shape.selector_top_k,
            chunk_bytes=loss.chunk_mib * 2**20,
            output_multiplier=shape.output_multiplier,
            final_logit_softcapping=shape.final_logit_softcapping,
        )

    def _candidate_logits(self, hidden: Tensor, candidate_ids: Tensor) -> Tensor:
        shape = self.drafter.shape
        return candidate_logits(
            hidden,
            self.frozen.head,
            candidate_ids,
            output_multiplier=shape.output_multiplier,
            final_logit_softcapping=shape.final_logit_softcapping,
        )

    def _selector_scores(self, slots: _Slots, unary: UnaryLoss) -> tuple[Tensor, Tensor]:
        """Teacher-forced scores [N, C] and the candidates [N, C] they belong to."""
        offered = unary.candidate_ids
        if self.loss.missing_candidate == "inject":
            offered = inject_gold(offered, slots.target_ids)
        logits = self._candidate_logits(slots.hidden, offered)
        if self.loss.detach_unary:
            logits = logits.detach()
        scores = self.drafter.candidate_selector.scores(slots.hidden, logits, offered, slots.predecessor_ids)
        return scores, offered

    @torch.no_grad()
    def _sums(self, blocks: BlockBatch, slots: _Slots, unary: UnaryLoss, selector_sum: Tensor) -> MetricSums:
        """Additive pairs; candidates as served throughout, so that an injected gold flatters nothing."""
        weight, count = slots.weights.sum(), float(len(slots.target_ids))
        inside = (unary.candidate_ids == slots.target_ids[:, None]).any(-1)  # [N]
        sums = MetricSums()
        sums.add("loss", unary.loss_sum + self.loss.selector_weight * selector_sum, weight)
        sums.add("ce", unary.ce_sum, weight)
        sums.add("kl", unary.kl_sum, weight)
        sums.add("selector", selector_sum, weight)
        sums.add("recall", inside.sum(), count, rate=True)
        sums.add("top1", unary.top1_correct.sum(), count, rate=True)
        sums.add("overlap", unary.sum_min_pq.sum(), count)  # lower bound of sum min(p, q), the acceptance at T = 1
        self._add_paths(sums, blocks, slots, unary)
        return sums

    def _add_paths(self, sums: MetricSums, blocks: BlockBatch, slots: _Slots, unary: UnaryLoss) -> None:
        """Mean accepted drafts a block, of the unary choice and of the walked path, over the first blocks."""
        supervised = blocks.supervised.flatten(0, 1)  # [B * A, K]
        chosen = supervised[:, 0].nonzero().squeeze(-1)[:WALKED_BLOCKS]  # [n] blocks with a first label
        whole = blocks.block_ids.shape[-1] == self.drafter.shape.block_size  # short ones would lower the mean
        if len(chosen) == 0 or not whole:  # the names must be there on every rank, or the sums of ranks do not line up
            sums.add("selector_path", 0.0, 0.0)
            sums.add("unary_path", 0.0, 0.0)
            return
        mask = supervised[chosen]  # [n, K]
        # Supervision is a prefix of its block and the flat slots are ordered by block, so the slots of the first n
        # supervised blocks are the first ones.
        count = int(mask.sum())
        rows, candidates = slots.hidden[:count], unary.candidate_ids[:count]
        targets = blocks.target_ids.flatten(0, 1)[chosen]  # [n, K]
        hidden = rows.new_zeros(*mask.shape, rows.shape[-1])  # [n, K, H]
        ids = candidates.new_zeros(*mask.shape, candidates.shape[-1])  # [n, K, C]
        logits = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        hidden[mask], ids[mask] = rows, candidates
        logits[mask] = self._candidate_logits(rows, candidates)
        anchors = blocks.block_ids.flatten(0, 1)[chosen, 0]  # [n]
        path, _ = self.drafter.candidate_selector.walk(hidden, logits, ids, anchors)
        for name, proposed in (("selector_path", path), ("unary_path", ids[..., 0])):
            accepted = prefix_acceptance(proposed, targets, mask)
            sums.add(name, accepted.accepted_sum, accepted.num_blocks)
