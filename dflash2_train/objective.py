"""One module from a packed batch to a loss: blocks, masks, drafter, losses. This is what the engine wraps.

    loss = scale * (sum_n w_n (ce * CE_n + beta * KL_n) + ramp * alpha / c * sum_n w_n SEL_n) / D

n runs over the supervised slots of this micro-batch, w is the weight of a slot, and D the normaliser of the whole
global window (all ranks, all micro-batches): the sum of w, or the number of slots under D-PACE. It is known before the
forward because it hangs on masks alone. c is 1, or with ``selector_denominator: hits`` the share of w on slots whose
candidates held the data token, measured over the window before: as the unary head learns to find it, the selector's
scale stays. ``scale`` undoes the engine's division by world size and accumulation, so one global window gives one
update, however it is spread. The frozen embedding and head are held outside the module tree: the engine neither
shards, casts nor saves them.

Letters: B rows, S context tokens, A blocks a row, W block size, K = W - 1, N supervised slots, H hidden, C candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dflash2_train.blocks import BlockBatch
from dflash2_train.config import LossConfig
from dflash2_train.data import PackedBatch
from dflash2_train.losses import (
    Moment,
    SelectorLoss,
    UnaryLoss,
    Workspace,
    dpace_weights,
    gamma_at,
    inject_gold,
    injects_at,
    known_logits,
    position_weights,
    sampled_share_at,
    selector_loss,
    unary_candidates,
    unary_loss,
)
from dflash2_train.losses.shaping import Shaping
from dflash2_train.masks import context_masks
from dflash2_train.metrics import MetricSums, prefix_acceptance, slot_names, slot_sums
from dflash2_train.model.drafter import Drafter
from dflash2_train.paths import block_paths, walk_paths
from dflash2_train.predecessors import partly_sampled
from dflash2_train.target import FrozenHead

WALKED_BLOCKS = 256  # blocks a micro-batch on which the served path is walked for the record; bounds its time
MOMENT = Moment()  # the start of a run of one step
SQUARES = "gradient_square/"  # prefix of the squared norms of the parts' gradients
MIN_SELECTOR_SHARE = 0.05  # of the window that may set the selector's scale; early ones hold hardly a hit


class StepOutput(NamedTuple):
    """Scalar loss for the engine, and additive sums for the record."""

    loss: Tensor
    sums: MetricSums


class _Slots(NamedTuple):
    """The N supervised slots of a micro-batch, flat."""

    hidden: Tensor  # [N, H]
    target_ids: Tensor  # [N]
    predecessor_ids: Tensor  # [N] as in the text


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
        self.workspace = Workspace()
        self.frozen: FrozenHead
        self.__dict__["frozen"] = frozen  # past nn.Module's registration, on purpose

    def window_weight(self, blocks: BlockBatch, moment: Moment = MOMENT) -> Tensor:
        """This micro-batch's part of the normaliser D, scalar fp32.

        The sum of the decay weights of its supervised slots, or their number under D-PACE, whose weights are only
        known after the forward.
        """
        supervised = blocks.supervised.to(torch.float32)
        if self.loss.position_weights == "dpace":
            return supervised.sum()
        return (supervised * self._decay(blocks, moment)).sum()

    def forward(
        self,
        batch: PackedBatch,
        blocks: BlockBatch,
        *,
        denominator: Tensor,
        scale: float,
        selector_ramp: float,
        moment: Moment = MOMENT,
        selector_share: float = 1.0,
        measure_gradients: bool = False,
    ) -> StepOutput:
        """Loss and sums of one micro-batch.

        Args:
            batch: B rows of S tokens; tap states in the training dtype.
            blocks: their A blocks a row, of the drafter's block size or shorter.
            denominator: D, scalar fp32.
            scale: world size times accumulation.
            selector_ramp: factor 0..1 on the selector's weight.
            moment: where the run stands, for options that change over it and for draws.
            selector_share: c of the formula, of which small ones are raised to ``MIN_SELECTOR_SHARE``.
            measure_gradients: add the squared norms of each part's gradient to the sums; the loss and its gradient
                stay as they are to the last bit.
        """
        slots = self._slots(batch, blocks)
        selector_weight = selector_ramp * (self.loss.selector_weight / max(selector_share, MIN_SELECTOR_SHARE))
        measured = MetricSums()
        if measure_gradients:
            parts = self._part_gradients(batch, blocks, slots, moment, selector_weight)
            for name, gradient in parts.items():
                square = gradient.double().square().sum() / denominator.double() ** 2
                measured.add(f"{SQUARES}{name}", square, 1.0 / scale)  # over a window the denominators sum to 1
        unary = self._unary(slots, blocks)
        weights = self._weights(blocks, unary, moment)
        selected = self._selector(batch, blocks, slots, unary, weights, moment)
        total = (weights * unary.loss).sum() + selector_weight * selected.loss_sum
        sums = self._sums(blocks, slots, unary, selected, weights, self.window_weight(blocks, moment))
        return StepOutput(loss=total * (scale / denominator), sums=sums + measured)

    @torch.no_grad()
    def drafted_path(self, batch: PackedBatch, blocks: BlockBatch) -> Tensor:
        """The ids [B, A, K] that a server would draft in these blocks, greedily; meaningful where supervised."""
        slots, loss, shape = self._slots(batch, blocks), self.loss, self.drafter.shape
        logits, ids = unary_candidates(
            slots.hidden,
            self.frozen.head,
            shape.selector_top_k,
            chunk_bytes=loss.chunk_mib * 2**20,
            logit_share=loss.logit_share,
            shaping=Shaping(multiplier=shape.output_multiplier, cap=shape.final_logit_softcapping),
            workspace=self.workspace,
        )
        return block_paths(self.drafter.candidate_selector, blocks, slots.hidden, logits, ids)

    @torch.no_grad()
    def read_slots(self, batch: PackedBatch, blocks: BlockBatch) -> tuple[Tensor, UnaryLoss]:
        """States [N, H] of the supervised slots and what the sweep over their logits yields, without a gradient."""
        slots = self._slots(batch, blocks)
        return slots.hidden, self._unary(slots, blocks)

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
        return _Slots(
            hidden=hidden[:, :, 1:][supervised],  # [B, A, W, H] without the anchor's slot -> [N, H]
            target_ids=blocks.target_ids[supervised],
            predecessor_ids=blocks.predecessor_ids[supervised],
        )

    def _unary(self, slots: _Slots, blocks: BlockBatch, loss: LossConfig | None = None) -> UnaryLoss:
        """The sweep over the slots' logits; with other weights than the run's if ``loss`` is given."""
        shape, loss = self.drafter.shape, loss or self.loss
        return unary_loss(
            slots.hidden,
            self.frozen.head,
            slots.target_ids,
            blocks.teacher_ids[blocks.supervised],
            blocks.teacher_logprobs[blocks.supervised],
            ce_weight=loss.ce_weight,
            kl_weight=loss.kl_weight,
            kl_kind=loss.kl_kind,
            top_k=shape.selector_top_k,
            chunk_bytes=loss.chunk_mib * 2**20,
            logit_share=loss.logit_share,
            output_multiplier=shape.output_multiplier,
            final_logit_softcapping=shape.final_logit_softcapping,
            implementation=loss.implementation,
            workspace=self.workspace,
        )

    def _decay(self, blocks: BlockBatch, moment: Moment) -> Tensor:
        return position_weights(blocks.supervised.shape[-1], gamma_at(self.loss, moment), blocks.supervised.device)

    def _weights(self, blocks: BlockBatch, unary: UnaryLoss, moment: Moment) -> Tensor:
        """The weight of every supervised slot, [N] fp32, a constant to autograd."""
        supervised = blocks.supervised
        if self.loss.position_weights == "dpace":
            return dpace_weights(-unary.ce, supervised, self.loss.dpace_alpha)
        return self._decay(blocks, moment).expand(supervised.shape)[supervised]

    def _selector(
        self,
        batch: PackedBatch,
        blocks: BlockBatch,
        slots: _Slots,
        unary: UnaryLoss,
        weights: Tensor,
        moment: Moment,
    ) -> SelectorLoss:
        """The selector's loss on the candidates that it is offered now, after the predecessors that it sees now."""
        shape, injected = self.drafter.shape, injects_at(self.loss, moment)
        offered, logits = unary.candidate_ids, unary.candidate_logits
        if injected:
            offered = inject_gold(unary.candidate_ids, slots.target_ids)
            gold = unary.log_normaliser - unary.ce  # the data token's logit
            logits = torch.where(offered == unary.candidate_ids, logits, gold[:, None])
        if not self.loss.detach_unary:
            logits = known_logits(
                slots.hidden,
                self.frozen.head,
                offered,
                logits,
                output_multiplier=shape.output_multiplier,
                final_logit_softcapping=shape.final_logit_softcapping,
            )
        predecessors = slots.predecessor_ids
        share = sampled_share_at(self.loss, moment)
        if share > 0:
            predecessors = partly_sampled(
                self.drafter.candidate_selector,
                blocks,
                slots.hidden,
                unary,
                share=share,
                moment=moment,
                sample_ids=batch.sample_ids,
            )
        scores = self.drafter.candidate_selector.scores(slots.hidden, logits, offered, predecessors)
        return selector_loss(scores, offered, slots.target_ids, weights, injected=injected)

    def _part_gradients(
        self, batch: PackedBatch, blocks: BlockBatch, slots: _Slots, moment: Moment, selector_weight: float
    ) -> dict[str, Tensor]:
        """Gradient [N, H] of each weighted part's sum over the slots, by their states; nothing else gets one.

        A sweep of its own for CE and for KL; the selector's part goes on from the first. Must come before the sweep
        that is trained on, for they share the workspace.
        """
        states = slots.hidden.detach().requires_grad_()
        own = slots._replace(hidden=states)
        with torch.enable_grad():
            unary = self._unary(own, blocks, replace(self.loss, kl_weight=0.0))
            weights = self._weights(blocks, unary, moment)
            (ce,) = torch.autograd.grad((weights * unary.loss).sum(), states)
            selected = self._selector(batch, blocks, own, unary, weights, moment)
            (selector,) = torch.autograd.grad(selector_weight * selected.loss_sum, states)
            divergence = self._unary(own, blocks, replace(self.loss, ce_weight=0.0))
            (kl,) = torch.autograd.grad((weights * divergence.loss).sum(), states)
        return {"ce": ce, "kl": kl, "selector": selector}

    @torch.no_grad()
    def _sums(
        self,
        blocks: BlockBatch,
        slots: _Slots,
        unary: UnaryLoss,
        selected: SelectorLoss,
        weights: Tensor,
        normaliser: Tensor,
    ) -> MetricSums:
        """Additive pairs; candidates as served throughout, so that an injected gold flatters nothing."""
        count = float(len(slots.target_ids))
        weight, unary_sum = weights.sum(), (weights * unary.loss).sum()
        inside = (unary.candidate_ids == slots.target_ids[:, None]).any(-1)  # [N]
        sums = MetricSums()
        sums.add("loss", unary_sum + self.loss.selector_weight * selected.loss_sum, normaliser)
        sums.add("ce", (weights * unary.ce).sum(), weight)
        sums.add("kl", (weights * unary.kl).sum(), weight)
        sums.add("selector", selected.loss_sum, weight)
        sums.add("selector_share", (weights * selected.counted).sum(), weight, rate=True)
        sums.add("recall", inside.sum(), count, rate=True)
        sums.add("top1", unary.top1_correct.sum(), count, rate=True)
        sums.add("overlap", unary.sum_min_pq.sum(), count)  # lower bound of sum min(p, q), the acceptance at T = 1
        self._add_slots(sums, blocks, unary, selected, inside)
        self._add_paths(sums, blocks, slots, unary)
        return sums

    def _add_slots(
        self, sums: MetricSums, blocks: BlockBatch, unary: UnaryLoss, selected: SelectorLoss, inside: Tensor
    ) -> None:
        """Plain means at each slot; the selector's over the rows that it is trained on."""
        counted, every = selected.counted, torch.ones_like(unary.ce)
        rows = (unary.ce, unary.kl, selected.cross_entropy * counted, inside, unary.top1_correct, counted, every)
        ce, kl, selector, recall, top1, trained, labels = slot_sums(torch.stack(rows), blocks.supervised)  # [K] each
        for name, part, total in (("ce", ce, labels), ("kl", kl, labels), ("selector", selector, trained)):
            sums.add_each(slot_names(name, len(part)), part, total)
        for name, part in (("recall", recall), ("top1", top1)):
            sums.add_each(slot_names(name, len(part)), part, labels, rate=True)

    def _add_paths(self, sums: MetricSums, blocks: BlockBatch, slots: _Slots, unary: UnaryLoss) -> None:
        """Mean accepted drafts a block, of the unary choice and of the walked path, over the first blocks."""
        supervised = blocks.supervised.flatten(0, 1)  # [B * A, K]
        chosen = supervised[:, 0].nonzero().squeeze(-1)[:WALKED_BLOCKS]  # [n] blocks with a first label
        whole = blocks.block_ids.shape[-1] == self.drafter.shape.block_size  # short ones would lower the mean
        if len(chosen) == 0 or not whole:  # the names must be there on every rank, or the sums of ranks do not line up
            sums.add("selector_path", 0.0, 0.0)
            sums.add("unary_path", 0.0, 0.0)
            nothing = unary.ce.new_zeros(supervised.shape[-1])
            sums.add_each(slot_names("accepted", len(nothing)), nothing, nothing, rate=True)
            return
        mask = supervised[chosen]  # [n, K]
        count = int(mask.sum())  # flat slots are ordered by block: those of the first n supervised blocks come first
        targets = blocks.target_ids.flatten(0, 1)[chosen]  # [n, K]
        ids = unary.candidate_ids[:count]
        path = walk_paths(
            self.drafter.candidate_selector,
            slots.hidden[:count],
            unary.candidate_logits[:count],
            ids,
            mask,
            blocks.block_ids.flatten(0, 1)[chosen, 0],
        )
        best = torch.zeros_like(path)
        best[mask] = ids[:, 0]
        for name, proposed in (("selector_path", path), ("unary_path", best)):
            accepted = prefix_acceptance(proposed, targets, mask)
            sums.add(name, accepted.accepted_sum, accepted.num_blocks)
            if name == "selector_path":
                through = accepted.accepted_per_position  # [K]
                every = accepted.num_blocks.expand_as(through)
                sums.add_each(slot_names("accepted", len(through)), through, every, rate=True)
