"""The gate: a run whose acceptance dropped by more than the noise against a named baseline fails.

A task fails when the upper end of the noise band of (run - baseline) lies below zero by more than the tolerance. A
task of the baseline that the run lacks fails too, and so does a run with requests that failed: otherwise the hard ones
could drop out unseen. Exit code 1.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dflash2_train.config import GateConfig, absolute
from dflash2_train.evaluate.compare import Comparison, TaskComparison, compare, measured_as
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.runs import EvalRun

logger = logging.getLogger(__name__)
EXIT_DROPPED = 1


@dataclass(frozen=True, kw_only=True)
class TaskVerdict:
    """One task's part of the verdict."""

    task: str
    passed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """The verdict and what it rests on."""

    comparison: Comparison
    tasks: list[TaskVerdict]

    @property
    def passed(self) -> bool:
        """Whether every task passed."""
        return all(task.passed for task in self.tasks)

    def lines(self) -> list[str]:
        """The verdict in words, a task a line."""
        words = {True: "passed", False: "FAILED"}
        base, other = self.comparison.base.label, self.comparison.other.label
        lines = [f"gate {words[self.passed]}: {other} against {base}"]
        lines += [f"  {words[task.passed]} {task.task}: {task.reason}" for task in self.tasks]
        lines += [f"  unlike {difference}" for difference in self.comparison.unlike]
        return lines


def judge(run: EvalRun, baseline: EvalRun, settings: GateConfig) -> GateVerdict:
    """Hold ``run`` against ``baseline``.

    Raises:
        UnlikeRunsError: they do not compare and ``settings.allow_unlike`` is off.
    """
    comparison = compare(baseline, run, allow_unlike=settings.allow_unlike, confidence=settings.confidence)
    verdicts = [_judge_task(task, settings) for task in comparison.tasks]
    verdicts += [
        TaskVerdict(task=name, passed=False, reason="the run did not measure it") for name in comparison.only_in_base
    ]
    return GateVerdict(comparison=comparison, tasks=verdicts)


def _judge_task(task: TaskComparison, settings: GateConfig) -> TaskVerdict:
    name = f"{task.task} {measured_as(task.other)}"
    failed = task.other.requests.num_failed
    if failed:
        return TaskVerdict(task=name, passed=False, reason=f"{failed} requests of the run failed")
    if task.difference is None or task.base.acceptance is None or task.other.acceptance is None:
        return TaskVerdict(task=name, passed=False, reason="no acceptance length in one of the runs")
    lengths = f"acceptance length {task.base.acceptance.length:.3f} -> {task.other.acceptance.length:.3f}"
    if task.noise is None:
        passed = task.difference >= -settings.tolerance
        return TaskVerdict(
            task=name,
            passed=passed,
            reason=f"{lengths}; noise not known, tolerance {settings.tolerance:g} alone decides",
        )
    allowed = settings.tolerance + task.difference - task.noise.low
    passed = task.noise.high >= -settings.tolerance
    return TaskVerdict(
        task=name,
        passed=passed,
        reason=(
            f"{lengths}, difference {task.difference:+.3f} in [{task.noise.low:+.3f}, {task.noise.high:+.3f}] "
            f"({settings.confidence:.0%}, over {task.noise.basis}); a drop of about {allowed:.3f} would fail"
        ),
    )


def check_gate(run: EvalRun, settings: GateConfig) -> GateVerdict | None:
    """The verdict on ``run`` as configured, logged line by line; None if no baseline is named.

    Raises:
        UnreadableRunError: the baseline is no result.
        UnlikeRunsError: see :func:`judge`.
    """
    if settings.baseline is None:
        return None
    verdict = judge(run, read_run(absolute(settings.baseline)), settings)
    for line in verdict.lines():
        logger.log(logging.INFO if verdict.passed else logging.ERROR, "%s", line)
    return verdict
