"""A run folder as its files tell it; nothing is written, and a run that is under way may be looked at.

Looked at is the layout that ``run_dir`` gives, ``NAME/{data,train,export,eval}``, or a training folder alone:
``run.json``, ``run.attemptN.json``, ``metrics.jsonl``, ``stepNNNNNN/``, ``best.json`` and ``logs/rankN/status.json``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.tracker import read_metrics

METRICS, RECORD, REPORT = "metrics.jsonl", "run.json", "report.json"
# What was begun last tells the stage of a run that has not trained yet.
DATA_STAGES = (("capture", "capturing"), ("conversations", "regenerating"), ("prompts.jsonl", "preparing"))
TAIL_BYTES = 1 << 18  # of metrics.jsonl that are read for its last lines


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """One run: its folder, and the folder of its training in it."""

    root: Path
    training: Path

    @property
    def name(self) -> str:
        """What it is called in tables and legends."""
        return self.root.name or str(self.root)

    def record(self) -> dict[str, Any]:
        """The run record of the latest attempt; empty before the first."""
        paths = [path for path in self.training.glob("run*.json") if _attempt_of(path) is not None]
        return read_json(max(paths, key=lambda path: _attempt_of(path) or 0)) if paths else {}

    def first_record(self) -> dict[str, Any]:
        """The record of the first attempt, which alone holds the attestation; empty before it."""
        path = self.training / RECORD
        return read_json(path) if path.exists() else {}

    def rows(self) -> list[dict[str, float]]:
        """All log rows, each step once; empty where nothing was logged."""
        path = self.training / METRICS
        return read_metrics(path) if path.exists() else []

    def last_rows(self) -> list[dict[str, float]]:
        """The last lines of the log that are whole, oldest first, without reading the rest."""
        path = self.training / METRICS
        if not path.exists():
            return []
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - TAIL_BYTES), os.SEEK_SET)
            lines = file.read().split(b"\n")
        # The first line is cut, unless all was read; what follows the last end of a line is torn or empty.
        whole = lines[1:-1] if size > TAIL_BYTES else lines[:-1]
        return [json.loads(line) for line in whole if line.startswith(b"{") and line.endswith(b"}")]

    def checkpoints(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return sorted(int(path.parent.name.removeprefix("step")) for path in self.training.glob("step*/MANIFEST.json"))

    def best(self) -> dict[str, Any] | None:
        """What ``best.json`` marks, or None."""
        path = self.training / "best.json"
        return read_json(path) if path.exists() else None

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank told last, by rank; those of the newest start, without files that are just being written."""
        told: list[dict[str, Any]] = []
        for path in self.training.glob("logs/rank*/status.json"):
            try:
                told.append(json.loads(path.read_bytes()))
            except ValueError:
                continue
        newest = max(told, key=lambda state: state["time"], default=None)
        states = [state for state in told if newest is not None and state["job"] == newest["job"]]
        return sorted(states, key=lambda state: state["rank"])

    def evaluation(self) -> dict[str, Any] | None:
        """The report of dflash2-eval about the hold-out, or None."""
        path = self.root / "eval" / REPORT
        return read_json(path) if path.exists() else None

    def reports(self) -> list[Path]:
        """Reports of all further evaluations: of tasks, sweeps and servers."""
        return sorted(set((self.root / "eval").rglob(REPORT)) - {self.root / "eval" / REPORT})


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of the list. None where there is nothing to tell."""

    name: str
    stage: str
    step: int
    steps: int | None
    loss: float | None
    forecast: float | None  # accepted drafts a block on training text, plus 1
    acceptance_length: float | None  # measured: pooled, greedy
    checkpoints: int
    age_seconds: float


def summarise(run: RunFolder, *, now: float | None = None) -> RunSummary:
    """Where a run stands.

    Args:
        run: to look at.
        now: seconds since the epoch; the clock's by default.
    """
    rows, record, checkpoints = run.last_rows(), run.record(), run.checkpoints()
    steps = record.get("config", {}).get("train", {}).get("steps")
    step = max([int(row["step"]) for row in rows[-1:]] + checkpoints[-1:], default=0)
    path = last_value(rows, "selector_path")
    return RunSummary(
        name=run.name,
        stage=stage_of(run, step=step, steps=steps),
        step=step,
        steps=steps,
        loss=last_value(rows, "loss"),
        forecast=None if path is None else 1 + path,
        acceptance_length=acceptance_length(run.evaluation()),
        checkpoints=len(checkpoints),
        age_seconds=(time.time() if now is None else now) - last_change(run),
    )


def stage_of(run: RunFolder, *, step: int, steps: int | None) -> str:
    """How far a run has come; unfinished training goes before results of an earlier checkpoint."""
    if step > 0 or run.record():
        if steps is None or step < steps:
            return "training"
        if run.evaluation() is not None or run.reports():
            return "evaluated"
        return "exported" if (run.root / "export" / "config.json").exists() else "trained"
    return next((stage for name, stage in DATA_STAGES if (run.root / "data" / name).exists()), "empty")


def last_change(run: RunFolder) -> float:
    """Time of the newest sign of life, seconds since the epoch."""
    places = [run.root, run.root / "data", run.root / "export", run.root / "eval", run.training]
    files = [*run.training.glob("*.json*"), run.root / "eval" / REPORT, *run.reports()]
    return max(path.stat().st_mtime for path in [*places, *files] if path.exists())


def last_value(rows: Sequence[dict[str, float]], name: str) -> float | None:
    """The newest value of a figure, or None."""
    return next((row[name] for row in reversed(rows) if name in row), None)


def acceptance_length(report: dict[str, Any] | None) -> float | None:
    """Pooled greedy acceptance length of an evaluation report."""
    if report is None:
        return None
    value = report.get("greedy", {}).get("rates", {}).get("acceptance_length_pooled")
    return None if value is None else float(value)


def open_run(path: Path) -> RunFolder:
    """The run in a folder.

    Raises:
        UserError: it holds none.
    """
    run = find_run(path)
    if run is None:
        raise UserError(
            f"{path}: no run folder. One holds train/run.json or data/; name such a folder, as runs/smollm2_cpu."
        )
    return run


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """The runs that are named, and those right inside named folders that are none themselves; each once.

    Raises:
        UserError: a path holds no run.
    """
    found: list[RunFolder] = []
    for path in paths:
        run = find_run(path)
        inside = [] if run or not path.is_dir() else [find_run(part) for part in sorted(path.iterdir())]
        runs = [one for one in (run, *inside) if one is not None]
        if not runs:
            open_run(path)
        found += runs
    return list(dict.fromkeys(found))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run.

    Raises:
        UserError: the file is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}). Restore it, or leave this folder out.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object. Restore it, or leave this folder out.")
    return value


def find_run(path: Path) -> RunFolder | None:
    """The run in a folder, or None."""
    path = path.resolve()
    training = path / "train"
    if any((training / name).exists() for name in (RECORD, METRICS)) or (path / "data").is_dir():
        return RunFolder(root=path, training=training)
    if (path / METRICS).exists() or ((path / RECORD).exists() and (path / "attestation.json").exists()):
        return RunFolder(root=path, training=path)
    return None


def _attempt_of(path: Path) -> int | None:
    match = re.fullmatch(r"run(?:\.attempt(\d+))?\.json", path.name)
    return None if match is None else int(match.group(1) or 1)
