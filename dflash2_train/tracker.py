"""Records of a training run: our own JSON lines always, W&B and TensorBoard when asked for.

``metrics.jsonl`` is the record; a tracker is a copy that may fail without ending a run. A resumed run appends with a
higher attempt number; what an earlier attempt wrote from that one's first step on counts no more.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash2_train.config import ConfigError, TrainConfig

logger = logging.getLogger(__name__)
TENSORBOARD_FOLDER = "tensorboard"


class Tracker(Protocol):
    """Where a step's numbers go besides ``metrics.jsonl``."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step."""
        ...

    def finish(self) -> None:
        """Flush and close."""
        ...


class NullTracker:
    """No tracker."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class WandbTracker:
    """A W&B run; any of its failures is logged once and switches it off."""

    def __init__(self, train: TrainConfig, *, name: str, run_id: str, record: dict[str, Any]) -> None:
        import wandb

        self._failed = False
        try:
            self._run = wandb.init(
                project=train.wandb_project,
                name=name,
                id=run_id,
                resume="allow",
                mode="offline" if train.wandb == "offline" else "online",
                config=record,
                settings=wandb.Settings(init_timeout=30),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise ConfigError(
                f"train.wandb={train.wandb}: W&B did not start ({error}). "
                "Log in, or use train.wandb=offline or disabled."
            ) from error

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step under our own step number."""
        if self._failed:
            return
        import wandb

        try:
            self._run.log(values, step=step)
        except (wandb.errors.Error, OSError) as error:
            self._failed = True
            logger.warning("W&B stopped taking numbers (%s); metrics.jsonl goes on", error)

    def finish(self) -> None:
        """Flush and close."""
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard events in a folder; a disk that takes no more is logged once and switches it off.

    Args:
        folder: of the event files.
        step: steps done; what a crashed attempt wrote after them is hidden.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"train.tensorboard=True: the package {error.name} is missing. Install it with "
                "pip install 'dflash2-train[tensorboard]', or set train.tensorboard=false."
            ) from error
        self._failed = False
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step, each value under its own name."""
        if self._failed:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._failed = True
            logger.warning("TensorBoard stopped taking numbers (%s); metrics.jsonl goes on", error)

    def finish(self) -> None:
        """Flush and close."""
        if not self._failed:
            self._writer.close()


class SeveralTrackers:
    """All of them, one after the other."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step everywhere."""
        for tracker in self._trackers:
            tracker.log(values, step)

    def finish(self) -> None:
        """Flush and close all."""
        for tracker in self._trackers:
            tracker.finish()


def open_tracker(
    train: TrainConfig,
    *,
    name: str,
    run_id: str,
    record: dict[str, Any],
    folder: Path,
    step: int,
    first_rank: bool,
) -> Tracker:
    """What ``train.wandb`` and ``train.tensorboard`` ask for; ranks other than the first get the null tracker.

    Args:
        train: settings.
        name: of the run, for W&B.
        run_id: the same after a resume.
        record: settings that are shown beside the curves in W&B.
        folder: of the run; TensorBoard's files go into a folder in it.
        step: steps done.
        first_rank: whether this is the one that records.
    """
    trackers: list[Tracker] = []
    if first_rank and train.tensorboard:
        trackers.append(TensorBoardTracker(folder / TENSORBOARD_FOLDER, step=step))
    if first_rank and train.wandb != "disabled":
        trackers.append(WandbTracker(train, name=name, run_id=run_id, record=record))
    if len(trackers) > 1:
        return SeveralTrackers(trackers)
    return trackers[0] if trackers else NullTracker()


class MetricsLog:
    """Append-only ``metrics.jsonl``; one line a logged step, flushed at once."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._attempt = attempt
        torn = _ends_inside_a_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
        if torn:  # a kill mid-write: the next line must not be lost to it
            self._file.write("\n")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one step."""
        self._file.write(json.dumps({"step": step, "attempt": self._attempt, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every step once and in order, as the run that was continued in the end went; torn lines are left out.

    Of an attempt only what lies before the first step of every later one counts.
    """
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a kill mid-write
            continue
    begun: dict[float, float] = {}  # attempt -> its first step
    for row in rows:
        begun[row["attempt"]] = min(begun.get(row["attempt"], row["step"]), row["step"])
    kept = {
        row["step"]: row
        for row in rows
        if all(row["step"] < first for attempt, first in begun.items() if attempt > row["attempt"])
    }
    return [kept[step] for step in sorted(kept)]
