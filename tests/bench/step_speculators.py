"""One measured training step of speculators' DFlash 2 with its full-vocabulary KL, in an environment of its own.

Started by ``train_step`` with the peer's interpreter; takes the options of ``step_ours`` and answers alike. Its own
forward does all: blocks, anchors, attention (SDPA on a CPU, where its FlexAttention has no backward), the target's
logits from its final hidden states, KL and selector. Weights are random, at a trained model's scale.
"""

import torch
from speculators import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.losses import resolve_loss_config
from transformers import Qwen3Config

from tests.bench.step_clock import growth_when_warm, start_peak
from tests.bench.step_process import DTYPES, GAMMA, answer, fill_table, layer_sizes, parse, random_document, timed


def make_model(work, device, dtype):
    """A DFlash 2 of the workload's shape."""
    torch.manual_seed(0)
    layers = Qwen3Config(
        **layer_sizes(work),
    )
    layers._attn_implementation = "sdpa" if device == "cpu" else "simple_flex_attention"
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=work.vocab,
        block_size=work.block_size,
        aux_hidden_state_layer_ids=list(range(work.taps)),
        mask_token_id=work.vocab - 1,
        conv_kernel_size=work.conv_kernel_size,
        conv_group_size=work.conv_group_size,
        selector_rank=work.selector_rank,
        selector_top_k=work.selector_top_k,
    )
    model = DFlash2DraftModel(config).to(device=device, dtype=dtype)
    for table in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        fill_table(table.weight, work)
    return model.train()


def make_inputs(work, device, dtype):
    """What its trainer gives the model."""
    implementation = "eager" if device == "cpu" else "fused"
    final = torch.randn(1, work.tokens, work.hidden, generator=torch.Generator().manual_seed(2))
    return {
        **random_document(work, device, dtype),
        "verifier_last_hidden_states": final.to(device, dtype),
        "document_ids": torch.zeros(1, work.tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(work.tokens, device=device)[None],
        "loss_config": resolve_loss_config("kl_div", implementation),
        "tv_loss_fn": resolve_loss_config("tv", implementation)["tv"][0],  # as its own trainer passes it
        "gamma": GAMMA,
    }


def loss_memory(model, inputs, work, device):
    """Peak growth of the loss alone, bytes: no layers, no gradient for the codebooks."""
    layers, model.layers = model.layers, torch.nn.ModuleList()
    selector = model.candidate_selector
    tables = [parameter for name, parameter in selector.named_parameters() if "codebook" in name]
    for table in tables:
        table.requires_grad_(False)

    def step():
        model(**inputs, max_anchors=work.anchors)[1].backward()

    growth = growth_when_warm(step, model.zero_grad, device)
    model.layers = layers
    for table in tables:
        table.requires_grad_(True)
    return growth


def run(work, options):
    """Measure."""
    dtype, device = DTYPES[options.dtype], options.device
    start_bytes = start_peak(device)
    model, inputs = make_model(work, device, dtype), make_inputs(work, device, dtype)
    loss_bytes = loss_memory(model, inputs, work, device)
    found = timed(lambda: model(**inputs, max_anchors=work.anchors)[1], model.parameters(), options)
    return {**found, "start_bytes": float(start_bytes), "loss_bytes": float(loss_bytes)}


if __name__ == "__main__":
    answer(run(*parse(__doc__)))
