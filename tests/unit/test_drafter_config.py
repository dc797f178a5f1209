"""The drafter's shape and its published config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from dflash2_train.config import RunConfig
from dflash2_train.model.drafter_config import DrafterShape
from tests.drafters import tiny_shape

IDS = {"bos_token_id": None, "eos_token_id": [1, 2], "pad_token_id": 0}


def published(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(tiny_shape(**changes).to_published("bfloat16", **IDS)))


def test_a_published_config_reads_back_as_the_same_shape() -> None:
    for shape in (
        tiny_shape(),
        tiny_shape(num_layers=2),
        tiny_shape(output_multiplier=0.2, final_logit_softcapping=20.0, rope_theta=1e7),
    ):
        plain = json.loads(json.dumps(shape.to_published("bfloat16", **IDS)))
        assert DrafterShape.from_published(plain) == shape


def test_an_experiment_gives_its_shape(tiny_config: RunConfig) -> None:
    shape = DrafterShape.from_config(tiny_config)
    for key, value in asdict(tiny_config.drafter).items():
        found = getattr(shape, key)
        assert (list(found) if isinstance(found, tuple) else found) == value, key
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers) == (32, 96, 6)


def test_an_experiment_without_layer_types_has_full_attention_everywhere(tiny_config: RunConfig) -> None:
    tiny_config.drafter.layer_types = []
    tiny_config.drafter.sliding_window = None
    assert DrafterShape.from_config(tiny_config).layer_types == ("full_attention",) * 2


def test_published_keys_are_those_that_mean_the_same_to_every_reader() -> None:
    config = published()
    expected = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "is_causal": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "num_target_layers": 6,
        "block_size": 4,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 63,
        "target_layer_ids": [0, 2, 4],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 5,
        "selector_top_k": 6,
    }


def test_keys_that_servers_interpret_differently_are_never_written() -> None:
    config = published()
    for key in ("target_hidden_size", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "is_neox_style"):
        assert key not in config
    for key in ("input_embedding_scale", "causal", "use_swa", "output_multiplier", "final_logit_softcapping"):
        assert key not in config["dflash_config"]


def test_without_sliding_layers_no_window_is_published() -> None:
    config = published(num_layers=2)
    assert config["use_sliding_window"] is False
    assert "sliding_window" not in config


@pytest.mark.parametrize("layers", [None, 2])
def test_transformers_keeps_window_layer_types_and_rope(layers: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = published() if layers is None else published(num_layers=layers)
    read = transformers.Qwen3Config(**config)
    assert read.layer_types == config["layer_types"]
    assert read.sliding_window == config.get("sliding_window")
    assert read.rope_parameters["rope_theta"] == config["rope_theta"]
    assert read.is_causal is False


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "model_type",
        "is_causal",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "num_target_layers",
        "layer_types",
        "use_sliding_window",
        "sliding_window",
        "dflash_config",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    config = published()
    del config[key]
    with pytest.raises(ValueError, match=key):
        DrafterShape.from_published(config)


@pytest.mark.parametrize(
    "key",
    [
        "mask_token_id",
        "target_layer_ids",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    ],
)
def test_a_missing_nested_key_is_named(key: str) -> None:
    config = published()
    del config["dflash_config"][key]
    with pytest.raises(ValueError, match=key):
        DrafterShape.from_published(config)


def test_block_size_may_stand_at_either_level_but_must_agree() -> None:
    config = published()
    del config["block_size"]
    assert DrafterShape.from_published(config).block_size == 4
    config["block_size"] = 8
    with pytest.raises(ValueError, match=r"block_size is 8 .* and 4 in dflash_config"):
        DrafterShape.from_published(config)
    config["block_size"] = None
    del config["dflash_config"]["block_size"]
    with pytest.raises(ValueError, match="block_size is missing"):
        DrafterShape.from_published(config)


def test_rope_theta_is_read_from_either_place_and_never_assumed() -> None:
    config = published(rope_theta=1e7)
    del config["rope_theta"]
    assert DrafterShape.from_published(config).rope_theta == 1e7
    config["rope_theta"] = 1e6
    with pytest.raises(ValueError, match="rope_theta"):
        DrafterShape.from_published(config)
    del config["rope_parameters"]
    assert DrafterShape.from_published(config).rope_theta == 1e6
    del config["rope_theta"]
    with pytest.raises(ValueError, match="rope_theta is missing"):
        DrafterShape.from_published(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", True),
        ("model_type", "dflash"),
        ("architectures", ["DFlashDraftModel"]),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("is_neox_style", False),
        ("rope_parameters", {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}),
        ("target_hidden_size", 64),
        ("draft_vocab_size", 32),
        ("use_sliding_window", False),
        ("sliding_window", None),
        ("sliding_window", 3),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention", "sliding_attention", "chunked_attention"]),
        ("eagle_aux_hidden_state_layer_ids", [1, 2]),
    ],
)
def test_what_this_drafter_does_not_compute_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        DrafterShape.from_published({**published(), key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_embedding_scale", 2.0),
        ("sample_from_anchor", True),
        ("causal", True),
        ("swa_window_size", 4),
        ("target_layer_ids", [2, 0, 4]),
        ("target_layer_ids", [0, 2, 6]),
        ("mask_token_id", 64),
        ("conv_group_size", 7),
        ("output_multiplier", -1.0),
    ],
)
def test_nested_values_that_cannot_be_served_are_refused(key: str, value: object) -> None:
    config = published()
    config["dflash_config"][key] = value
    with pytest.raises(ValueError, match="taps" if key == "target_layer_ids" else key):
        DrafterShape.from_published(config)


def test_a_window_without_a_sliding_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window"):
        tiny_shape(num_layers=1, layer_types=("full_attention",), sliding_window=8)


def test_a_softcap_of_zero_means_off() -> None:
    config = published()
    config["dflash_config"]["final_logit_softcapping"] = 0
    assert DrafterShape.from_published(config).final_logit_softcapping is None


def test_a_shape_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny_shape().block_size = 9  # type: ignore[misc]


def test_reading_a_shape_does_not_load_torch() -> None:
    code = "import sys, dflash2_train.model.drafter_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
