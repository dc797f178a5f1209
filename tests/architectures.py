"""Tiny random targets of the real architectures, written as model folders in a fraction of a second each.

Vocabulary 96 as in ``tests.toy_target``, five layers, and norm weights far from 1, so that a norm too many or too few
shows. GLM's sparse attention selects 8 positions, fewer than the tests' sequences have, and GLM-5.3-Flash has both of
its attention kinds and four residual streams. ``SERVED`` are sizes that serving engines have kernels for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.toy_target import BOS, END, WORDS

LAYERS, HIDDEN = 5, 32
PAD = 2  # its embedding is zero, so no text begins with it


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions that kernels care about."""

    hidden: int = HIDDEN
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    kv_rank: int = 16
    q_rank: int = 16
    nope: int = 8
    rope: int = 4
    index_heads: int = 8  # with few heads many scores are exactly zero, and ties are broken by place

    @property
    def common(self) -> dict[str, Any]:
        """What every configuration takes."""
        return {
            "vocab_size": len(WORDS),
            "hidden_size": self.hidden,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": 128,
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "initializer_range": 0.2,  # wide enough that layers and logits differ well
        }

    @property
    def attention(self) -> dict[str, Any]:
        """Grouped-query attention."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def latent(self) -> dict[str, Any]:
        """GLM's latent attention with its indexer, and its experts."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "kv_lora_rank": self.kv_rank,
            "q_lora_rank": self.q_rank,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.nope,
            "index_topk": 8,
            "index_head_dim": self.head_dim,
            "index_n_heads": self.index_heads,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        }


SMALL = Sizes()
SERVED = Sizes(hidden=128, heads=2, kv_heads=1, head_dim=64, kv_rank=512, q_rank=64, nope=128, rope=64, index_heads=32)


def _llama(sizes: Sizes, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes.common, **sizes.attention, **changes))


def _llama_tied(sizes: Sizes) -> Any:
    return _llama(sizes, tie_word_embeddings=True)


def _qwen3(sizes: Sizes) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes.common, **sizes.attention))


def _glm_moe_dsa(sizes: Sizes) -> Any:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes.common, **sizes.latent, qk_rope_head_dim=sizes.rope))


def _glm5_next(sizes: Sizes) -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    linear = {"linear_head_dim": sizes.head_dim, "linear_num_heads": sizes.heads}
    text = {**sizes.common, **sizes.latent, **linear, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 4}
    eyes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": sizes.hidden}
    config = Glm5NextConfig(text_config=text, vision_config={**eyes, "projection_intermediate_size": 16})
    return Glm5NextForConditionalGeneration(config)


def _gemma2(sizes: Sizes) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"final_logit_softcapping": 5.0, "sliding_window": 6}
    return Gemma2ForCausalLM(Gemma2Config(**sizes.common, **sizes.attention, **caps))


def _gemma3(sizes: Sizes) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes.common, **sizes.attention, sliding_window=6))


def _cohere(sizes: Sizes) -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    heads = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads}
    return CohereForCausalLM(CohereConfig(**sizes.common, **heads, logit_scale=0.25))


def _granite(sizes: Sizes) -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    heads = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads}
    return GraniteForCausalLM(GraniteConfig(**sizes.common, **heads, logits_scaling=4.0))


def _qwen3_5(sizes: Sizes) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes.common, **sizes.attention, **linear))


BUILDERS: dict[str, Callable[[Sizes], Any]] = {
    "llama": _llama,
    "llama_tied": _llama_tied,
    "qwen3": _qwen3,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm5_next": _glm5_next,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "cohere": _cohere,
    "granite": _granite,
    "qwen3_5": _qwen3_5,
}
TARGETS = ("llama", "llama_tied", "qwen3", "glm_moe_dsa", "glm5_next")  # those that drafters are made for
OTHERS = ("gemma2", "gemma3", "cohere", "granite", "qwen3_5")  # with other norms, and scales or caps on their logits


def write_architecture(folder: Path, name: str, sizes: Sizes = SMALL) -> None:
    """Write the random float32 model ``name`` to ``folder``; the same one every time."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(3)
    model = BUILDERS[name](sizes).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key and weight.ndim == 1:
                weight.add_(torch.empty_like(weight).uniform_(-0.5, 1.0))
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[END])
    model.save_pretrained(folder)
