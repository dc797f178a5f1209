"""One measured training step of this project; a process of its own, started by ``train_step``.

``python -m tests.bench.step_ours WORKLOAD_JSON --dtype bfloat16 --steps 5 [--device cuda] [--unfused]``

The step is the real one: packed batch, blocks, ``Objective`` (convolutions, selector, CE and tail-bucket KL), backward
and AdamW over the engine's parameter groups. ``--unfused`` replaces the fused loss by autograd over full logits. The
last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import BlockBatch, build_blocks
from dflash2_train.config import LossConfig
from dflash2_train.data import PackedBatch, collate
from dflash2_train.heap import keep_freed_memory
from dflash2_train.losses import Workspace
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.objective import Objective
from dflash2_train.target import FrozenHead
from tests.bench.step_clock import growth_when_warm, start_peak
from tests.bench.step_process import DTYPES, answer, parse, timed
from tests.bench.workloads import Workload

TEACHER_MASS = 0.95  # of the stored top-k


def shape_of(work: Workload) -> DrafterShape:
    """The drafter of a workload, full attention in all layers."""
    return DrafterShape(
        hidden_size=work.hidden,
        num_layers=work.layers,
        num_heads=work.heads,
        num_kv_heads=work.kv_heads,
        head_dim=work.head_dim,
        intermediate_size=work.intermediate,
        vocab_size=work.vocab,
        target_layer_ids=tuple(range(work.taps)),
        num_target_layers=work.taps,
        block_size=work.block_size,
        mask_token_id=work.vocab - 1,
        layer_types=("full_attention",) * work.layers,
        sliding_window=None,
        conv_kernel_size=work.conv_kernel_size,
        conv_group_size=work.conv_group_size,
        selector_rank=work.selector_rank,
        selector_top_k=work.selector_top_k,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=work.tokens + work.block_size,
    )


def make_batch(
    work: Workload, anchors: int, device: torch.device, dtype: torch.dtype
) -> tuple[PackedBatch, BlockBatch]:
    """One row of one random document that is supervised throughout."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, work.vocab - work.teacher_top_k, (work.tokens, 1), generator=generator)
    logits = torch.randn(work.tokens, work.teacher_top_k, generator=generator) * 2
    sample = CapturedSample(
        sample_id="bench",
        input_ids=torch.randint(0, work.vocab - 1, (work.tokens,), generator=generator, dtype=torch.int32),
        loss_mask=torch.ones(work.tokens, dtype=torch.bool),
        tap_hidden=torch.randn(work.tokens, work.taps * work.hidden, generator=generator).bfloat16(),
        teacher_ids=(first + torch.arange(work.teacher_top_k)).int(),
        teacher_logprobs=(logits.log_softmax(-1) + torch.tensor(TEACHER_MASS).log()).half(),
        teacher_log_normaliser=torch.zeros(work.tokens),
    )
    batch = collate([[sample]], anchors_per_document=anchors, seed=0, epochs=[0]).to(device, dtype)
    return batch, build_blocks(batch, block_size=work.block_size, mask_token_id=work.vocab - 1)


def make_objective(work: Workload, device: torch.device, dtype: torch.dtype) -> Objective:
    """A random drafter with random frozen tables whose logits have a trained model's scale."""
    torch.manual_seed(0)
    table = (torch.randn(work.vocab, work.hidden, device=device) * 2 / work.hidden**0.5).to(dtype)
    drafter = Drafter(shape_of(work)).to(device, dtype)
    drafter.reset_mask_embedding(table[-1])
    return Objective(drafter, FrozenHead(table, table.clone()), LossConfig())


def loss_of(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> Tensor:
    """The training loss of one micro-batch."""
    denominator = objective.window_weight(blocks)
    return objective(batch, blocks, denominator=denominator, scale=1.0, selector_ramp=1.0).loss


def states_of(drafter: Drafter, embedding: Tensor, batch: PackedBatch, blocks: BlockBatch) -> Tensor:
    """States of every slot, [B, A, W, H]."""
    visible = context_masks(
        drafter.shape.layer_types,
        drafter.shape.sliding_window,
        anchor_positions_local=blocks.block_position_ids[..., 0],
        block_document_ids=blocks.block_document_ids,
        block_valid=blocks.block_valid,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        block_size=blocks.block_ids.shape[-1],
    )
    context = drafter.encode_context(batch.tap_hidden)
    embedded = drafter.embed_blocks(blocks.block_ids, embedding)
    return drafter(embedded, context, blocks.block_position_ids, batch.position_ids, visible)


def unfused_loss(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> Tensor:
    """CE, tail-bucket KL and selector by plain autograd over the logits of all slots."""
    drafter, frozen, seen = objective.drafter, objective.frozen, blocks.supervised
    hidden = states_of(drafter, frozen.embedding, batch, blocks)[:, :, 1:][seen]  # [N, H]
    logits = (hidden @ frozen.head.T).float()  # [N, V]
    log_q = logits.log_softmax(-1)
    targets = blocks.target_ids[seen]
    cross_entropy = -log_q.gather(-1, targets[:, None]).squeeze(-1)
    log_p, log_qt = blocks.teacher_logprobs[seen], log_q.gather(-1, blocks.teacher_ids[seen])
    p = log_p.exp()
    tail_p, tail_q = (1 - p.sum(-1)).clamp(min=0), (1 - log_qt.exp().sum(-1)).clamp(min=1e-6)
    divergence = (p * (log_p - log_qt)).sum(-1) + torch.xlogy(tail_p, tail_p) - tail_p * tail_q.log()
    unary, ids = logits.topk(drafter.shape.selector_top_k, -1)
    scores = drafter.candidate_selector.scores(hidden, unary, ids, blocks.predecessor_ids[seen])
    hits = ids == targets[:, None]
    selector = torch.where(hits.any(-1), scores.logsumexp(-1) - (scores * hits).sum(-1), 0.0)
    return (cross_entropy + divergence + selector).mean()


def loss_memory(work: Workload, objective: Objective, device: torch.device, dtype: torch.dtype) -> int:
    """Peak growth of the loss alone, bytes: states and context are given, the codebooks get no gradient."""
    drafter = objective.drafter
    selector = drafter.candidate_selector
    for table in (selector.predecessor_codebook, selector.successor_codebook):
        table.requires_grad_(False)
    batch, blocks = make_batch(work, work.anchors, device, dtype)
    states = torch.randn(*blocks.block_ids.shape, work.hidden, device=device).to(dtype).requires_grad_()

    def step() -> None:
        drafter.encode_context = lambda taps: taps  # type: ignore[method-assign]
        drafter.forward = lambda *_: states  # type: ignore[method-assign]
        torch.autograd.backward(loss_of(objective, batch, blocks))

    def forget() -> None:
        objective.workspace, states.grad = Workspace(), None
        objective.zero_grad()

    growth = growth_when_warm(step, forget, device.type)
    del drafter.forward, drafter.encode_context  # the class's own again
    for table in (selector.predecessor_codebook, selector.successor_codebook):
        table.requires_grad_(True)
    return growth


def run(work: Workload, options: argparse.Namespace) -> dict[str, float]:
    """Measure."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    start_bytes = start_peak(device.type)
    objective = make_objective(work, device, dtype)
    loss_bytes = 0 if options.unfused else loss_memory(work, objective, device, dtype)
    if device.type == "cpu":
        keep_freed_memory()  # as the trainer does
    batch, blocks = make_batch(work, work.anchors, device, dtype)
    loss = unfused_loss if options.unfused else loss_of
    found = timed(lambda: loss(objective, batch, blocks), nn.Module.parameters(objective), options)
    return {**found, "start_bytes": float(start_bytes), "loss_bytes": float(loss_bytes)}


if __name__ == "__main__":
    answer(run(*parse(__doc__ or "", "--unfused")))
