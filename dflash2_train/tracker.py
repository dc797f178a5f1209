"""Records of a training run: our own JSON lines always, W&B when asked for.

``metrics.jsonl`` is the record; the tracker is a copy that may fail without ending a run. A resumed run appends with
a higher attempt number, and readers keep the latest attempt of each step.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from dflash2_train.config import ConfigError, TrainConfig

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where a step's numbers go besides ``metrics.jsonl``."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step."""
        ...

    def finish(self) -> None:
        """Flush and close."""
        ...


class NullTracker:
    """W&B switched off."""

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


def open_tracker(train: TrainConfig, *, name: str, run_id: str, record: dict[str, Any], first_rank: bool) -> Tracker:
    """The tracker that ``train.wandb`` asks for; ranks other than the first get the null one."""
    if train.wandb == "disabled" or not first_rank:
        return NullTracker()
    return WandbTracker(train, name=name, run_id=run_id, record=record)


class MetricsLog:
    """Append-only ``metrics.jsonl``; one line a logged step, flushed at once."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._attempt = attempt
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one step."""
        self._file.write(json.dumps({"step": step, "attempt": self._attempt, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The latest attempt of every step, in order; a torn last line (a kill mid-write) is left out."""
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        known = by_step.get(row["step"])
        if known is None or known["attempt"] <= row["attempt"]:
            by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step)]
