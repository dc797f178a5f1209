"""What is logged of a step, all values for the records and the few worth a look on the console, and where it goes."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash2_train.config import RunConfig
from dflash2_train.engine import TrainEngine
from dflash2_train.metrics import MetricSums
from dflash2_train.progress import ProgressReporter
from dflash2_train.run_state import Progress
from dflash2_train.telemetry.gradients import with_gradient_shares
from dflash2_train.telemetry.recorder import StepRecorder
from dflash2_train.tracker import MetricsLog, open_tracker

SHOWN_WAIT = 0.02  # share of the time spent waiting for data that is worth a look


def step_values(
    sums: MetricSums,
    engine: TrainEngine,
    recorder: StepRecorder,
    progress: Progress,
    *,
    waited: float,
    epoch: int,
) -> dict[str, float]:
    """What is logged of a step, over all ranks, each of which must call it; names stand in ``telemetry.catalogue``.

    Args:
        sums: of this rank's part of the window.
        engine: that made the step.
        recorder: what it cost.
        progress: behind the step.
        waited: seconds that this rank stood still for want of data, since any fixed point.
        epoch: of the next row.
    """
    reduced = sums.reduced(engine.all_reduce_sum)
    norm = engine.gradient_norm()
    return {
        **with_gradient_shares(reduced.rates()),
        "lr": engine.learning_rate(),
        **{f"lr/{group}": rate for group, rate in engine.group_rates().items()},
        **({"grad_norm": norm} if math.isfinite(norm) else {}),  # JSON has no infinity
        "epoch": float(epoch),
        "dropped": float(progress.dropped),
        **recorder.values(waited, engine.all_reduce_sum),
        "seconds": round(progress.seconds, 3),
    }


def console_facts(values: dict[str, float]) -> str:
    """The few numbers worth a look while it runs."""
    shown = [f"loss {values['loss']:.3f}"] if "loss" in values else ["step dropped"]
    if "selector_path" in values:
        shown.append(f"forecast length {1 + values['selector_path']:.2f}")
    shown.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "utilisation" in values:
        shown.append(f"{values['utilisation']:.0%} of peak")
    if values["data_wait"] >= SHOWN_WAIT:
        shown.append(f"waits for data {values['data_wait']:.0%}")
    return "  ".join([*shown, f"lr {values['lr']:.1e}"])


class RunLog:
    """Where a run's numbers go: ``metrics.jsonl``, the trackers and the console. A context manager.

    Args:
        config: the experiment.
        output: run folder.
        progress: at the start.
        record: settings that trackers show beside the curves.
        first: whether this is the first rank; the others write nothing.
    """

    def __init__(
        self, config: RunConfig, output: Path, progress: Progress, record: dict[str, Any], *, first: bool
    ) -> None:
        self._tracker = open_tracker(
            config.train,
            name=config.name,
            run_id=progress.run_id,
            record=record,
            folder=output,
            step=progress.step,
            first_rank=first,
        )
        self._log = MetricsLog(output / "metrics.jsonl", attempt=progress.attempt) if first else None
        self.reporter = ProgressReporter("train", config.train.steps, done=progress.step, enabled=first)

    def __enter__(self) -> RunLog:
        self.reporter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reporter.__exit__(kind, error, trace)
        if error is None:
            self._tracker.finish()
        if self._log is not None:
            self._log.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record a step."""
        if self._log is not None:
            self._log.write(step, values)
            self._tracker.log(values, step)
            self.reporter.update(step, console_facts(values))
