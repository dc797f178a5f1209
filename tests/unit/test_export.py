"""Writing an exported folder, loading it strictly, and what happens to folders that are there already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_train.config import RunConfig
from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.export.payload import ALL_FILES
from dflash2_train.export.workspace import ExportError
from dflash2_train.provenance import sha256_file
from tests.cases import RECORD, edit_json, make_drafter, make_target_info

HIDDEN = 32
MASK_ID = 95


@pytest.fixture
def folder(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "out"))


def test_an_exported_drafter_loads_back_bit_for_bit(tiny_config: RunConfig, tmp_path: Path) -> None:
    drafter = make_drafter(tiny_config)
    out = export_hf(
        drafter, tiny_config, make_target_info(tiny_config), tmp_path / "out", run_record=RECORD, dtype="float32"
    )
    loaded = load_drafter(out, torch.float32)
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_folder_holds_exactly_the_files_and_their_hashes(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == set(ALL_FILES)
    listed = json.loads((folder / "run.json").read_text())["files"]
    assert set(listed) == set(ALL_FILES) - {"run.json"}
    assert all(sha256_file(folder / name) == digest for name, digest in listed.items())


def test_every_file_may_be_read_by_the_same_people(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_mask_file_is_a_bare_bf16_vector_and_its_norm_is_recorded(folder: Path, tiny_config: RunConfig) -> None:
    vector = torch.load(folder / "mask_embedding.pt", weights_only=True)
    assert type(vector) is torch.Tensor
    assert vector.shape == (HIDDEN,)
    assert torch.equal(vector, make_drafter(tiny_config).mask_embedding.detach().bfloat16())
    record = json.loads((folder / "run.json").read_text())["export"]
    assert record["mask_embedding_norm"] == pytest.approx(float(vector.float().norm()), rel=1e-4)


def test_weights_with_shared_or_strided_storage_are_written_whole(tiny_config: RunConfig, tmp_path: Path) -> None:
    drafter = make_drafter(tiny_config)
    wide = torch.randn(2 * HIDDEN)
    drafter.norm.weight.data = wide[::2]
    drafter.hidden_norm.weight.data = drafter.norm.weight.data
    out = export_hf(
        drafter, tiny_config, make_target_info(tiny_config), tmp_path / "out", run_record=RECORD, dtype="float32"
    )
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["norm.weight"], wide[::2])
    assert torch.equal(tensors["hidden_norm.weight"], wide[::2])


def test_a_later_export_replaces_an_earlier_one(folder: Path, tiny_config: RunConfig) -> None:
    drafter = make_drafter(tiny_config)
    with torch.no_grad():
        drafter.fc.weight.mul_(2)
    export_hf(drafter, tiny_config, make_target_info(tiny_config), folder, run_record=RECORD)
    assert torch.equal(load_file(folder / "model.safetensors")["fc.weight"], drafter.fc.weight.detach().bfloat16())
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_no_export_wrote_is_left_alone(tiny_config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(ExportError, match="no export wrote"):
        export_hf(make_drafter(tiny_config), tiny_config, make_target_info(tiny_config), out, run_record=RECORD)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_a_drafter_with_a_bad_weight_never_replaces_a_good_export(folder: Path, tiny_config: RunConfig) -> None:
    before = {path.name: sha256_file(path) for path in folder.iterdir()}
    drafter = make_drafter(tiny_config)
    with torch.no_grad():
        drafter.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ExportError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        export_hf(drafter, tiny_config, make_target_info(tiny_config), folder, run_record=RECORD)
    assert {path.name: sha256_file(path) for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_an_export_set_aside_by_a_crash_comes_back(folder: Path, tiny_config: RunConfig) -> None:
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    with pytest.raises(ExportError):
        drafter = make_drafter(tiny_config)
        with torch.no_grad():
            drafter.mask_embedding.zero_()
        export_hf(drafter, tiny_config, make_target_info(tiny_config), folder, run_record=RECORD)
    assert (folder / "model.safetensors").exists()


def test_a_drafter_without_a_published_tensor_is_refused(tiny_config: RunConfig, tmp_path: Path) -> None:
    drafter = make_drafter(tiny_config)
    del drafter.layers[1].mlp_conv.kernel_projection.weight
    with pytest.raises(ExportError, match=r"layers\.1\.mlp_conv\.kernel_projection\.weight: missing"):
        export_hf(drafter, tiny_config, make_target_info(tiny_config), tmp_path / "out", run_record=RECORD)
    assert not (tmp_path / "out").exists()


def damage_weights(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if kind == "missing":
        del tensors["layers.0.self_attn.k_norm.weight"]
    elif kind == "unexpected":
        tensors["mask_hidden"] = torch.zeros(4, 4)
    elif kind == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    elif kind == "int8":
        tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.1.mlp.up_proj.weight"].to(torch.int8)
    save_file(tensors, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", r"layers\.0\.self_attn\.k_norm\.weight: missing"),
        ("unexpected", r"mask_hidden: unexpected"),
        ("shape", r"fc\.weight: shape \[32, 95\]"),
        ("int8", r"layers\.1\.mlp\.up_proj\.weight: dtype I8"),
        ("cut", r"model\.safetensors: cannot be read"),
    ],
)
def test_loading_refuses_damaged_weights_by_name(folder: Path, kind: str, text: str) -> None:
    damage_weights(folder, kind)
    with pytest.raises(ValueError, match=text):
        load_drafter(folder, torch.float32)


@pytest.mark.parametrize("form", ["row", "dict"])
def test_loading_takes_the_other_known_forms_of_the_mask_vector(folder: Path, form: str) -> None:
    path = folder / "mask_embedding.pt"
    vector = torch.load(path, weights_only=True)
    torch.save(vector[None] if form == "row" else {"embedding": vector, "mask_token_id": MASK_ID}, path)
    assert torch.equal(load_drafter(folder, torch.bfloat16).mask_embedding.detach(), vector)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "missing"),
        (torch.ones(HIDDEN + 1), r"shape \[33\]"),
        (torch.ones(HIDDEN, 1), r"shape \[32, 1\]"),
        ({"embedding": torch.ones(HIDDEN), "mask_token_id": 3}, "mask_token_id=3"),
        ({"embedding": torch.ones(HIDDEN)}, "mask_token_id=None"),
        ({"weight": torch.ones(HIDDEN)}, "'weight'"),
        ([1.0] * HIDDEN, "holds a list"),
        (torch.zeros(HIDDEN), "norm 0"),
        (torch.full((HIDDEN,), float("inf")), "not finite"),
        (torch.ones(HIDDEN, dtype=torch.int64), "dtype torch.int64"),
    ],
)
def test_loading_refuses_every_other_mask_file(folder: Path, payload: object, text: str) -> None:
    path = folder / "mask_embedding.pt"
    if payload is None:
        path.unlink()
    else:
        torch.save(payload, path)
    with pytest.raises(ValueError, match=text):
        load_drafter(folder, torch.float32)


def test_a_mask_file_that_would_run_code_is_refused(folder: Path) -> None:
    torch.save(Path("x"), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match="not a plain tensor file"):
        load_drafter(folder, torch.float32)


def test_loading_refuses_a_config_that_contradicts_itself(folder: Path) -> None:
    edit_json(folder / "config.json", block_size=5)
    with pytest.raises(ValueError, match="block_size"):
        load_drafter(folder, torch.float32)


def test_the_provenance_names_target_prompts_licences_and_commit(folder: Path) -> None:
    text = (folder / "PROVENANCE.txt").read_text()
    for part in ("tiny", "apache-2.0", "starter train", "commit abc", sha256_file(folder / "model.safetensors")):
        assert part in text
