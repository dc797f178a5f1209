"""One measured training step of speculators' DFlash 2 with its full-vocabulary KL, in an environment of its own.

Started by ``train_step`` as a file, with the peer's interpreter; takes the options of ``step_ours`` and answers alike.
Its own forward does all: blocks, anchors, attention (SDPA on a CPU, where its FlexAttention has no backward), the
target's logits from its final hidden states, KL and selector. Weights are random, at a trained model's scale.
"""

import argparse
import json

import torch
from speculators import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.losses import resolve_loss_config
from step_clock import measure, peak_growth, start_peak
from transformers import Qwen3Config
from workloads import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATE = 1e-4


def make_model(work, device, dtype):
    """A DFlash 2 of the workload's shape."""
    torch.manual_seed(0)
    layers = Qwen3Config(
        hidden_size=work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        head_dim=work.head_dim,
        intermediate_size=work.intermediate,
        vocab_size=work.vocab,
        max_position_embeddings=work.tokens + work.block_size,
        layer_types=["full_attention"] * work.layers,
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
    with torch.no_grad():
        for table in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            table.weight.normal_(0.0, 2 / work.hidden**0.5)
    return model.train()


def make_inputs(work, device, dtype):
    """One document that is supervised throughout."""
    generator = torch.Generator().manual_seed(1)
    implementation = "eager" if device == "cpu" else "fused"

    def states(width):
        return torch.randn(1, work.tokens, width, generator=generator).to(device, dtype)

    return {
        "hidden_states": states(work.taps * work.hidden),
        "input_ids": torch.randint(0, work.vocab - 1, (1, work.tokens), generator=generator).to(device),
        "loss_mask": torch.ones(1, work.tokens, dtype=torch.long, device=device),
        "verifier_last_hidden_states": states(work.hidden),
        "document_ids": torch.zeros(1, work.tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(work.tokens, device=device)[None],
        "loss_config": resolve_loss_config("kl_div", implementation),
        "tv_loss_fn": resolve_loss_config("tv", implementation)["tv"][0],  # as its own trainer passes it
        "gamma": 6.5,
    }


def loss_memory(model, inputs, work, device):
    """Peak growth of the loss alone, bytes: no layers, no gradient for the codebooks."""
    layers, model.layers = model.layers, torch.nn.ModuleList()
    selector = model.candidate_selector
    tables = [parameter for name, parameter in selector.named_parameters() if "codebook" in name]
    for table in tables:
        table.requires_grad_(False)

    def step(anchors):
        model(**inputs, max_anchors=anchors)[1].backward()

    step(1)  # libraries load before the baseline is taken
    growth = peak_growth(lambda: step(work.anchors), device)
    model.layers = layers
    for table in tables:
        table.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    return growth


def run(work, options):
    """Measure."""
    dtype, device = DTYPES[options.dtype], options.device
    start_bytes = start_peak(device)
    model, inputs = make_model(work, device, dtype), make_inputs(work, device, dtype)
    loss_bytes = loss_memory(model, inputs, work, device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=True)

    def forward_backward():
        loss = model(**inputs, max_anchors=work.anchors)[1]
        loss.backward()
        return loss

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    found = measure(forward_backward, update, steps=options.steps, warmup=options.warmup, device=device)
    return {**found, "start_bytes": float(start_bytes), "loss_bytes": float(loss_bytes)}


def main():
    """Read the workload, measure, write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(run(Workload.from_json(options.workload), options)))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
