"""Make a tiny random target of a real architecture: ``python -m data_gen.tiny_target OUT_DIR --architecture qwen3``.

For ``+scale=tiny``: the same classes, attention kinds, experts and residual streams as the large model, with as many
layers, so that an experiment keeps its taps, in sizes that a CPU runs in seconds. Text is bytes (a tokenizer of 256
bytes and a few marks), so any prompt can be asked. What it writes is noise, and it never writes a token that the
tokenizer does not know, the mask token among them: their rows of the head are zero while all other logits spread wide.

The folder is written under a temporary name and renamed; one that is there is left as it is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.provenance import publish

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIDDEN, VOCAB = 288, 320  # what conf/scale/tiny.yaml declares
BOS, END, USER, ASSISTANT, THINK, THOUGHT = "<bos>", "<end>", "<user>", "<assistant>", "<think>", "</think>"
MARKS = (BOS, END, USER, ASSISTANT, THINK, THOUGHT)
TEMPLATE = (
    "<bos>{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
LOGIT_SPREAD = 4.0  # factor on the head: unknown tokens, at logit 0, are far out of the nucleus
SEED = 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 64,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


def _llama(sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, **GROUPED))


def _qwen3(sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes, **GROUPED))


def _glm_moe_dsa(sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes, **LATENT, **_experts(sizes), qk_rope_head_dim=8))


def _glm5_next(sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    linear = {"linear_head_dim": 16, "linear_num_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 4}
    eyes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN}
    config = Glm5NextConfig(
        text_config={**sizes, **LATENT, **_experts(sizes), **linear},
        vision_config={**eyes, "projection_intermediate_size": 16},
        tie_word_embeddings=False,
    )
    return Glm5NextForConditionalGeneration(config)


def _experts(sizes: dict[str, Any]) -> dict[str, Any]:
    """The first layer dense, experts in all others, as the large models have it."""
    return {"mlp_layer_types": ["dense"] + ["sparse"] * (sizes["num_hidden_layers"] - 1)}


ARCHITECTURES: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm5_next": _glm5_next,
}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A tokenizer of bytes and marks with a chat template; returns the marks' ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {mark: number for number, mark in enumerate(MARKS)}
    core = Tokenizer(models.BPE(vocab={**ids, **{byte: len(MARKS) + n for n, byte in enumerate(alphabet)}}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[2:])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return ids


def write_model(folder: Path, architecture: str, layers: int, marks: dict[str, int]) -> None:
    """The random float32 model; the same one every time."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(SEED)
    ends = {"bos_token_id": marks[BOS], "eos_token_id": marks[END], "pad_token_id": marks[END]}
    model = ARCHITECTURES[architecture]({**COMMON, **ends, "num_hidden_layers": layers}).eval()
    known = len(MARKS) + 256
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(LOGIT_SPREAD)
        head[known:] = 0
        head[: len(MARKS)] = 0  # answers are as long as they may be
    model.generation_config = GenerationConfig(bos_token_id=marks[BOS], eos_token_id=[marks[END]])
    model.save_pretrained(folder)


def make_tiny_target(folder: Path, architecture: str, layers: int) -> None:
    """Write the folder unless it is there."""
    if folder.exists():
        return
    temporary = folder.parent / f".writing-{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_model(temporary, architecture, layers, write_tokenizer(temporary))
    publish(temporary, folder)


def main() -> int:
    """Entry of ``python -m data_gen.tiny_target``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", required=True, choices=sorted(ARCHITECTURES))
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    make_tiny_target(options.folder.resolve(), options.architecture, options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
