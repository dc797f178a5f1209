"""Drafters of Tencent/AngelSpec: DFlash 1 under names of its own, with a copy of the target's embedding.

    context_proj, context_norm, final_norm   fc, hidden_norm, norm
    num_target_layers                        the number of *taps*; the target's layers are target_num_hidden_layers
    target_layer_ids                         as published: the stream after that layer
    embed_tokens.weight                      the target's table, frozen in training; mask slots embed its mask row
    block size                               of the training run (dflash_block_size), in no file of the drafter

All layers attend fully and both ways inside a block. ``model_arch`` dflare and dfly and ``fusion_type`` gated_sum are
other drafters.

Facts: Tencent/AngelSpec ``angelspec/models/draft/dflash.py``, ``tools/convert_to_hf.py``,
``angelspec/config/dflash_qwen3_4b_draft_config.json``, ``angelspec/inference/engine/vllm_engine.py``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from dflash2_train.export.convert.style import (
    TARGET_LAYERS,
    Config,
    ConvertError,
    Described,
    Hints,
    Loss,
    Seen,
    Style,
    hinted,
    lost_logit_scale,
    required,
)
from dflash2_train.export.published import FIRST_ARCHITECTURE
from dflash2_train.model.drafter_config import MODEL_TYPE

OWN_TYPE = "dflash"  # model_type
NAMES = MappingProxyType(
    {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }
)
MARKS = ("context_norm.weight", "final_norm.weight")
ORDINARY = {"model_arch": OWN_TYPE, "fusion_type": "concat_fc", "model_type": OWN_TYPE}
KEYS = frozenset({"model_arch", "fusion_type", "gate_temperature", "target_num_hidden_layers"})
SAME_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


def recognises(seen: Seen) -> bool:
    """Norms under the names that AngelSpec gives them."""
    return set(MARKS) <= set(seen.header)


def publish(config: Config, hints: Hints) -> dict[str, Any]:
    """The published configuration of an AngelSpec one."""
    for key, ordinary in ORDINARY.items():
        if config.get(key, ordinary) != ordinary:
            raise ConvertError(
                f"{key}={config[key]!r}: another drafter than DFlash ({ordinary}). It cannot be converted."
            )
    layers, hidden = required(config, "num_hidden_layers"), required(config, "hidden_size")
    taps = required(config, "target_layer_ids", "; AngelSpec would spread num_target_layers over the target's layers")
    if config.get("num_target_layers", len(taps)) != len(taps):
        raise ConvertError(
            f"num_target_layers={config['num_target_layers']}, target_layer_ids={taps}: AngelSpec counts taps there. "
            "Write the list that the drafter was trained with."
        )
    theta = float(required(config, "rope_theta", "; AngelSpec would take 10000"))
    block_size = hinted(None, hints.block_size, "the block size (AngelSpec's dflash_block_size)", "--block-size")
    target_layers = hinted(
        config.get("target_num_hidden_layers"),
        hints.num_target_layers,
        "target_num_hidden_layers",
        TARGET_LAYERS,
    )
    return {
        **{key: required(config, key) for key in SAME_KEYS},
        "architectures": [FIRST_ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "is_causal": False,
        "hidden_act": "silu",
        "head_dim": config.get("head_dim") or hidden // config["num_attention_heads"],
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "num_target_layers": target_layers,
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "rope_scaling": config.get("rope_scaling"),
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": required(config, "mask_token_id", "; AngelSpec would take 151669"),
            "target_layer_ids": list(taps),
        },
    }


def configure(described: Described, _hints: Hints) -> dict[str, Any]:
    """The configuration that AngelSpec reads."""
    shape, published = described.shape, described.published
    return {
        "architectures": [FIRST_ARCHITECTURE],
        "model_type": OWN_TYPE,
        **{key: published[key] for key in SAME_KEYS},
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "num_target_layers": shape.num_taps,
        "target_hidden_size": shape.hidden_size,
        "target_num_hidden_layers": shape.num_target_layers,
        "target_layer_ids": list(shape.target_layer_ids),
        "mask_token_id": shape.mask_token_id,
        "tie_word_embeddings": False,
        "draft_vocab_size": shape.vocab_size,
        "torch_dtype": described.dtype,
    }


def loses(described: Described) -> list[Loss]:
    """What an AngelSpec folder has no place for."""
    shape = described.shape
    lost = lost_logit_scale(described, "AngelSpec")
    if shape.has_sliding_layers:
        text = f"layers that see {shape.sliding_window} positions would see all"
        lost.append(Loss(what="sliding window", text=text, drafts=True))
    text = f"set dflash_block_size={shape.block_size} in its training; converting back needs "
    return [*lost, Loss(what="block size", text=f"{text}--block-size {shape.block_size}")]


STYLE = Style(
    name="angelspec",
    title="AngelSpec",
    marks=f"tensors {' and '.join(MARKS)}",
    recognises=recognises,
    publish=publish,
    configure=configure,
    loses=loses,
    names=NAMES,
    keeps_embedding=True,
    has_second=False,
    keys=KEYS,
)
