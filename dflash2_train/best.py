"""Validation in the loop, and the mark on the checkpoint that did best on it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from dflash2_train.checkpoint import MANIFEST, mark_best
from dflash2_train.config import RunConfig
from dflash2_train.engine import TrainEngine
from dflash2_train.objective import Objective
from dflash2_train.progress import ProgressReporter
from dflash2_train.run_state import Progress
from dflash2_train.telemetry.recorder import StepRecorder
from dflash2_train.training_data import TrainingData
from dflash2_train.validation import Outcome, Validator

logger = logging.getLogger(__name__)


def open_validator(
    config: RunConfig, data: TrainingData, objective: Objective, engine: TrainEngine
) -> Validator | None:
    """What looks at hold-out captures every ``train.validate_every`` steps; None for never."""
    if config.train.validate_every == 0:
        return None
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    return Validator(config, data, objective, engine, dtype)


class BestKeeper:
    """Validates when it is due and knows which checkpoint did best.

    Args:
        validator: None where nothing is validated.
        recorder: whose clock stands still meanwhile.
        progress: of the run, which remembers the best.
        output: folder of the checkpoints.
    """

    def __init__(self, validator: Validator | None, recorder: StepRecorder, progress: Progress, output: Path) -> None:
        self._validator, self._recorder, self._progress, self._output = validator, recorder, progress, output

    def validate(self, reporter: ProgressReporter, *, leaving: bool) -> Outcome | None:
        """Validate behind a step that is due, unless the run was asked to leave; None where it was not done."""
        if self._validator is None or leaving or not self._validator.due(self._progress.step):
            return None
        with self._recorder.paused():
            outcome = self._validator.run(self._progress.step)
        reporter.show(outcome.table())
        alarm = outcome.alarm()
        if alarm is not None:
            logger.warning(alarm)
        return outcome

    def takes(self, outcome: Outcome | None) -> bool:
        """Remember the present step if it did better than all before; says whether."""
        return outcome is not None and self._progress.takes_for_best(outcome.metric, outcome.best_by)

    def mark(self) -> None:
        """Point ``best.json`` at the checkpoint of the best validation, also if a kill kept that from being done."""
        progress, folder = self._progress, self._output / f"step{self._progress.best_step:06d}"
        if progress.best_step > 0 and (folder / MANIFEST).exists():
            mark_best(self._output, folder, metric=progress.best_metric, value=progress.best_value)
