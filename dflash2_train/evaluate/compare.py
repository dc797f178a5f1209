"""Runs held against each other: what must be alike first, then each task's acceptance and speed, with the noise.

Figures compare only when prompts, limits, sampling, K and hardware are the same. A comparison of unlike runs is
refused; told to go on, it names every difference beside its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.evaluate.intervals import Interval, difference_interval
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, RUNNER, Cell, EvalRun, pool

PROTOCOL_KEYS = (
    "hardware",
    "target",
    "max_new_tokens",
    "top_p",
    "top_k",
    "min_p",
    "enable_thinking",
    "ignore_eos",
)
CELL_KEYS = ("concurrency", "temperature", "prompts_sha256")


class UnlikeRunsError(UserError, ValueError):
    """Runs whose figures do not compare."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One condition that two runs do not share."""

    where: str  # "run", or the task
    key: str
    base: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.key} is {_shown(self.base)} and {_shown(self.other)}"


@dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """One task at one concurrency in two runs."""

    task: str
    concurrency: int
    base: Cell
    other: Cell
    difference: float | None  # of acceptance lengths, other - base; None where one does not speculate
    noise: Interval | None  # of that difference; None = not known
    speed_ratio: float | None  # output tokens a second, other / base

    @property
    def verdict(self) -> str:
        """In words: above, below or within the noise; or what is not known."""
        if self.difference is None:
            return "no acceptance to compare"
        if self.noise is None:
            return "noise not known"
        if self.noise.low > 0:
            return "above the noise"
        return "below the noise" if self.noise.high < 0 else "within the noise"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs."""

    base: EvalRun
    other: EvalRun
    tasks: list[TaskComparison]
    unlike: list[Difference]  # not empty only if unlike runs were allowed
    only_in_base: list[str]  # measurements that ``other`` lacks, in words
    only_in_other: list[str]
    confidence: float = 0.95  # of the noise bands


def compare(base: EvalRun, other: EvalRun, *, allow_unlike: bool = False, confidence: float = 0.95) -> Comparison:
    """``other`` against ``base``.

    Raises:
        UnlikeRunsError: conditions differ and ``allow_unlike`` is off, or the runs share no task.
    """
    base_cells, other_cells = _pooled(base), _pooled(other)
    pairs = [(cell, other_cells[key]) for key, cell in base_cells.items() if key in other_cells]
    pairs = pairs or _pairs_by_task(base_cells, other_cells)
    if not pairs:
        raise UnlikeRunsError(
            f"{base.label} has {_names(base_cells)}, {other.label} has {_names(other_cells)}: nothing in common. "
            "Measure the same tasks."
        )
    unlike = differences(base, other, pairs)
    if unlike and not allow_unlike:
        listed = "; ".join(str(one) for one in unlike)
        raise UnlikeRunsError(
            f"{base.label} and {other.label} do not compare: {listed}. Repeat one of them under the conditions of the "
            "other, or pass --allow-unlike (eval.gate.allow_unlike=true) to see them with these differences named."
        )
    compared = {id(cell) for pair in pairs for cell in pair}
    return Comparison(
        base=base,
        other=other,
        tasks=[_compare_cells(one, two, confidence) for one, two in pairs],
        unlike=unlike,
        confidence=confidence,
        only_in_base=_left_over(base_cells, compared),
        only_in_other=_left_over(other_cells, compared),
    )


Key = tuple[str, int, float | None, int | None]


def _pooled(run: EvalRun) -> dict[Key, Cell]:
    """Task, concurrency, temperature, K -> its cells as one; the speculating ones where a run has both kinds."""
    groups: dict[Key, list[Cell]] = {}
    for cell in _main_cells(run):
        drafted = drafted_by(run, cell) if run.kind == RUNNER else None  # servers of another K are shown as unlike
        groups.setdefault((cell.task, cell.concurrency, cell.temperature, drafted), []).append(cell)
    return {key: pool(cells) for key, cells in groups.items()}


def drafted_by(run: EvalRun, cell: Cell) -> int | None:
    """K of a cell; None where it is not told."""
    return run.protocol.get("num_drafted") if cell.num_drafted is None else cell.num_drafted


def measured_as(cell: Cell) -> str:
    """Which measurement of its task a cell is, in words; temperature and K in a run that has several."""
    words = f"at concurrency {cell.concurrency}"
    if cell.num_drafted is None:
        return words
    temperature = "" if cell.temperature is None else f", temperature {cell.temperature:g}"
    return f"{words}{temperature}, K={cell.num_drafted}"


def _main_cells(run: EvalRun) -> list[Cell]:
    speculating = [cell for cell in run.cells if cell.method != AUTOREGRESSIVE]
    return speculating or run.cells


def _pairs_by_task(base: dict[Key, Cell], other: dict[Key, Cell]) -> list[tuple[Cell, Cell]]:
    """Tasks that both runs measured once, under other conditions: unlike, and shown if that is allowed."""
    pairs = []
    for task in dict.fromkeys(key[0] for key in base):
        one, two = ([cell for key, cell in cells.items() if key[0] == task] for cells in (base, other))
        if len(one) == len(two) == 1:
            pairs.append((one[0], two[0]))
    return pairs


def differences(base: EvalRun, other: EvalRun, pairs: Sequence[tuple[Cell, Cell]]) -> list[Difference]:
    """All conditions that the runs do not share. K counts only where both runs draft with it."""
    found = [
        Difference(where="run", key=key, base=base.protocol.get(key), other=other.protocol.get(key))
        for key in PROTOCOL_KEYS
        if base.protocol.get(key) != other.protocol.get(key)
    ]
    if all(cell.acceptance is not None and cell.method != "mtp" for pair in pairs for cell in pair):
        lengths = dict.fromkeys((drafted_by(base, one), drafted_by(other, two)) for one, two in pairs)
        found += [Difference(where="run", key="num_drafted", base=one, other=two) for one, two in lengths if one != two]
    for one, two in pairs:
        left_out = [cell.requests.too_long for cell in (one, two)]
        if left_out[0] != left_out[1]:
            found.append(Difference(where=one.task, key="prompts too long", base=left_out[0], other=left_out[1]))
        found += [
            Difference(where=one.task, key=key, base=vars(one)[key], other=vars(two)[key])
            for key in CELL_KEYS
            if vars(one)[key] != vars(two)[key]
        ]
        if one.prompts_sha256 is None and two.prompts_sha256 is None and one.requests.asked != two.requests.asked:
            found.append(Difference(where=one.task, key="requests", base=one.requests.asked, other=two.requests.asked))
    return found


def _left_over(cells: dict[Key, Cell], compared: set[int]) -> list[str]:
    """Measurements that no pair holds."""
    return [f"{cell.task} {measured_as(cell)}" for cell in cells.values() if id(cell) not in compared]


def _compare_cells(base: Cell, other: Cell, confidence: float) -> TaskComparison:
    lengths = [cell.acceptance.length if cell.acceptance is not None else None for cell in (base, other)]
    speeds = [cell.tokens_per_second for cell in (base, other)]
    return TaskComparison(
        task=base.task,
        concurrency=base.concurrency,
        base=base,
        other=other,
        difference=None if lengths[0] is None or lengths[1] is None else lengths[1] - lengths[0],
        noise=difference_interval(base, other, confidence),
        speed_ratio=speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
    )


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "not recorded"
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 40 else str(value)


def _names(cells: dict[Key, Cell]) -> str:
    return ", ".join(dict.fromkeys(key[0] for key in cells)) or "no tasks"
