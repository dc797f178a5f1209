"""A drafter's GGUF written by hand from an exported folder, so that a fault can be put into any key or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

PREFIX = "dflash."
# Written down a second time, from the layout's description.
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


@dataclass(kw_only=True)
class Parts:
    """Keys (their kind told by the value's type) and tensors in torch's order."""

    keys: dict[str, Any]
    tensors: dict[str, np.ndarray[Any, Any]]
    architecture: str = "dflash"


Edit = Callable[[Parts], object]


def _name(published: str) -> str:
    if not published.startswith("layers."):
        return NAMES[published]
    _, layer, part = published.split(".", 2)
    stem, dot, suffix = part.rpartition(".weight")
    return f"blk.{layer}.{NAMES[stem]}{dot}{suffix}" if dot else f"blk.{layer}.{NAMES[part]}"


def gguf_parts(folder: Path) -> Parts:
    """What a converter would write for an exported folder: conv bases and norms F32, the rest F16."""
    published = json.loads((folder / "config.json").read_text())
    nested = published["dflash_config"]
    keys: dict[str, Any] = {
        "block_count": published["num_hidden_layers"],
        "context_length": published["max_position_embeddings"],
        "embedding_length": published["hidden_size"],
        "feed_forward_length": published["intermediate_size"],
        "attention.head_count": published["num_attention_heads"],
        "attention.head_count_kv": published["num_key_value_heads"],
        "attention.key_length": published["head_dim"],
        "attention.value_length": published["head_dim"],
        "attention.layer_norm_rms_epsilon": published["rms_norm_eps"],
        "rope.freq_base": published["rope_parameters"]["rope_theta"],
        "attention.causal": False,
        "target_layers": [tap + 1 for tap in nested["target_layer_ids"]],
        **{key: nested[key] for key in nested if key.startswith(("block", "conv", "selector"))},
        "tokenizer.ggml.tokens": [f"t{id}" for id in range(published["vocab_size"])],
        "tokenizer.ggml.mask_token_id": nested["mask_token_id"],
    }
    if published["use_sliding_window"]:
        keys["attention.sliding_window"] = published["sliding_window"]
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in published["layer_types"]]
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = _name(name)
        wide = new.endswith(("_norm.weight", "_conv_base"))
        tensors[new] = tensor.to(torch.float32 if wide else torch.float16).numpy()
    return Parts(keys=keys, tensors=tensors)


def write_gguf(path: Path, parts: Parts) -> Path:
    """Write the parts as they are."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, parts.architecture)
    for key, value in parts.keys.items():
        full = key if key.startswith("tokenizer.") else PREFIX + key
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_array(full, value)
    for name, tensor in parts.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
