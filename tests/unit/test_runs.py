"""``dflash2-runs`` tells of run folders what lies in them, and refuses what is none."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash2_train.config import to_plain
from dflash2_train.evaluate.runs import Acceptance, Cell, EvalRun, RequestCounts
from dflash2_train.provenance import run_record
from dflash2_train.runs.cli import EXIT_FAULT, age, run_command
from dflash2_train.runs.compare import differing_settings, final_figures, flat_config
from dflash2_train.runs.folder import TAIL_BYTES, find_runs, open_run, summarise
from tests.cases import tiny_run_config

STEPS = 8


@cache
def bare_record() -> str:
    """What the commands record of code and machine, as JSON; the configuration is put in by each run."""
    return json.dumps(run_record({}, ["dflash2-train"]))


def make_run(root: Path, *, steps_done: int = STEPS, loss: float = 2.0, **train: Any) -> Path:
    """A run folder as the commands leave it, without its tensors."""
    config = tiny_run_config(root)
    config.name, config.train.steps = root.name, STEPS
    for key, value in train.items():
        setattr(config.train, key, value)
    folder = root / "train"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(json.loads(bare_record()) | {"config": to_plain(config)}))
    rows = [
        {"step": step, "attempt": 1, "loss": loss + 1 / step, "selector_path": 0.5, "seconds": 2.0 * step}
        for step in range(1, steps_done + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(2, steps_done + 1, 4):
        (folder / f"step{step:06d}").mkdir()
        (folder / f"step{step:06d}" / "MANIFEST.json").write_text("{}")
    return root


def export(root: Path) -> None:
    (root / "export").mkdir()
    (root / "export" / "config.json").write_text("{}")


def evaluate(root: Path, length: float) -> None:
    (root / "eval").mkdir()
    report = {"greedy": {"rates": {"acceptance_length_pooled": length}}, "speedup": 1.25}
    (root / "eval" / "report.json").write_text(json.dumps(report))


def make_cell(*, accepted: int | None, concurrency: int = 1, **values: Any) -> Cell:
    """Ten rounds of one task; None is plain decoding."""
    counts = None
    if accepted is not None:
        counts = Acceptance(rounds=10, proposed=70, accepted=accepted, accepted_per_position=[])
    method = "autoregressive" if accepted is None else "drafter"
    requests = RequestCounts(asked=1, answered=1)
    return Cell(
        method=method,
        concurrency=concurrency,
        acceptance=counts,
        requests=requests,
        output_tokens=30,
        seconds=1.0,
        **values,
    )


def write_report(folder: Path, cells: list[Cell]) -> None:
    folder.mkdir(parents=True)
    run = EvalRun(kind="runner", label="runner", protocol={"num_drafted": 4}, cells=cells)
    (folder / "report.json").write_text(json.dumps(run.to_json()))


def test_a_run_is_told_by_the_files_that_are_there(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a", steps_done=6)
    run = open_run(root)
    now = (root / "train" / "metrics.jsonl").stat().st_mtime
    found = summarise(run, now=now + 90)
    assert (found.stage, found.step, found.steps, found.checkpoints) == ("training", 6, STEPS, 2)
    assert found.loss == pytest.approx(2 + 1 / 6)
    assert found.forecast == 1.5
    assert found.acceptance_length is None
    assert found.age_seconds <= 90


def test_stages_follow_each_other(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a")
    assert summarise(open_run(root)).stage == "trained"
    export(root)
    assert summarise(open_run(root)).stage == "exported"
    evaluate(root, 1.75)
    found = summarise(open_run(root))
    assert (found.stage, found.acceptance_length) == ("evaluated", 1.75)
    data = tmp_path / "b" / "data"
    data.mkdir(parents=True)
    for name, stage in (("prompts.jsonl", "preparing"), ("conversations", "regenerating"), ("capture", "capturing")):
        (data / name).mkdir()
        assert summarise(open_run(tmp_path / "b")).stage == stage


def test_tasks_sweeps_and_servers_are_shown_by_task_k_and_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_run(tmp_path / "a")
    grid = {("GSM8K", 7, 0.0): 20, ("GSM8K", 3, 0.6): 10, ("MT-Bench", 7, 0.0): 5}
    cells = [
        make_cell(task=task, num_drafted=k, temperature=t, accepted=accepted) for (task, k, t), accepted in grid.items()
    ]
    plain = make_cell(task="GSM8K", temperature=0.0, accepted=None)
    write_report(root / "eval" / "runner", [*cells, plain])
    served = make_cell(task="hold-out", category="code", temperature=1.0, accepted=25, concurrency=16)
    write_report(root / "eval" / "holdout500" / "server" / "ours", [served])
    assert summarise(open_run(root)).stage == "evaluated"
    assert {name: value for name, value in final_figures(open_run(root)).items() if name.startswith("eval")} == {
        "eval/holdout500/server/ours: hold-out (code), K 4, T 1, 16 at once": 3.5,
        "eval/runner: GSM8K, K 7, T 0": 3.0,
        "eval/runner: GSM8K, K 3, T 0.6": 2.0,
        "eval/runner: MT-Bench, K 7, T 0": 1.5,
    }
    assert run_command(["show", str(root)]) == 0
    assert re.search(r"eval/runner: GSM8K, K 3, T 0\.6 +2\n", re.sub(r" +\n", "\n", capsys.readouterr().out))
    (root / "eval" / "runner" / "report.json").write_text('{"schema_version": 0}')
    assert run_command(["show", str(root)]) == EXIT_FAULT
    assert "runner/report.json: not a result that can be read" in capsys.readouterr().err


def test_an_export_of_an_earlier_checkpoint_does_not_hide_that_training_goes_on(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a", steps_done=5)
    export(root)
    evaluate(root, 1.5)
    assert summarise(open_run(root)).stage == "training"


def test_the_latest_attempt_tells_the_settings(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a")
    record = json.loads((root / "train" / "run.json").read_text())
    for attempt, steps in ((2, 80), (10, 90)):
        record["config"]["train"]["steps"] = steps
        (root / "train" / f"run.attempt{attempt}.json").write_text(json.dumps(record))
    assert summarise(open_run(root)).steps == 90


def test_the_last_lines_are_read_without_the_rest_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a")
    padding = "x" * 1000
    lines = [json.dumps({"step": step, "attempt": 1, "note": padding}) + "\n" for step in range(1, 601)]
    assert sum(map(len, lines)) > 2 * TAIL_BYTES
    (root / "train" / "metrics.jsonl").write_text("".join(lines) + '{"step": 601, "att')
    rows = open_run(root).last_rows()
    assert rows[-1]["step"] == 600
    assert 0 < len(rows) < 600
    assert [row["step"] for row in rows] == list(range(601 - len(rows), 601))


def test_a_folder_of_runs_stands_for_all_of_them_and_a_training_folder_for_its_own(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [run.name for run in find_runs([tmp_path])] == ["a", "b"]
    assert [run.name for run in find_runs([tmp_path / "a", tmp_path])] == ["a", "b"], "named twice, listed once"
    assert find_runs([tmp_path / "a" / "train"])[0].rows() == open_run(tmp_path / "a").rows()


def test_the_list_has_a_line_a_run_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, hours in (("old", 36), ("new", 0)):
        root = make_run(tmp_path / name)
        for path in [root, *root.rglob("*")]:
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - hours * 3600))
    evaluate(tmp_path / "new", 1.625)
    assert run_command(["list", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["new"], ["old"])]
    assert [line[0] for line in lines] == ["new", "old"]
    assert "1.625" in lines[0]
    assert lines[1][-2:] == ["1.5", "days"]


def test_showing_a_run_tells_command_code_figures_and_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_run(tmp_path / "a")
    (root / "train" / "best.json").write_text(
        json.dumps({"checkpoint": "step000006", "metric": "validation/acceptance_length", "value": 1.5})
    )
    assert run_command(["show", str(root)]) == 0
    text = capsys.readouterr().out
    for part in ("dflash2-train", "8 of 8", "2, 6", "step000006: validation/acceptance_length 1.5", "00:16"):
        assert part in text, part


def test_showing_a_run_tells_what_its_ranks_do_and_what_a_resume_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_run(tmp_path / "a")
    state = {"job": 7, "step": 5, "doing": "stepping", "time": 1e9, "ended": ""}
    told = [
        state | {"rank": 1},
        state | {"rank": 0, "ended": "rank 1 is gone"},
        state | {"rank": 2, "job": 6, "time": 1},
    ]
    for one in told:
        folder = root / "train" / "logs" / f"rank{one['rank']}"
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps(one).ljust(100))
    (root / "train" / "logs" / "rank2" / "stacks.txt").write_text("")
    record = json.loads((root / "train" / "run.json").read_text()) | {"changed": ["world_size: 2 -> 1"]}
    (root / "train" / "run.attempt2.json").write_text(json.dumps(record))
    assert run_command(["show", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "ended" in shown
    assert "behind step 5: rank 1 is gone" in shown
    assert "stepping behind step 5, last sign of life" in shown
    assert "world_size: 2 -> 1" in shown
    assert "rank 2" not in shown


def test_comparing_shows_the_settings_that_differ_and_no_names_of_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_run(tmp_path / "one", lr=1e-3), make_run(tmp_path / "two", lr=2e-3, loss=1.0)
    evaluate(two, 1.875)
    configs = [open_run(root).record()["config"] for root in (one, two)]
    assert differing_settings(configs) == [("train.lr", ["0.001", "0.002"])]
    assert run_command(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "train.lr" in text and "1.875" in text and "output_dir" not in text


def test_a_setting_that_an_older_record_lacks_is_shown_as_missing() -> None:
    assert differing_settings([{"train": {"lr": 1, "new": 2}}, {"train": {"lr": 1}}]) == [("train.new", ["2", "-"])]
    assert flat_config({"name": "x", "run_dir": "r/x", "a": {"b": "r/x/c", "d": {}}}) == {
        "a.b": "${run_dir}/c",
        "a.d": {},
    }


def test_final_figures_are_means_over_the_end_and_the_newest_of_what_is_counted(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a")
    rows = [{"step": step, "attempt": 1, "loss": float(step > 50), "seconds": step} for step in range(1, 101)]
    rows[20]["validation/acceptance_length"] = 1.5
    (root / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = final_figures(open_run(root))
    assert (found["loss"], found["seconds"], found["validation/acceptance_length"]) == (1.0, 100, 1.5)


def test_plots_go_beside_the_metrics_of_one_run_or_where_they_are_asked_for(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    assert run_command(["plot", str(one)]) == 0
    assert (one / "train" / "metrics.png").exists()
    assert run_command(["plot", str(one), str(two), "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").exists()


@pytest.mark.parametrize("command", ["list", "show", "compare", "plot"])
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_command([command, str(tmp_path / "nowhere")]) == EXIT_FAULT
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "no run folder" in error and error.count("\n") == 1


def test_what_cannot_be_done_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run(tmp_path / "a")
    assert run_command(["compare", str(root)]) == EXIT_FAULT
    assert "two or more" in capsys.readouterr().err
    (root / "train" / "metrics.jsonl").write_text("")
    assert run_command(["plot", str(root)]) == EXIT_FAULT
    assert "no logged step" in capsys.readouterr().err
    (root / "train" / "run.json").write_text("{")
    assert run_command(["list", str(root)]) == EXIT_FAULT
    assert "run.json: not readable" in capsys.readouterr().err


def test_ages_are_in_the_unit_that_suits_them() -> None:
    assert [age(seconds) for seconds in (-1, 61, 3700, 90_000)] == ["00:00", "01:01", "1:01:40", "1.0 days"]
