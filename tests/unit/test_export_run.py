"""From a checkpoint folder to the export that trainer and command share."""

from __future__ import annotations

import json
from collections import Counter
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_train import provenance
from dflash2_train.checkpoint import AVERAGED_WEIGHTS, MANIFEST, WEIGHTS, mark_best
from dflash2_train.config import ConfigError, RunConfig, UserError
from dflash2_train.export import record, run, tensor_file, weight_sources
from dflash2_train.export.doctor import record_checks
from dflash2_train.export.hf import load_drafter
from dflash2_train.export.weight_sources import CheckpointWeights
from dflash2_train.provenance import atomic_write_json, sha256_file
from tests.cases import make_drafter, make_target_info


@pytest.fixture
def config(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(run, "open_target_config", lambda _target: make_target_info(tiny_config))
    return tiny_config


def write_checkpoint(config: RunConfig, step: int, scale: float = 1.0) -> Path:
    """A committed checkpoint as the trainer leaves it, without optimizer state."""
    folder = Path(config.train.output_dir) / f"step{step:06d}"
    folder.mkdir(parents=True)
    state = {name: (tensor * scale).contiguous() for name, tensor in make_drafter(config).state_dict().items()}
    save_file(state, folder / WEIGHTS)
    files = {WEIGHTS: sha256_file(folder / WEIGHTS)}
    atomic_write_json(folder / MANIFEST, {"step": step, "world_size": 1, "fingerprint": {}, "files": files})
    return folder


def test_the_newest_checkpoint_is_exported_with_its_mask_vector(config: RunConfig) -> None:
    write_checkpoint(config, 10)
    newest = write_checkpoint(config, 20, scale=2.0)
    folder = run.export_checkpoint(config)
    stored = load_file(newest / WEIGHTS)
    loaded = load_drafter(folder, torch.bfloat16).state_dict()
    assert set(loaded) == set(stored)
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in stored.items())


def test_a_named_checkpoint_wins_over_the_newest(config: RunConfig) -> None:
    named = write_checkpoint(config, 10)
    write_checkpoint(config, 20, scale=2.0)
    config.export.checkpoint = str(named)
    folder = run.export_checkpoint(config)
    assert torch.equal(
        load_file(folder / "model.safetensors")["fc.weight"], load_file(named / WEIGHTS)["fc.weight"].bfloat16()
    )


def test_the_best_checkpoint_is_exported_by_its_mark(config: RunConfig) -> None:
    config.export.checkpoint = "best"
    root = Path(config.train.output_dir)
    best = write_checkpoint(config, 10)
    write_checkpoint(config, 20, scale=2.0)
    with pytest.raises(UserError, match=r"export\.checkpoint=best"):
        run.export_checkpoint(config)
    mark_best(root, best, metric="acceptance", value=2.0)
    folder = run.export_checkpoint(config)
    assert torch.equal(
        load_file(folder / "model.safetensors")["fc.weight"], load_file(best / WEIGHTS)["fc.weight"].bfloat16()
    )


def test_averaged_weights_are_exported_on_demand_and_anew_when_the_choice_changes(config: RunConfig) -> None:
    checkpoint = write_checkpoint(config, 10)
    averaged = {name: tensor * 3.0 for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    save_file(averaged, checkpoint / AVERAGED_WEIGHTS)
    for choice, expected in (("last", load_file(checkpoint / WEIGHTS)), ("ema", averaged)):
        config.export.weights = choice
        found = load_file(run.export_checkpoint(config) / "model.safetensors")
        assert torch.equal(found["fc.weight"], expected["fc.weight"].bfloat16())


def test_averaged_weights_that_no_run_kept_are_refused_by_key(config: RunConfig) -> None:
    write_checkpoint(config, 10)
    config.export.weights = "ema"
    with pytest.raises(UserError, match=r"export\.weights=ema"):
        run.export_checkpoint(config)


def test_exporting_the_same_checkpoint_again_touches_nothing(config: RunConfig) -> None:
    write_checkpoint(config, 10)
    record = run.export_checkpoint(config) / "run.json"
    before = record.stat().st_mtime_ns
    assert run.export_checkpoint(config) / "run.json" == record
    assert record.stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["weights", "damage", "dtype"])
def test_anything_that_changes_the_export_makes_it_anew(config: RunConfig, change: str) -> None:
    write_checkpoint(config, 10)
    folder = run.export_checkpoint(config)
    before = (folder / "run.json").stat().st_mtime_ns
    if change == "weights":
        write_checkpoint(config, 20, scale=2.0)
    elif change == "damage":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    else:
        config.export.dtype = "float32"
    run.export_checkpoint(config)
    assert (folder / "run.json").stat().st_mtime_ns != before
    load_drafter(folder, torch.float32)


def test_a_run_without_a_checkpoint_says_what_to_do(config: RunConfig) -> None:
    with pytest.raises(UserError, match="Train first"):
        run.export_checkpoint(config)


def test_a_checkpoint_of_another_drafter_is_refused(config: RunConfig) -> None:
    write_checkpoint(config, 10)
    config.drafter.selector_rank = 7
    with pytest.raises(UserError, match="another drafter"):
        run.export_checkpoint(config)
    assert not Path(config.export.output_dir).exists()


def test_an_export_that_the_training_would_not_leave_is_refused_before_the_first_step(config: RunConfig) -> None:
    run.check_exportable(config)
    config.export.checkpoint = "best"
    with pytest.raises(ConfigError, match=r"export\.checkpoint=best: without validation.*train\.validate_every"):
        run.check_exportable(config)
    config.train.validate_every = 5
    run.check_exportable(config)
    config.export.weights = "ema"
    with pytest.raises(ConfigError, match=r"export\.weights=ema: no average is kept.*train\.ema_decay"):
        run.check_exportable(config)
    config.train.ema_decay = 0.9
    run.check_exportable(config)


@pytest.mark.parametrize("average_last", [1, 2])
def test_a_checkpoint_whose_bytes_are_not_its_manifests_is_not_exported(config: RunConfig, average_last: int) -> None:
    for step in range(10, 30, 10):
        folder = write_checkpoint(config, step)
    if average_last > 1:
        config.export.weights, config.export.average_last = "mean", average_last
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1  # the last byte of a value, which no header tells
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(UserError, match=r"MANIFEST\.json says.*Nothing is exported"):
        run.export_checkpoint(config)
    out = Path(config.export.output_dir)
    assert not out.exists() and not list(out.parent.glob(".*.tmp")), "nothing under the final name, nothing beside it"


def test_a_checkpoint_that_changes_while_it_is_read_is_not_exported(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(config, 10) / WEIGHTS
    whole = load_file(path)
    read = CheckpointWeights.read

    def overtaken(source: CheckpointWeights, name: str) -> torch.Tensor:
        tensor = read(source, name)
        if name == "fc.weight":  # another process puts a new file in the place of the old one
            save_file({key: value + 1 for key, value in whole.items()}, path)
        return tensor

    monkeypatch.setattr(CheckpointWeights, "read", overtaken)
    with pytest.raises(UserError, match="written to while it was read"):
        run.export_checkpoint(config)
    assert not Path(config.export.output_dir).exists()


def test_weights_are_read_once_from_the_checkpoint_and_once_from_the_export(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(config, 10) / WEIGHTS
    taken: Counter[str] = Counter()
    for module in (provenance, record_checks, record, weight_sources):
        monkeypatch.setattr(module, "sha256_file", lambda file: taken.update([file.name]) or sha256_file(file))
    passed = tensor_file._read_whole

    def counted(file: FileIO, piece: memoryview) -> None:
        taken[f"bytes of {Path(str(file.name)).parent.name[:4]}"] += len(piece)
        passed(file, piece)

    monkeypatch.setattr(tensor_file, "_read_whole", counted)
    folder = run.export_checkpoint(config)
    assert taken["model.safetensors"] == taken[WEIGHTS] == 0, "no pass for a hash alone"
    mask = 4 * config_hidden(folder)
    assert taken["bytes of step"] == path.stat().st_size + mask, "the mask vector is small, and read out of order"
    written = (folder / "model.safetensors").stat().st_size
    small = sum(tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items() if "base_k" in name)
    assert written <= sum(v for k, v in taken.items() if k == "bytes of expo") <= written + small


def config_hidden(folder: Path) -> int:
    """H of an exported drafter."""
    return int(json.loads((folder / "config.json").read_text())["hidden_size"])
