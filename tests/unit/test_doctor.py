"""The check-up: a fresh export is clean, and each silent fault is found under its own rule."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_train.config import RunConfig
from dflash2_train.export.doctor import Finding, check_folder
from dflash2_train.export.hf import export_hf
from tests.cases import RECORD, edit_json, make_drafter, make_target_info, tiny_run_config


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export for the whole module; tests edit copies."""
    root = tmp_path_factory.mktemp("doctor")
    config = tiny_run_config(root)
    return export_hf(make_drafter(config), config, make_target_info(config), root / "out", run_record=RECORD)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy without the record, whose hashes would report every edit a second time."""
    return Path(shutil.copytree(pristine, tmp_path / "out", ignore=shutil.ignore_patterns("run.json")))


def errors_of(folder: Path) -> Iterator[Finding]:
    return (finding for finding in check_folder(folder) if finding.severity == "error")


def test_a_fresh_export_has_no_error_and_no_warning_but_the_tiny_size(pristine: Path, tiny_config: RunConfig) -> None:
    findings = check_folder(pristine, target_info=make_target_info(tiny_config))
    assert [(finding.severity, finding.rule) for finding in findings] == [("warning", "selector")]


@pytest.mark.parametrize(
    ("changes", "rule", "text"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architecture", "DFlash2DraftModel"),
        ({"model_type": "dflash"}, "layout", "model_type"),
        ({"is_causal": ...}, "layout", "is_causal"),
        ({"is_causal": True}, "layout", "is_causal"),
        ({"block_size": 5}, "layout", "block_size"),
        ({"dflash_config__block_size": ...}, "required", "block_size"),
        ({"dflash_config__block_size": "4"}, "required", "block_size"),
        ({"dflash_config": None}, "required", "dflash_config"),
        ({"dflash_config__target_layer_ids": [2, 0, 4]}, "layout", "ascending"),
        ({"dflash_config__target_layer_ids": [0, 2, 2]}, "layout", "unique"),
        ({"dflash_config__target_layer_ids": [1, 3, 6]}, "layout", "0-based"),
        ({"dflash_config__mask_token_id": 96}, "layout", "mask_token_id"),
        ({"dflash_config__conv_group_size": 7}, "layout", "conv_group_size"),
        ({"dflash_config__input_embedding_scale": 2.0}, "layout", "input_embedding_scale"),
        ({"dflash_config__output_multiplier": 0}, "layout", "output_multiplier"),
        ({"dflash_config__causal": True}, "layout", "causal"),
        ({"dflash_config__causal": False}, "forbidden-key", "causal"),
        ({"eos_token_id": [1, 95]}, "mask-id", "eos_token_id"),
        ({"pad_token_id": 95}, "mask-id", "pad_token_id"),
        ({"layer_types": ["full_attention"]}, "layout", "layer_types"),
        ({"layer_types": ["full_attention", "full_attention"]}, "layout", "use_sliding_window"),
        (
            {"layer_types": ["full_attention", "full_attention"], "use_sliding_window": False},
            "sliding-window",
            "no layer slides",
        ),
        ({"use_sliding_window": ...}, "layout", "use_sliding_window"),
        ({"sliding_window": 3}, "layout", "sliding_window"),
        ({"num_target_layers": ...}, "required", "num_target_layers"),
        ({"rope_theta": 5.0}, "layout", "rope_theta"),
        ({"rope_parameters": ...}, "rope", "rope_theta"),
        ({"tie_word_embeddings": True}, "tie-word-embeddings", "tie_word_embeddings"),
        ({"selector_rank": 5}, "nesting", "selector_rank"),
        ({"output_multiplier": 2.0}, "nesting", "output_multiplier"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "forbidden-key", "eagle_aux"),
        ({"has_own_lm_head": True}, "forbidden-key", "has_own_lm_head"),
    ],
)
def test_each_silent_fault_of_the_config_is_an_error(
    folder: Path, changes: dict[str, Any], rule: str, text: str
) -> None:
    edit_json(folder / "config.json", **changes)
    assert any(finding.rule == rule and text in finding.message for finding in errors_of(folder)), check_folder(folder)


def edit_tensor(folder: Path, name: str, new: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if new is None:
        del tensors[name]
    else:
        tensors[name] = new
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "new", "rule"),
    [
        ("norm.weight", None, "tensors"),
        ("embed_tokens.weight", torch.zeros(96, 16, dtype=torch.bfloat16), "tensors"),
        ("mask_hidden", torch.zeros(32, dtype=torch.bfloat16), "tensors"),
        ("candidate_selector.predecessor_codebook.weight", torch.zeros(96, 5, dtype=torch.bfloat16), "tensors"),
        ("layers.0.mlp_conv.base_kernel", torch.zeros(2, 32, 2, dtype=torch.bfloat16), "tensors"),
        ("norm.weight", torch.ones(32), "dtype"),
        ("fc.weight", torch.full((32, 96), float("nan"), dtype=torch.bfloat16), "finite"),
    ],
)
def test_each_fault_of_the_tensors_is_an_error(folder: Path, name: str, new: torch.Tensor | None, rule: str) -> None:
    edit_tensor(folder, name, new)
    assert any(finding.rule == rule for finding in errors_of(folder)), check_folder(folder)


@pytest.mark.parametrize("vector", [torch.zeros(32), torch.ones(32), torch.ones(31), torch.full((32,), float("nan"))])
def test_an_untrained_or_unusable_mask_vector_is_an_error(folder: Path, vector: torch.Tensor) -> None:
    torch.save(vector.bfloat16(), folder / "mask_embedding.pt")
    assert [finding.rule for finding in errors_of(folder)] == ["mask-embedding"]


def test_a_second_weights_file_is_an_error(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"old")
    assert [finding.rule for finding in errors_of(folder)] == ["files"]


def test_a_file_changed_after_export_is_found_by_its_hash(pristine: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(pristine, tmp_path / "out"))
    (out / "README.md").write_text("edited")
    (out / "PROVENANCE.txt").unlink()
    found = {(finding.severity, finding.rule, finding.message.split()[0]) for finding in errors_of(out)}
    assert found == {("error", "record", "README.md"), ("error", "record", "PROVENANCE.txt")}


def test_a_block_size_that_old_converters_do_not_find_is_a_warning(folder: Path) -> None:
    edit_json(folder / "config.json", block_size=...)
    assert ("warning", "block-size") in {(finding.severity, finding.rule) for finding in check_folder(folder)}
    assert list(errors_of(folder)) == []


def test_positions_that_the_target_reaches_and_the_drafter_does_not_are_an_error(
    folder: Path, tiny_config: RunConfig
) -> None:
    edit_json(folder / "config.json", max_position_embeddings=63)
    findings = check_folder(folder, target_info=make_target_info(tiny_config))
    assert [finding.rule for finding in findings if finding.severity == "error"] == ["positions"]


def test_another_target_is_found(folder: Path, tiny_config: RunConfig) -> None:
    tiny_config.target.num_layers = 7
    findings = check_folder(folder, target_info=make_target_info(tiny_config))
    assert [finding.message for finding in findings if finding.rule == "target"] == [
        "num_target_layers=6, but the target has 7"
    ]


def test_a_folder_without_a_config_gives_one_clear_error(tmp_path: Path) -> None:
    (finding,) = check_folder(tmp_path)
    assert finding.severity == "error"
    assert "config.json: missing" in finding.message
