"""Tiny drafter folders as other tools write them: their keys and tensor names, written out by hand.

Every configuration below repeats the keys of a real one, named where it is written; only sizes are small. The sizes
are those of ``tests.cases.tiny_run_config``, so that its tiny target fits them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from tests.drafters import randomise

HIDDEN, INTERMEDIATE, VOCAB, LAYERS, TARGET_LAYERS = 32, 48, 96, 2, 6
TAPS, MASK_ID, WIDTH = (0, 2, 4), 95, 4
SECOND = ("attention_conv", "mlp_conv", "candidate_selector")
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
SECOND_SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4}
SHAPE = DrafterShape(
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=INTERMEDIATE,
    vocab_size=VOCAB,
    target_layer_ids=TAPS,
    num_target_layers=TARGET_LAYERS,
    block_size=WIDTH,
    mask_token_id=MASK_ID,
    layer_types=("full_attention",) * LAYERS,
    sliding_window=None,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=128,
    **SECOND_SIZES,
)


def random_tensors(*, second: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Every tensor of a drafter under its published name; without convolution and selector for a DFlash 1."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        tensors = dict(randomise(Drafter(SHAPE), seed=3).state_dict())
    del tensors["mask_embedding"]
    kept = {name: tensor for name, tensor in tensors.items() if second or not any(part in name for part in SECOND)}
    return {name: tensor.to(dtype).contiguous() for name, tensor in kept.items()}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    """A folder with these contents; a change to ``...`` removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    edited = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(edited))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab_config(*, second: bool, sliding: bool = False) -> dict[str, Any]:
    """Keys of z-lab/dflash ``tests/fixtures/dflash2-config.json``; of a DFlash 1 those of its Qwen3-8B drafter.

    The latter are repeated in sgl-project/SpecForge ``configs/qwen3-8b-dflash.json``.
    """
    common = {"attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "hidden_act": "silu", **SIZES}
    common |= {"initializer_range": 0.02, "max_window_layers": LAYERS, "model_type": "qwen3", "rms_norm_eps": 1e-6}
    common |= {"num_target_layers": TARGET_LAYERS, "tie_word_embeddings": False, "transformers_version": "5.15.0"}
    kind = "sliding_attention" if sliding else "full_attention"
    common["layer_types"] = [kind] * LAYERS
    nested: dict[str, Any] = {"mask_token_id": MASK_ID, "target_layer_ids": list(TAPS)}
    if not second:
        return common | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": WIDTH,
            "dflash_config": nested,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "use_cache": True,
        }
    return common | {
        "architectures": ["DFlash2DraftModel"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "is_causal": False,
        "dflash_config": {**nested, "block_size": WIDTH, **SECOND_SIZES},
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        **({"sliding_window": 6} if sliding else {}),
        "use_sliding_window": sliding,
        "use_cache": False,
    }


def write_zlab(folder: Path, *, second: bool = True, sliding: bool = False, **changes: Any) -> Path:
    """As z-lab and incoai publish drafters."""
    return write(folder, zlab_config(second=second, sliding=sliding), random_tensors(second=second), **changes)


def write_specforge(folder: Path, *, second: bool = True, nested: Mapping[str, Any] | None = None) -> Path:
    """As ``specforge export --to hf`` leaves it.

    Keys of sgl-project/SpecForge ``configs/qwen3.6-27b-dflash2.json`` and of the ``dflash_config`` that
    ``specforge/modeling/draft/dflash.py`` reads; its drafts own neither embedding nor head (``export/to_hf.py``).
    """
    config = zlab_config(second=second) | {"block_size": WIDTH}
    config["dflash_config"] = {**config["dflash_config"], "attention_mode": "gqa", **(nested or {})}
    return write(folder, config, random_tensors(second=second))


def write_speculators(
    folder: Path,
    *,
    second: bool = True,
    sliding: bool = False,
    tables: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """As speculators 0.9.0 saves (``models/dflash/config.py``, ``models/dflash2/config.py``, ``config.py``).

    ``tables``: embedding and head, which versions before 0.9 saved too.
    """
    kind = "dflash2" if second else "dflash"
    layers = {
        **SIZES,
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * LAYERS,
        "max_window_layers": LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": 6 if sliding else None,
        "use_sliding_window": sliding,
        "use_cache": True,
    }
    greedy = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": WIDTH - 1}
    config = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "block_size": WIDTH,
        **(SECOND_SIZES if second else {}),
        "draft_vocab_size": VOCAB,
        "dtype": "bfloat16",
        "mask_token_id": MASK_ID,
        "sample_from_anchor": False,
        "sliding_window_non_causal": second,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**greedy, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "transformers_version": "5.19.0",
    }
    return write(folder, config, {**random_tensors(second=second), **(tables or {})}, **changes)


ANGELSPEC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


def write_angelspec(folder: Path, embedding: Tensor, **changes: Any) -> Path:
    """As Tencent/AngelSpec ``tools/convert_to_hf.py`` writes ``angelspec/models/draft/dflash.py``.

    Keys of ``angelspec/config/dflash_qwen3_4b_draft_config.json`` and the three that the tool adds.
    """
    tensors = {ANGELSPEC_NAMES.get(name, name): t for name, t in random_tensors(second=False).items()}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        **SIZES,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "num_target_layers": len(TAPS),
        "target_hidden_size": HIDDEN,
        "target_num_hidden_layers": TARGET_LAYERS,
        "target_layer_ids": list(TAPS),
        "mask_token_id": MASK_ID,
        "tie_word_embeddings": False,
        "draft_vocab_size": VOCAB,
        "_angelspec_version": "0.1.0",
        "torch_dtype": "bfloat16",
    }
    return write(folder, config, {**tensors, "embed_tokens.weight": embedding.to(torch.bfloat16)}, **changes)
