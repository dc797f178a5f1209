"""metrics.jsonl is the record of a run, whatever happens to the tracker or to a last line."""

from __future__ import annotations

from pathlib import Path

from dflash2_train.config import TrainConfig
from dflash2_train.tracker import MetricsLog, NullTracker, open_tracker, read_metrics


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


def test_ranks_other_than_the_first_never_start_a_tracker() -> None:
    train = TrainConfig(output_dir="x", steps=1, row_tokens=8, rows=1, wandb="online")
    assert isinstance(open_tracker(train, name="n", run_id="r", record={}, first_rank=False), NullTracker)
