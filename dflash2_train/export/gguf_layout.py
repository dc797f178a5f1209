"""What stands in a GGUF drafter, as llama.cpp's architecture ``dflash`` reads it: keys, tensor names, storage types.

llama.cpp knows a DFlash 2 drafter by the tensor ``selector_hidden.weight``. Shapes are written as torch has them; the
file counts dimensions from the fastest one, so [2, Kc, H] reads there as {H, Kc, 2} with the same bytes and nothing is
transposed. Taps are written as ``target_layers`` = tap + 1, the layer *after* which llama.cpp takes the state.

Free of torch and of the gguf package. Letters: H hidden, V vocabulary, D head size, C candidates, L drafter layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash2_train.model.drafter_config import EMBEDDING, HEAD, DrafterShape

ARCHITECTURE = "dflash"
OWN_PREFIX = "dflash2_train"  # keys that only this project reads; llama.cpp passes over them
MASK_KEY = "tokenizer.ggml.mask_token_id"
TOKENS_KEY = "tokenizer.ggml.tokens"

_WHOLE = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    EMBEDDING: "token_embd.weight",
    HEAD: "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_WHOLE_BACK = {there: here for here, there in _WHOLE.items()}
_LAYER_BACK = {there: here for here, there in _LAYER.items()}
_FIELD_KEYS = {
    "num_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "block_size": "block_size",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_FLOATS = ("rms_norm_eps", "rope_theta")
CODEBOOKS = ("selector_predecessor.weight", "selector_successor.weight")


class StorageType(NamedTuple):
    """How ggml stores rows: so many bytes for a block of so many values."""

    block: int
    bytes: int
    file_type: int  # general.file_type of a file that is mostly of this type


STORAGE_TYPES = {
    "F32": StorageType(1, 4, 0),
    "F16": StorageType(1, 2, 1),
    "BF16": StorageType(1, 2, 32),
    "Q8_0": StorageType(32, 34, 7),
    "Q5_1": StorageType(32, 24, 9),
    "Q5_0": StorageType(32, 22, 8),
    "Q4_1": StorageType(32, 20, 3),
    "Q4_0": StorageType(32, 18, 2),
    "MXFP4": StorageType(32, 17, 38),
}


@dataclass(frozen=True)
class Entry:
    """A value and its GGUF type: ``UINT32``, ``FLOAT32``, ``BOOL``, ``STRING``; with ``array`` a list of them."""

    kind: str
    value: Any
    array: bool = False


def gguf_name(published: str) -> str:
    """The tensor's name in the file.

    Raises:
        KeyError: llama.cpp has no such tensor of this architecture.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", published)
    return f"blk.{layer[1]}.{_LAYER[layer[2]]}" if layer else _WHOLE[published]


def published_name(name: str) -> str | None:
    """The published name of a tensor of the file; None for one that no drafter of ours has."""
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer is None:
        return _WHOLE_BACK.get(name)
    return f"layers.{layer[1]}.{_LAYER_BACK[layer[2]]}" if layer[2] in _LAYER_BACK else None


def stays_float32(name: str, num_dims: int) -> bool:
    """Whether llama.cpp computes with the tensor element by element, in F32: norms and the convolutions' bases."""
    return num_dims == 1 or not name.endswith(".weight")


def storage_type(name: str, shape: tuple[int, ...], wanted: str, codebook: str | None = None) -> str:
    """The type that a tensor gets in a file of type ``wanted``.

    A row that is no whole number of blocks cannot be stored in a block type: such a tensor becomes F16, as llama.cpp's
    own converter has it.

    Args:
        name: in the file.
        shape: as torch has it.
        wanted: key of ``STORAGE_TYPES``.
        codebook: type of the selector's codebooks; None = ``wanted``.
    """
    if stays_float32(name, len(shape)):
        return "F32"
    kind = codebook if codebook is not None and name in CODEBOOKS else wanted
    return kind if shape[-1] % STORAGE_TYPES[kind].block == 0 else "F16"


def stored_bytes(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape with its last axis counted in bytes."""
    block, size, _ = STORAGE_TYPES[kind]
    assert shape[-1] % block == 0
    return (*shape[:-1], shape[-1] // block * size)


def shape_faults(shape: DrafterShape) -> list[str]:
    """What llama.cpp would refuse at load, one line each; empty = it loads."""
    width = shape.selector_top_k
    if shape.hidden_size < width * (width + 1):
        return [
            f"selector_top_k={width}: llama.cpp needs hidden_size >= C * (C + 1) = {width * (width + 1)}, and it is "
            f"{shape.hidden_size}. Train with fewer candidates, or serve with vLLM or SGLang."
        ]
    return []


def drafter_entries(shape: DrafterShape, *, mrope: bool) -> dict[str, Entry]:
    """Every key of the architecture, without the leading ``dflash.``.

    Args:
        shape: of the drafter.
        mrope: the target rotates by sections (M-RoPE), so llama.cpp hands the drafter positions of that form. A drafter
            counts in one direction only: its one section is half the head size.
    """
    entries = {
        key: Entry("FLOAT32" if field in _FLOATS else "UINT32", getattr(shape, field))
        for field, key in _FIELD_KEYS.items()
    }
    entries["attention.value_length"] = Entry("UINT32", shape.head_dim)
    entries["rope.dimension_count"] = Entry("UINT32", shape.head_dim)
    entries["vocab_size"] = Entry("UINT32", shape.vocab_size)
    entries["attention.causal"] = Entry("BOOL", False)
    entries["target_layers"] = Entry("INT32", [tap + 1 for tap in shape.target_layer_ids], array=True)
    if shape.has_sliding_layers:
        sliding = [kind == "sliding_attention" for kind in shape.layer_types]
        entries["attention.sliding_window"] = Entry("UINT32", shape.sliding_window)
        entries["attention.sliding_window_pattern"] = Entry("BOOL", sliding, array=True)
    if shape.output_multiplier != 1.0:
        entries["logit_scale"] = Entry("FLOAT32", shape.output_multiplier)
    if shape.final_logit_softcapping is not None:
        entries["final_logit_softcapping"] = Entry("FLOAT32", shape.final_logit_softcapping)
    if mrope:
        entries["rope.dimension_sections"] = Entry("INT32", [shape.head_dim // 2, 0, 0, 0], array=True)
    return entries


def shape_from_entries(values: Mapping[str, Any]) -> tuple[DrafterShape, list[str]]:
    """The shape that a file's keys describe, and one line for each thing that they leave open.

    The file does not say how many layers the target has. A file of ours does, under a key of our own; for others the
    least number that the taps allow is taken and said so.

    Args:
        values: whole key -> value, as read.

    Raises:
        ValueError: another architecture, a missing key, causal attention, or values that fit no drafter.
    """
    if values.get("general.architecture") != ARCHITECTURE:
        raise ValueError(f"general.architecture={values.get('general.architecture')!r}: must be {ARCHITECTURE}.")
    if values.get(f"{ARCHITECTURE}.attention.causal", False) is not False:
        raise ValueError(f"{ARCHITECTURE}.attention.causal=true: blocks are bidirectional inside, so it must be false.")
    taps = [layer - 1 for layer in _stated(values, "target_layers")]
    notes, num_target_layers = [], values.get(f"{OWN_PREFIX}.num_target_layers")
    if num_target_layers is None:
        num_target_layers = max(taps, default=0) + 1
        notes.append(f"the target's number of layers is not stated; {num_target_layers} is the least the taps allow")
    sizes = {field: _stated(values, key) for field, key in _FIELD_KEYS.items()}
    window = values.get(f"{ARCHITECTURE}.attention.sliding_window")
    pattern = _stated(values, "attention.sliding_window_pattern") if window else [False] * sizes["num_layers"]
    shape = DrafterShape(
        **sizes,
        vocab_size=values.get(f"{ARCHITECTURE}.vocab_size") or len(values.get(TOKENS_KEY, ())),
        target_layer_ids=tuple(taps),
        num_target_layers=num_target_layers,
        mask_token_id=_stated(values, MASK_KEY, prefix=""),
        layer_types=tuple("sliding_attention" if slides else "full_attention" for slides in pattern),
        sliding_window=window or None,
        output_multiplier=values.get(f"{ARCHITECTURE}.logit_scale") or 1.0,
        final_logit_softcapping=values.get(f"{ARCHITECTURE}.final_logit_softcapping") or None,
    )
    return shape, notes


def _stated(values: Mapping[str, Any], key: str, prefix: str = f"{ARCHITECTURE}.") -> Any:
    if values.get(prefix + key) is None:
        raise ValueError(f"{prefix}{key} is missing: not a DFlash 2 drafter, or one of an older converter.")
    return values[prefix + key]
