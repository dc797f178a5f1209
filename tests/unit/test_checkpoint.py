"""A checkpoint is whole or is not taken, the best one stays, and what cannot be continued is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash2_train.checkpoint import (
    AVERAGED_WEIGHTS,
    MANIFEST,
    RANDOM,
    STATE,
    TEMPORARY,
    WEIGHTS,
    CheckpointError,
    best_checkpoint,
    check_resumable,
    load_checkpoint,
    mark_best,
    newest_checkpoint,
    save_checkpoint,
)
from dflash2_train.config import RunConfig
from dflash2_train.model.drafter import Drafter
from dflash2_train.run_state import fingerprint
from tests.drafters import random_drafter
from tests.engines import still

SETTINGS = {"train": {"lr": 1e-3}}


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter(num_layers=1)


def save(root: Path, drafter: Drafter, step: int, *, keep: int = 2, averaged: bool = False) -> Path:
    engine = still(averaged=averaged)
    return save_checkpoint(engine, drafter, root, step=step, state={"step": step}, fingerprint=SETTINGS, keep=keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_every_kind_of_state_comes_back_bit_for_bit(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 7, averaged=True)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    engine = still(averaged=True)
    engine.count = 0
    assert load_checkpoint(engine, drafter, found) == {"step": 7}
    assert engine.count == 3
    assert torch.equal(engine.random["rank0.cpu"], torch.arange(4, dtype=torch.uint8))
    source = still(averaged=True)
    for kind in source.state_kinds():
        saved = source.gather(kind, drafter)
        assert saved.keys() == engine.taken[kind].keys()
        assert all(torch.equal(saved[name], engine.taken[kind][name]) for name in saved)


def test_no_file_of_a_checkpoint_needs_a_pickle(tmp_path: Path, drafter: Drafter) -> None:
    folder = save(tmp_path, drafter, 1)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_random_states_of_another_number_of_ranks_are_left_alone(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    engine = still(world_size=2)
    load_checkpoint(engine, drafter, found)
    assert engine.random == {}
    assert set(engine.taken) == set(engine.state_kinds())


@pytest.mark.parametrize("name", [WEIGHTS, "masters.safetensors", "exp_avg.safetensors", RANDOM, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, drafter: Drafter, name: str, damage: str
) -> None:
    save(tmp_path, drafter, 1)
    path = save(tmp_path, drafter, 2) / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data))
    elif damage == "cut":
        path.write_bytes(bytes(data[: len(data) // 2]))
    else:
        path.unlink()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_folder_where_nothing_verifies_is_an_error_and_not_a_fresh_start(tmp_path: Path, drafter: Drafter) -> None:
    (save(tmp_path, drafter, 1) / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="none of 1 checkpoints verifies"):
        newest_checkpoint(tmp_path)


def test_another_tools_folder_is_passed_over(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1)
    (tmp_path / "step000002").mkdir()
    (tmp_path / "step000002" / MANIFEST).write_text('{"epoch": 3}')
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_a_kill_left_half_written_is_never_taken_and_cleared_by_the_next_save(
    tmp_path: Path, drafter: Drafter
) -> None:
    half = tmp_path / f"{TEMPORARY}step000009"
    half.mkdir()
    (half / WEIGHTS).write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    save(tmp_path, drafter, 10)
    assert names(tmp_path) == ["step000010"]


def test_weights_that_are_not_finite_never_take_the_place_of_good_ones(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1, keep=1)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="masters of fc.weight is not finite"):
        save(tmp_path, drafter, 2, keep=1)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_the_newest_and_the_best_are_kept(tmp_path: Path, drafter: Drafter) -> None:
    first = save(tmp_path, drafter, 1)
    assert mark_best(tmp_path, first, metric="acceptance", value=2.0)
    for step in (2, 3, 4):
        save(tmp_path, drafter, step)
    assert names(tmp_path) == ["best.json", "step000001", "step000003", "step000004"]
    assert best_checkpoint(tmp_path) == first


def test_only_a_better_value_of_the_same_metric_moves_the_mark(tmp_path: Path, drafter: Drafter) -> None:
    one, two = save(tmp_path, drafter, 1), save(tmp_path, drafter, 2)
    assert best_checkpoint(tmp_path) is None
    assert mark_best(tmp_path, one, metric="acceptance", value=2.0)
    assert not mark_best(tmp_path, two, metric="acceptance", value=2.0)
    assert best_checkpoint(tmp_path) == one
    assert mark_best(tmp_path, two, metric="acceptance", value=2.1)
    assert mark_best(tmp_path, one, metric="recall", value=0.5)
    assert best_checkpoint(tmp_path) == one


def test_a_value_that_is_not_finite_marks_nothing(tmp_path: Path, drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="finite"):
        mark_best(tmp_path, save(tmp_path, drafter, 1), metric="acceptance", value=float("nan"))
    assert best_checkpoint(tmp_path) is None


def test_other_settings_are_refused_with_every_difference(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    check_resumable(found, SETTINGS)
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.001 -> 0\.002"):
        check_resumable(found, {"train": {"lr": 2e-3}})


def test_files_of_an_earlier_layout_are_refused_with_the_ways_on(tmp_path: Path, drafter: Drafter) -> None:
    manifest = save(tmp_path, drafter, 1) / MANIFEST
    plain = json.loads(manifest.read_text())
    del plain["layout"]
    manifest.write_text(json.dumps(plain))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match="dflash2-export"):
        check_resumable(found, SETTINGS)


def test_two_ranks_may_continue_one_when_the_windows_stay_the_same(tiny_config: RunConfig) -> None:
    tiny_config.train.rows = 2
    data: Any = SimpleNamespace(manifest=SimpleNamespace(fingerprint="cache"), order=dict)
    one = fingerprint(tiny_config, data, 1)
    tiny_config.train.rows = 1
    assert fingerprint(tiny_config, data, 2) == one
    assert fingerprint(tiny_config, data, 1) != one
    tiny_config.train.accumulation = 2
    assert fingerprint(tiny_config, data, 1) == one


def test_a_moving_average_is_saved_whole_where_there_is_one(tmp_path: Path, drafter: Drafter) -> None:
    plain, averaged = save(tmp_path, drafter, 1), save(tmp_path, drafter, 2, averaged=True)
    assert not (plain / AVERAGED_WEIGHTS).exists()
    found = load_file(averaged / AVERAGED_WEIGHTS)
    assert found.keys() == drafter.state_dict().keys()
    torch.testing.assert_close(found["fc.weight"], drafter.fc.weight.detach() + 3.0)
