"""One measured training step of SpecForge's DFlash 1: cross-entropy alone, without convolutions, selector or KL.

Started by ``train_step`` with the peer's interpreter; takes the options of ``step_ours`` and answers alike. Its own
training model does all: anchors, blocks, the dense mask (its FlexAttention has no backward on a CPU), logits and loss.
Its logits are made in one piece (``objective_chunk_blocks: 0``), the faster of its settings: its default saves memory
by computing them a second time in the backward pass. Weights are random, at a trained model's scale.
"""

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import nn
from transformers import Qwen3Config

from tests.bench.step_clock import growth_when_warm, start_peak
from tests.bench.step_process import DTYPES, GAMMA, answer, fill_table, layer_sizes, parse, random_document, timed


def make_model(work, device, dtype):
    """A DFlash of the workload's shape in its training wrapper, with frozen tables."""
    torch.manual_seed(0)
    attention = "sdpa" if device == "cpu" else "flex_attention"
    config = Qwen3Config(
        **layer_sizes(work),
        num_target_layers=work.taps,
        block_size=work.block_size,
        dflash_config={"target_layer_ids": list(range(work.taps)), "mask_token_id": work.vocab - 1},
    )
    config._attn_implementation = attention
    model = OnlineDFlashModel(
        draft_model=DFlashDraftModel(config),
        target_lm_head=nn.Linear(work.hidden, work.vocab, bias=False).requires_grad_(False),
        target_embed_tokens=nn.Embedding(work.vocab, work.hidden).requires_grad_(False),
        mask_token_id=work.vocab - 1,
        block_size=work.block_size,
        attention_backend=attention,
        num_anchors=work.anchors,
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=0,
    ).to(device=device, dtype=dtype)
    for table in (model.embed_tokens, model.lm_head):
        fill_table(table.weight, work)
    return model.train()


def loss_memory(model, inputs, work, device):
    """Peak growth of the loss alone, bytes: no layers."""
    drafter = model.draft_model
    layers, drafter.layers = drafter.layers, nn.ModuleList()

    def step():
        model(**inputs)[0].backward()

    growth = growth_when_warm(step, model.zero_grad, device)
    drafter.layers = layers
    return growth


def run(work, options):
    """Measure."""
    dtype, device = DTYPES[options.dtype], options.device
    start_bytes = start_peak(device)
    model, inputs = make_model(work, device, dtype), random_document(work, device, dtype)
    loss_bytes = loss_memory(model, inputs, work, device)
    found = timed(lambda: model(**inputs)[0], model.parameters(), options)
    return {**found, "start_bytes": float(start_bytes), "loss_bytes": float(loss_bytes)}


if __name__ == "__main__":
    answer(run(*parse(__doc__)))
