"""Names, keys and storage types of a GGUF drafter, and what a type may lose."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch

from dflash2_train.config import GGUF_TYPES
from dflash2_train.export.gguf_layout import (
    STORAGE_TYPES,
    Entry,
    drafter_entries,
    gguf_name,
    published_name,
    shape_faults,
    shape_from_entries,
    storage_type,
    stored_bytes,
)
from dflash2_train.export.gguf_types import GgufError, decode, encode, error_bound
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from tests.drafters import TINY_SHAPE

GLM_5_LAYERS = DrafterShape(
    hidden_size=4096,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=154880,
    target_layer_ids=(5, 14, 24, 33, 42),
    num_target_layers=45,
    block_size=8,
    mask_token_id=154856,
    layer_types=("sliding_attention",) * 5,
    sliding_window=2048,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=1048576,
)


def test_the_five_layer_drafter_of_glm_has_81_tensors_under_the_names_that_llama_cpp_reads() -> None:
    names = {gguf_name(name): shape for name, shape in Drafter.expected_tensors(GLM_5_LAYERS).items()}
    assert len(names) == 81
    assert names["fc.weight"] == (4096, 20480)
    assert names["selector_hidden.weight"] == (256, 4096)
    assert names["selector_predecessor.weight"] == names["selector_successor.weight"] == (154880, 256)
    assert names["enc.output_norm.weight"] == names["output_norm.weight"] == (4096,)
    layer = {name.removeprefix("blk.4.") for name in names if name.startswith("blk.4.")}
    assert layer == {
        *(f"attn_{part}.weight" for part in ("norm", "q", "k", "v", "output", "q_norm", "k_norm", "conv_proj")),
        *(f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down", "conv_proj")),
        "attn_conv_base",
        "ffn_conv_base",
    }


def test_every_tensor_name_leads_back_to_the_published_one() -> None:
    names = [*Drafter.expected_tensors(GLM_5_LAYERS), "embed_tokens.weight", "lm_head.weight"]
    assert [published_name(gguf_name(name)) for name in names] == names
    assert published_name("blk.0.attn_sinks.weight") is None
    assert published_name("markov_w1.weight") is None


def test_the_keys_of_the_glm_drafter_are_the_contracts() -> None:
    entries = drafter_entries(GLM_5_LAYERS, mrope=False)
    whole = {key: entry.value for key, entry in entries.items() if entry.kind == "UINT32"}
    assert whole == {
        "block_count": 5,
        "context_length": 1048576,
        "embedding_length": 4096,
        "feed_forward_length": 12288,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 2048,
        "rope.dimension_count": 128,
        "vocab_size": 154880,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }
    assert {key: entry for key, entry in entries.items() if key not in whole} == {
        "attention.layer_norm_rms_epsilon": Entry("FLOAT32", 1e-5),
        "rope.freq_base": Entry("FLOAT32", 10000.0),
        "attention.causal": Entry("BOOL", False),
        "attention.sliding_window_pattern": Entry("BOOL", [True] * 5, array=True),
        "target_layers": Entry("INT32", [6, 15, 25, 34, 43], array=True),
    }


def test_optional_keys_stand_only_where_they_mean_something() -> None:
    full = replace(GLM_5_LAYERS, layer_types=("full_attention",) * 5, sliding_window=None)
    scaled = replace(full, output_multiplier=0.5, final_logit_softcapping=20.0)
    plain, more = drafter_entries(full, mrope=False), drafter_entries(scaled, mrope=True)
    assert not {key for key in plain if "sliding" in key}
    assert {key: more[key] for key in more.keys() - plain.keys()} == {
        "logit_scale": Entry("FLOAT32", 0.5),
        "final_logit_softcapping": Entry("FLOAT32", 20.0),
        "rope.dimension_sections": Entry("INT32", [64, 0, 0, 0], array=True),
    }


def read_values(shape: DrafterShape) -> dict[str, object]:
    """What a reader would find in a file of this shape."""
    values: dict[str, object] = {
        f"dflash.{key}": entry.value for key, entry in drafter_entries(shape, mrope=False).items()
    }
    return {**values, "general.architecture": "dflash", "tokenizer.ggml.mask_token_id": shape.mask_token_id}


@pytest.mark.parametrize(
    "shape", [GLM_5_LAYERS, TINY_SHAPE, replace(GLM_5_LAYERS, output_multiplier=0.25, final_logit_softcapping=5.0)]
)
def test_a_shape_comes_back_from_its_keys(shape: DrafterShape) -> None:
    values = read_values(shape) | {"dflash2_train.num_target_layers": shape.num_target_layers}
    assert shape_from_entries(values) == (shape, [])


def test_a_file_of_another_writer_leaves_the_targets_depth_open_and_says_so() -> None:
    shape, notes = shape_from_entries(read_values(GLM_5_LAYERS))
    assert shape == replace(GLM_5_LAYERS, num_target_layers=43)
    assert len(notes) == 1 and "43" in notes[0]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("general.architecture", "llama", "must be dflash"),
        ("dflash.attention.causal", True, "must be false"),
        ("dflash.target_layers", None, r"dflash\.target_layers is missing"),
        ("dflash.block_size", None, r"dflash\.block_size is missing"),
        ("tokenizer.ggml.mask_token_id", None, r"tokenizer\.ggml\.mask_token_id is missing"),
        ("dflash.attention.sliding_window_pattern", None, "sliding_window_pattern is missing"),
        ("dflash.attention.sliding_window_pattern", [True], "layer_types"),
        ("dflash.target_layers", [6, 6, 25, 34, 43], "taps="),
    ],
)
def test_keys_that_describe_no_drafter_are_refused_by_name(key: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shape_from_entries(read_values(GLM_5_LAYERS) | {key: value})


def test_too_many_candidates_for_llama_cpp_are_told_before_it_does() -> None:
    assert shape_faults(GLM_5_LAYERS) == []
    assert "272" in shape_faults(replace(GLM_5_LAYERS, hidden_size=256))[0]


def test_norms_and_convolution_bases_stay_float32_and_odd_rows_become_f16() -> None:
    kinds = {
        gguf_name(name): storage_type(gguf_name(name), shape, "Q8_0", codebook="F16")
        for name, shape in Drafter.expected_tensors(TINY_SHAPE).items()
    }
    float32 = {name for name, kind in kinds.items() if kind == "F32"}
    assert float32 == {name for name in kinds if "norm" in name or name.endswith("_base")}
    assert kinds["selector_predecessor.weight"] == kinds["selector_successor.weight"] == "F16"
    assert kinds["selector_hidden.weight"] == "Q8_0"  # rows of 32
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # rows of 48
    assert storage_type("selector_successor.weight", (64, 5), "Q4_0") == "F16"  # rows of 5


def test_the_storage_types_are_those_of_the_package_and_every_other_one_it_writes_is_ternary() -> None:
    assert tuple(STORAGE_TYPES) == GGUF_TYPES
    for name, kind in STORAGE_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block, kind.bytes)
        assert gguf.LlamaFileType(kind.file_type).name.split("_", 1)[1] in (name, f"{name}_MOE")
    writes = set()
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quantize(torch.zeros(1, 256).numpy(), kind)
        except NotImplementedError:
            continue
        writes.add(kind.name)
    assert writes - set(GGUF_TYPES) == {"TQ1_0", "TQ2_0"}


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e2])
def test_values_come_back_within_the_bound_of_their_type_and_the_bound_is_no_excuse(kind: str, scale: float) -> None:
    values = torch.randn(64, 96) * scale
    values[::2, ::9] *= 20  # blocks with an outlier
    values[3], values[5] = values[3].abs(), 0.0
    stored = encode(values, kind, "x")
    assert stored.shape == stored_bytes((64, 96), kind)
    error = (decode(stored, kind) - values).abs()
    bound = error_bound(values, kind)
    assert bool((error <= bound).all())
    if kind != "F32" and scale >= 1e-3:
        assert float((error / bound.clamp_min(1e-30)).max()) > 0.5  # so a value that is off by more is found


def test_bf16_weights_are_stored_without_loss_as_bf16_and_f32() -> None:
    values = torch.randn(8, 64, dtype=torch.bfloat16)
    for kind in ("BF16", "F32"):
        assert torch.equal(decode(encode(values, kind, "x"), kind), values.float())


def test_a_value_too_large_for_f16_is_refused_by_name() -> None:
    with pytest.raises(GgufError, match=r"fc\.weight: a value of 7e\+04"):
        encode(torch.full((1, 32), 7e4), "F16", "fc.weight")
