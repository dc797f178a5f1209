"""Drafters of vllm-project/speculators, 0.9: a flat configuration around a nested one of the layers.

    speculators_model_type          dflash or dflash2; its other types are other drafters
    aux_hidden_state_layer_ids      index into Hugging Face's hidden_states: tap + 1; 0 would be the embedding
    transformer_layer_config        Qwen 3 keys of the drafter's layers; vocab_size is the target's
    draft_vocab_size                rows of the head; fewer than vocab_size come with a map, d2t and t2d
    sliding_window_non_causal       whether sliding layers look both ways inside a block
    sample_from_anchor              whether slot 0 drafts too
    speculators_config              the target ("verifier") by name, and how many tokens to propose

Tensor names are the published ones. It saves no embedding and, with the whole vocabulary, no head; earlier versions
saved both. The number of the target's layers stands nowhere.

Facts: speculators 0.9.0 ``models/dflash/{config,core}.py``, ``models/dflash2/{config,core}.py``,
``convert/dflash/converter.py``; vllm 0.32.0 ``transformers_utils/configs/speculators/algos.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash2_train.export.convert.style import (
    TARGET_LAYERS,
    Config,
    ConvertError,
    Described,
    Hints,
    Loss,
    Style,
    hinted,
    lost_logit_scale,
    required,
)
from dflash2_train.export.published import FIRST_ARCHITECTURE, SECOND_KEYS
from dflash2_train.model.drafter_config import ARCHITECTURE, MODEL_TYPE
from dflash2_train.taps import hf_hidden_state_index

VERSION = "0.9.0"
TYPES = {"dflash": FIRST_ARCHITECTURE, "dflash2": ARCHITECTURE}  # speculators_model_type -> published class
LAYERS = "transformer_layer_config"
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "rms_norm_eps",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "use_sliding_window",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
)
KEYS = frozenset(
    f"""
    {LAYERS} speculators_model_type speculators_version speculators_config aux_hidden_state_layer_ids max_anchors
    sliding_window_non_causal sample_from_anchor
    """.split()
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def publish(config: Config, hints: Hints) -> dict[str, Any]:
    """The published configuration of a speculators one."""
    kind = config.get("speculators_model_type")
    if kind not in TYPES:
        raise ConvertError(
            f"speculators_model_type={kind!r}: only {' and '.join(TYPES)} are drafters of this kind. "
            "It cannot be converted."
        )
    layers = required(config, LAYERS)
    if not isinstance(layers, Mapping) or layers.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ConvertError(f"{LAYERS}: must be an object of model_type {MODEL_TYPE}. It cannot be converted.")
    _refuse_vocabulary(config, layers)
    _refuse_directions(config, layers)
    nested = {
        "block_size": required(config, "block_size"),
        "mask_token_id": required(config, "mask_token_id"),
        "target_layer_ids": _taps(required(config, "aux_hidden_state_layer_ids")),
        **{key: required(config, key) for key in SECOND_KEYS if kind == "dflash2"},
    }
    return {
        **layers,
        "architectures": [TYPES[kind]],
        "model_type": MODEL_TYPE,
        "is_causal": False,
        "use_sliding_window": bool(layers.get("use_sliding_window")),
        "block_size": hinted(nested["block_size"], hints.block_size, "block_size", "--block-size"),
        "num_target_layers": hinted(None, hints.num_target_layers, "the number of the target's layers", TARGET_LAYERS),
        "target_hidden_size": config.get("target_hidden_size"),
        "dflash_config": nested,
    }


def _taps(ids: list[int]) -> list[int]:
    if min(ids, default=0) < 1:
        raise ConvertError(
            f"aux_hidden_state_layer_ids={ids}: 0 is the target's embedding, before any layer, which no tap of this "
            "drafter is. It cannot be converted."
        )
    return [index - 1 for index in ids]


def _refuse_vocabulary(config: Config, layers: Config) -> None:
    rows, vocabulary = config.get("draft_vocab_size"), layers.get("vocab_size")
    if rows != vocabulary:
        raise ConvertError(
            f"draft_vocab_size={rows}, the target's vocabulary {vocabulary}: this drafter has a head of its own over a "
            "part of the vocabulary (d2t, t2d), and drafters here use the target's head over all of it. Train it with "
            "draft_vocab_size equal to the target's."
        )


def _refuse_directions(config: Config, layers: Config) -> None:
    if config.get("sample_from_anchor"):
        raise ConvertError(
            "sample_from_anchor=true: slot 0 drafts too, which it never does here. It cannot be converted."
        )
    both_ways = config.get("sliding_window_non_causal", True if config["speculators_model_type"] == "dflash2" else None)
    if "sliding_attention" in (layers.get("layer_types") or []) and both_ways is not True:
        raise ConvertError(
            f"sliding_window_non_causal={both_ways}: its sliding layers were trained causal inside a block "
            "(speculators' default for dflash; vllm takes the opposite where the key is absent), and blocks are "
            "bidirectional here. It cannot be converted."
        )


def configure(described: Described, hints: Hints) -> dict[str, Any]:
    """The configuration that speculators 0.9 and, of these folders, vLLM read."""
    published, shape = described.published, described.shape
    nested = published["dflash_config"]
    kind = "dflash2" if described.generation == 2 else "dflash"
    greedy = {"proposal_type": "greedy", "speculative_tokens": shape.num_drafted}
    return {
        "architectures": [TYPES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": hints.verifier, "architectures": list(hints.verifier_architectures)},
        },
        "aux_hidden_state_layer_ids": [hf_hidden_state_index(tap) for tap in shape.target_layer_ids],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        **{key: nested[key] for key in SECOND_KEYS if key in nested},
        LAYERS: {
            "model_type": MODEL_TYPE,
            **{key: published[key] for key in (*LAYER_KEYS, *TOKENS) if key in published},
            "sliding_window": shape.sliding_window,
        },
        "tie_word_embeddings": False,
        "dtype": described.dtype,
    }


def loses(described: Described) -> list[Loss]:
    """What a speculators configuration has no key for."""
    layers = described.shape.num_target_layers
    return [
        *lost_logit_scale(described, "speculators"),
        Loss(
            what="num_target_layers",
            text=f"it does not say that the target has {layers} layers; converting back needs "
            f"--target or --num-target-layers {layers}",
        ),
    ]


STYLE = Style(
    name="speculators",
    title=f"speculators {VERSION}",
    marks="speculators_model_type in config.json",
    recognises=lambda seen: "speculators_model_type" in seen.config,
    publish=publish,
    configure=configure,
    loses=loses,
    keys=KEYS,
    unused=frozenset({"verifier_norm.weight", "verifier_lm_head.weight"}),  # of the target, for its losses
)
