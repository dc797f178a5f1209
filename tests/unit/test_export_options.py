"""What an export can carry beside the plain folder: shards, own tables, a mean of checkpoints, fewer proposals."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash2_train.checkpoint import MANIFEST, WEIGHTS
from dflash2_train.config import ConfigError, RunConfig, UserError
from dflash2_train.export import hf, run
from dflash2_train.export.doctor import check_folder
from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.export.weight_files import INDEX, WeightFiles
from dflash2_train.export.weight_writer import plan_shards, write_weights
from dflash2_train.export.workspace import ExportError
from dflash2_train.provenance import atomic_write_json, sha256_file
from dflash2_train.target import FrozenHead
from tests.cases import RECORD, edit_json, make_drafter, make_target_info
from tests.families import EXPERIMENTS, family

HIDDEN, VOCAB, MASK_ID = 32, 96, 95


def export(config: RunConfig, root: Path, dtype: str = "bfloat16") -> Path:
    drafter, info = make_drafter(config), make_target_info(config)
    return export_hf(drafter, config, info, root / "out", run_record=RECORD, dtype=dtype)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiments_export_is_clean(experiment: str, tmp_path: Path) -> None:
    config = family(experiment, tmp_path)
    config.target.hidden_size = 16 * 17  # below C (C + 1) llama.cpp refuses, and the doctor warns
    folder = export(config, tmp_path)
    assert check_folder(folder, target_info=make_target_info(config)) == []
    assert len(WeightFiles(folder).header) == 6 + 15 * config.drafter.num_layers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_streamed_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b.weight": torch.randn(3, 5), "a": torch.randn(7), "c": torch.randn(2, 2, 3)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (tmp_path / "ours").mkdir()
    hashes = write_weights(tmp_path / "ours", shapes, tensors.__getitem__, dtype=dtype)
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(cast, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    (path,) = (tmp_path / "ours").iterdir()
    assert path.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert hashes == {path.name: sha256_file(path)}


def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def read(_name: str) -> Tensor:
        most.append(sum(reference() is not None for reference in alive))
        tensor = torch.zeros(4, 4)
        alive.append(weakref.ref(tensor))
        return tensor

    write_weights(tmp_path, {f"t{n}": (4, 4) for n in range(8)}, read, dtype=torch.float32)
    assert max(most) <= 1, "the tensor before may still be held, none older"


def test_a_disk_that_kept_other_bytes_is_noticed(
    tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worn(folder: Path, *arguments: object, **settings: object) -> dict[str, str]:
        hashes = write_weights(folder, *arguments, **settings)  # type: ignore[arg-type]
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return hashes

    monkeypatch.setattr(hf, "write_weights", worn)
    with pytest.raises(ExportError, match=r"differ from what was written: model\.safetensors"):
        export(tiny_config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(
    tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_settings: object) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write_weights", full)
    with pytest.raises(ExportError, match="No space left on device"):
        export(tiny_config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shards_hold_every_tensor_once_and_stay_below_the_limit() -> None:
    shapes = {f"t{n}": (n + 1, 2) for n in range(9)}
    shards = plan_shards(shapes, 2, max_bytes=24)
    assert sorted(name for shard in shards for name in shard.tensors) == sorted(shapes)
    for shard in shards:
        size = sum(4 * shapes[name][0] for name in shard.tensors)
        assert size <= 24 or len(shard.tensors) == 1, "a larger tensor stands alone"
    assert [shard.name for shard in shards][0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert [shard.name for shard in plan_shards(shapes, 2, max_bytes=None)] == ["model.safetensors"]


@pytest.fixture
def sharded(tiny_config: RunConfig, tmp_path: Path) -> Path:
    tiny_config.export.max_shard_gib = 2e-5
    return export(tiny_config, tmp_path)


def test_a_sharded_export_loads_as_the_same_drafter_and_is_clean(sharded: Path, tiny_config: RunConfig) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    loaded = load_drafter(sharded, torch.bfloat16).state_dict()
    for name, tensor in make_drafter(tiny_config).state_dict().items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name
    assert check_folder(sharded, target_info=make_target_info(tiny_config)) == [
        finding for finding in check_folder(sharded) if finding.check == "selector-lattice"
    ]


def test_transformers_reads_the_index_of_a_sharded_export(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = {path.name: load_file(path) for path in sharded.glob("*.safetensors")}
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    stored = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    assert stored == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    ("fault", "text"), [("gone", "cannot be read"), ("moved", "does not say what"), ("twice", "stands beside")]
)
def test_a_sharded_folder_that_lost_something_is_refused(sharded: Path, fault: str, text: str) -> None:
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    if fault == "gone":
        last.unlink()
    elif fault == "moved":
        listed = json.loads((sharded / INDEX).read_text())["weight_map"]
        edit_json(sharded / INDEX, weight_map=listed | {"x": last.name})
    else:
        save_file({"x": torch.zeros(1)}, sharded / "model.safetensors")
    with pytest.raises(ValueError, match=text):
        load_drafter(sharded, torch.float32)


def test_an_index_that_leaves_the_folder_is_refused(sharded: Path) -> None:
    edit_json(sharded / INDEX, weight_map={"fc.weight": "../secret.safetensors"})
    with pytest.raises(ValueError, match=r"outside its folder: \.\./secret"):
        WeightFiles(sharded)


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The embedding of a target whose head is its embedding."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    monkeypatch.setattr(hf.FrozenHead, "load", lambda _target, *, dtype: FrozenHead(table, table))
    return table


def test_own_tables_are_the_targets_bit_for_bit(tiny_config: RunConfig, tmp_path: Path, tied: Tensor) -> None:
    tiny_config.export.tables = ["embed_tokens", "lm_head"]
    folder = export(tiny_config, tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], tied)
    assert torch.equal(stored["lm_head.weight"], tied)
    assert len(stored) == 6 + 15 * 2 + 2
    assert not [finding for finding in check_folder(folder) if finding.severity == "error"]
    loaded = load_drafter(folder, torch.bfloat16).state_dict()
    assert torch.equal(loaded["fc.weight"], stored["fc.weight"])


def test_a_folded_mask_replaces_one_row_of_the_embedding_and_nothing_of_the_head(
    tiny_config: RunConfig, tmp_path: Path, tied: Tensor
) -> None:
    tiny_config.export.tables, tiny_config.export.fold_mask = ["embed_tokens", "lm_head"], True
    folder = export(tiny_config, tmp_path)
    stored = load_file(folder / "model.safetensors")
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True)
    assert torch.equal(stored["embed_tokens.weight"][MASK_ID], mask)
    others = [row for row in range(VOCAB) if row != MASK_ID]
    assert torch.equal(stored["embed_tokens.weight"][others], tied[others])
    assert torch.equal(stored["lm_head.weight"], tied)
    assert json.loads((folder / "run.json").read_text())["export"]["mask_folded"] is True
    card = (folder / "README.md").read_text()
    assert "copies in this folder: embed_tokens, lm_head, the trained vector in the mask token's row" in card


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fold_mask": True}, r"export\.fold_mask"),
        ({"tables": ["wte"]}, r"export\.tables"),
        ({"tables": ["lm_head", "lm_head"]}, r"export\.tables"),
        ({"weights": "mean"}, r"export\.average_last"),
        ({"average_last": 2}, r"export\.average_last"),
        ({"weights": "mean", "average_last": 9}, r"train\.keep_checkpoints"),
        ({"max_shard_gib": 0.0}, r"export\.max_shard_gib"),
        ({"num_proposals": 4}, r"export\.num_proposals"),
    ],
)
def test_settings_that_make_no_export_are_refused_by_name(
    tiny_config: RunConfig, changes: dict[str, object], text: str
) -> None:
    for key, value in changes.items():
        setattr(tiny_config.export, key, value)
    with pytest.raises(ConfigError, match=text):
        tiny_config.check()


def test_the_large_target_is_served_with_8_of_its_11_slots(tmp_path: Path) -> None:
    config = family("glm53", tmp_path)
    folder = export(config, tmp_path)
    card = (folder / "README.md").read_text()
    assert '"num_speculative_tokens": 8' in card
    assert "--speculative-num-draft-tokens 9" in card
    assert "--spec-draft-n-max 8" in card
    assert "More than 11 drafted tokens were never trained" in card
    assert json.loads((folder / "run.json").read_text())["export"]["num_proposals"] == 8
    assert json.loads((folder / "config.json").read_text())["block_size"] == 12
    assert config.eval.num_drafted == 8, "it is measured as it is served"


@pytest.fixture
def checkpoints(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Four checkpoints whose weights are 1, 2, 3 and 4 times the same tensors, in fp32 masters and rounded ones."""
    monkeypatch.setattr(run, "open_target_config", lambda _target: make_target_info(tiny_config))
    tiny_config.train.keep_checkpoints = 4
    tiny_config.export.weights, tiny_config.export.average_last = "mean", 3
    state = make_drafter(tiny_config).state_dict()
    folders = []
    for number in range(1, 5):
        folder = Path(tiny_config.train.output_dir) / f"step{number:06d}"
        folder.mkdir(parents=True)
        scaled = {name: (tensor * number).contiguous() for name, tensor in state.items()}
        save_file(scaled, folder / "masters.safetensors")
        save_file({name: tensor.bfloat16() for name, tensor in scaled.items()}, folder / WEIGHTS)
        files = {name: sha256_file(folder / name) for name in ("masters.safetensors", WEIGHTS)}
        manifest = {"step": number, "world_size": 1, "layout": 2, "fingerprint": {"lr": 1}, "files": files}
        atomic_write_json(folder / MANIFEST, manifest)
        folders.append(folder)
    return folders


def test_a_mean_is_made_of_the_last_checkpoints_masters_and_rounded_once(
    tiny_config: RunConfig, checkpoints: list[Path]
) -> None:
    folder = run.export_checkpoint(tiny_config)
    stacked = [load_file(path / "masters.safetensors") for path in checkpoints[1:]]
    found = load_file(folder / "model.safetensors")
    found["mask_embedding"] = torch.load(folder / "mask_embedding.pt", weights_only=True)
    for name in stacked[0]:
        wanted = (stacked[0][name] + stacked[1][name] + stacked[2][name]) / 3
        assert torch.equal(found[name], wanted.bfloat16()), name
    source = json.loads((folder / "run.json").read_text())["source"]
    assert list(source["mean_of"]) == [f"{path.name}/masters.safetensors" for path in checkpoints[1:]]


def test_a_mean_ends_at_the_checkpoint_that_is_named(tiny_config: RunConfig, checkpoints: list[Path]) -> None:
    tiny_config.export.checkpoint, tiny_config.export.average_last = str(checkpoints[1]), 2
    found = load_file(run.export_checkpoint(tiny_config) / "model.safetensors")["fc.weight"]
    assert torch.equal(found, (load_file(checkpoints[0] / "masters.safetensors")["fc.weight"] * 1.5).bfloat16())


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("few", "has 4 checkpoints"),
        ("damaged", "cannot be read.*export.checkpoint"),
        ("missing", "missing files"),
        ("foreign", "different settings"),
    ],
)
def test_a_mean_of_too_few_damaged_or_foreign_checkpoints_is_refused(
    tiny_config: RunConfig, checkpoints: list[Path], fault: str, text: str
) -> None:
    if fault == "few":
        tiny_config.export.average_last = 5
    elif fault == "damaged":
        (checkpoints[2] / "masters.safetensors").write_bytes(b"")
    elif fault == "missing":
        (checkpoints[2] / WEIGHTS).unlink()
    else:
        edit_json(checkpoints[2] / MANIFEST, fingerprint={"lr": 2})
    with pytest.raises(UserError, match=text):
        run.export_checkpoint(tiny_config)
    assert not Path(tiny_config.export.output_dir).exists()


def test_a_change_of_options_makes_the_export_anew(tiny_config: RunConfig, checkpoints: list[Path]) -> None:
    folder = run.export_checkpoint(tiny_config)
    before = (folder / "run.json").stat().st_mtime_ns
    assert (run.export_checkpoint(tiny_config) / "run.json").stat().st_mtime_ns == before
    tiny_config.export.num_proposals = 2
    run.export_checkpoint(tiny_config)
    assert (folder / "run.json").stat().st_mtime_ns != before


def test_weights_trained_with_other_taps_are_refused_though_every_tensor_fits(
    tiny_config: RunConfig, checkpoints: list[Path]
) -> None:
    tiny_config.export.weights, tiny_config.export.average_last = "last", 1
    trained = {"target_layer_ids": [0, 2, 5], "max_position_embeddings": 7}
    edit_json(checkpoints[-1] / MANIFEST, shape=trained)
    with pytest.raises(UserError, match=r"target_layer_ids: \[0, 2, 5\] -> \[0, 2, 4\]"):
        run.export_checkpoint(tiny_config)
    edit_json(checkpoints[-1] / MANIFEST, shape=trained | {"target_layer_ids": [0, 2, 4]})
    run.export_checkpoint(tiny_config)  # the limit of positions is free
