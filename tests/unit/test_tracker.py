"""metrics.jsonl is the record of a run, whatever happens to the tracker or to a last line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash2_train.config import ConfigError, TrainConfig
from dflash2_train.tracker import MetricsLog, NullTracker, TensorBoardTracker, Tracker, open_tracker, read_metrics


def make_train(**settings: Any) -> TrainConfig:
    return TrainConfig(output_dir="x", steps=9, row_tokens=8, rows=1, **settings)


def opened(train: TrainConfig, folder: Path, *, first_rank: bool = True) -> Tracker:
    return open_tracker(train, name="n", run_id="r", record={}, folder=folder, step=4, first_rank=first_rank)


def test_after_a_crash_and_resume_each_step_has_one_value_from_the_later_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, attempt=1)
    for step in (1, 2, 3):
        first.write(step, {"loss": 1.0})
    first.close()
    second = MetricsLog(path, attempt=2)
    for step in (3, 4):
        second.write(step, {"loss": 2.0})
    second.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == [1.0, 1.0, 2.0, 2.0]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, attempt=1)
    log.write(1, {"loss": 1.0})
    log.close()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "att')
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_line_behind_a_torn_one_is_not_lost_to_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "attempt": 1, "loss": 3.0}\n{"step": 2, "att')
    log = MetricsLog(path, attempt=2)
    for step in (2, 3):
        log.write(step, {"loss": 2.0})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 3.0), (2, 2.0), (3, 2.0)]


def test_steps_that_a_later_attempt_has_not_reached_again_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, range(1, 9)), (2, range(5, 8)), (3, range(3, 5))):
        log = MetricsLog(path, attempt=attempt)
        for step in steps:
            log.write(step, {})
        log.close()
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)] == [(1, 1), (2, 1), (3, 3), (4, 3)]


def test_ranks_other_than_the_first_never_start_a_tracker(tmp_path: Path) -> None:
    train = make_train(wandb="online", tensorboard=True)
    assert isinstance(opened(train, tmp_path, first_rank=False), NullTracker)
    assert isinstance(opened(make_train(), tmp_path), NullTracker)


def test_a_resumed_run_goes_on_under_its_own_id_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []
    module = ModuleType("wandb")
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: None)
    errors = SimpleNamespace(UsageError=ValueError, CommError=ConnectionError, Error=RuntimeError)
    stub = {"init": lambda **given: starts.append(given) or run, "Settings": dict, "errors": errors}
    for name, value in stub.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):  # a start and a resume, which reads the id out of its checkpoint
        tracker = opened(make_train(wandb="offline"), tmp_path)
        tracker.log({"loss": 2.0}, 5)
        tracker.finish()
    assert [(start["id"], start["resume"], start["mode"]) for start in starts] == [("r", "allow", "offline")] * 2
    assert logged == [({"loss": 2.0}, 5)] * 2


class StubWriter:
    """The three calls of a SummaryWriter."""

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.closed, self.full = False, False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if self.full:
            raise OSError("no space left")
        self.scalars.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = StubWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


def test_tensorboard_gets_every_value_under_its_name_and_hides_what_a_crash_left(tmp_path: Path, stub: None) -> None:
    tracker = opened(make_train(tensorboard=True), tmp_path)
    assert isinstance(tracker, TensorBoardTracker)
    tracker.log({"loss": 2.0, "ce/slot1": 1.5}, 5)
    tracker.finish()
    writer: Any = tracker._writer
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.purge_step == 5, "steps from the first one on are written again"
    assert writer.scalars == [("loss", 2.0, 5), ("ce/slot1", 1.5, 5)]
    assert writer.closed


def test_a_tracker_that_cannot_write_is_switched_off_and_training_goes_on(
    tmp_path: Path, stub: None, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = TensorBoardTracker(tmp_path, step=0)
    writer: Any = tracker._writer
    writer.full = True
    for step in (1, 2):
        tracker.log({"loss": 2.0}, step)
    tracker.finish()
    assert caplog.text.count("TensorBoard stopped") == 1


def test_a_missing_tensorboard_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"train\.tensorboard=True: the package tensorboard is missing.*pip install"):
        opened(make_train(tensorboard=True), tmp_path)
