"""Tiny random targets of the real architectures, written as model folders in a fraction of a second each.

Vocabulary 96 as in ``tests.toy_target``, H 32, five layers (two for the plain ones would do, but taps need room), and
norm weights far from 1, so that a norm too many or too few shows. GLM's sparse attention selects 8 positions, fewer
than the tests' sequences have, and GLM-5.3-Flash has both of its attention kinds and four residual streams.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.toy_target import BOS, END, WORDS

LAYERS, HIDDEN = 5, 32
COMMON = {
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "pad_token_id": BOS,
    "initializer_range": 0.2,  # wide enough that layers and logits differ well
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 8,  # with few heads many scores are exactly zero, and ties are broken by place
}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, **HEADS, **changes))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **HEADS))


def _glm_moe_dsa() -> Any:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**COMMON, **EXPERTS, **LATENT, qk_rope_head_dim=4))


def _glm5_next() -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    linear = {"linear_head_dim": 8, "linear_num_heads": 4}
    text = {**COMMON, **EXPERTS, **LATENT, **linear, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 4}
    eyes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN}
    config = Glm5NextConfig(text_config=text, vision_config={**eyes, "projection_intermediate_size": 16})
    return Glm5NextForConditionalGeneration(config)


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**COMMON, **HEADS, final_logit_softcapping=5.0, sliding_window=6))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **HEADS, sliding_window=6))


def _cohere() -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return CohereForCausalLM(CohereConfig(**COMMON, **heads, logit_scale=0.25))


def _granite() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return GraniteForCausalLM(GraniteConfig(**COMMON, **heads, logits_scaling=4.0))


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "qwen3": _qwen3,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm5_next": _glm5_next,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "cohere": _cohere,
    "granite": _granite,
}
TARGETS = ("llama", "llama_tied", "qwen3", "glm_moe_dsa", "glm5_next")  # those that drafters are made for
SCALED = ("gemma2", "gemma3", "cohere", "granite")  # those that do more to their logits


def write_architecture(folder: Path, name: str) -> None:
    """Write the random float32 model ``name`` to ``folder``; the same one every time."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(3)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key and weight.ndim == 1:
                weight.add_(torch.empty_like(weight).uniform_(-0.5, 1.0))
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[END])
    model.save_pretrained(folder)
