"""A tiny random drafter of speculators 0.9, saved by it, and what it computes; run with that package's interpreter.

Usage: run_speculators.py FOLDER dflash|dflash2 [OTHER]

Leaves FOLDER/saved (``save_pretrained``) and FOLDER/computed.safetensors: ``taps`` [1, S, T * H], ``input_ids`` [1, S],
``embedding`` [V, H], ``anchors`` [A], ``hidden`` [A, W, H] after the last norm, and of a DFlash 2 ``unary`` and
``scores`` [A, W, C] of ``candidates`` behind ``predecessors`` [A, W]. With OTHER it loads FOLDER/saved and OTHER
instead, and fails unless they are one drafter.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import DFlash2DraftModel, DFlash2SpeculatorConfig, DFlashDraftModel, DFlashSpeculatorConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

HIDDEN, VOCAB, WIDTH, TOKENS, LAYERS, ANCHORS = 32, 96, 4, 14, 2, 3
CANDIDATES = 4
TAPS = [1, 3, 5]


def make_model(kind):
    """A drafter whose every parameter is random; one of two layers slides, over more than there is."""
    torch.manual_seed(0)
    layers = Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=64,
    )
    layers._attn_implementation = "sdpa"
    shared = {
        "transformer_layer_config": layers,
        "draft_vocab_size": VOCAB,
        "block_size": WIDTH,
        "aux_hidden_state_layer_ids": TAPS,
        "mask_token_id": VOCAB - 1,
        "sliding_window_non_causal": True,
        "speculators_config": SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=WIDTH - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    }
    if kind == "dflash":
        model = DFlashDraftModel(DFlashSpeculatorConfig(**shared))
    else:
        sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": CANDIDATES}
        model = DFlash2DraftModel(DFlash2SpeculatorConfig(**shared, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().add_(torch.randn(parameter.shape) * 0.3)
    return model.float().eval()


@torch.no_grad()
def compute(model, kind):
    """The drafter's own forward up to its logits, and its selector behind random predecessors."""
    taps = torch.randn(1, TOKENS, len(TAPS) * HIDDEN)
    ids = torch.randint(0, VOCAB - 1, (1, TOKENS))
    loss_mask = torch.zeros(1, TOKENS, dtype=torch.long)
    loss_mask[:, [2, 5, 9]] = 1
    hidden, logits, _, _, indices = model._backbone_forward(
        taps,
        ids,
        loss_mask,
        torch.randn(1, TOKENS, HIDDEN),
        torch.zeros(1, TOKENS, dtype=torch.long),
        max_anchors=ANCHORS,
    )
    results = {
        "taps": taps,
        "input_ids": ids,
        "embedding": model.embed_tokens.weight,
        "anchors": indices.view(ANCHORS, WIDTH)[:, 0],
        "hidden": hidden.view(ANCHORS, WIDTH, HIDDEN),
    }
    if kind == "dflash2":
        predecessors = torch.randint(0, VOCAB, (1, ANCHORS * WIDTH))
        candidates = logits.topk(CANDIDATES, dim=-1).indices
        scores = model.candidate_selector.score_candidates(logits, hidden, predecessors, candidates)
        per_slot = {"predecessors": predecessors, "candidates": candidates, "scores": scores}
        per_slot["unary"] = logits.gather(-1, candidates)
        results |= {name: value.reshape(ANCHORS, WIDTH, *value.shape[2:]) for name, value in per_slot.items()}
    return {name: value.contiguous().clone() for name, value in results.items()}


def drafter_of(folder, kind):
    """(weights, settings that shape the drafts) of a saved drafter, loaded as users of the package do."""
    model_class = DFlashDraftModel if kind == "dflash" else DFlash2DraftModel
    model = model_class.from_pretrained(str(folder))
    ignored = ("embed_tokens", "lm_head", "verifier_")  # the target's, which no saved drafter has
    weights = {name: t for name, t in model.state_dict().items() if not name.startswith(ignored)}
    config, layers = model.config, model.config.transformer_layer_config
    settings = [config.block_size, config.mask_token_id, config.aux_hidden_state_layer_ids, config.draft_vocab_size]
    settings += [config.sample_from_anchor, config.sliding_window_non_causal, layers.layer_types]
    settings += [layers.sliding_window, layers.rms_norm_eps, layers.rope_parameters, layers.max_position_embeddings]
    return weights, settings


def compare(first, second):
    """Stop unless two drafters are one."""
    assert first[1] == second[1], (first[1], second[1])
    assert first[0].keys() == second[0].keys(), first[0].keys() ^ second[0].keys()
    for name, tensor in first[0].items():
        assert torch.equal(tensor, second[0][name]), name


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        compare(drafter_of(folder / "saved", wanted), drafter_of(sys.argv[3], wanted))
    else:
        drafter = make_model(wanted)
        save_file(compute(drafter, wanted), folder / "computed.safetensors")
        drafter.save_pretrained(folder / "saved")
