"""Runs laid side by side: one series a run, method and K, with the cells that tables and plots look up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash2_train.evaluate.compare import PROTOCOL_KEYS
from dflash2_train.evaluate.report import bucket_range
from dflash2_train.evaluate.runs import (
    ACCEPTED,
    AUTOREGRESSIVE,
    PROMPT_TOKENS,
    ROUNDS,
    Acceptance,
    Cell,
    EvalRun,
    pool,
)

# What a speed-up needs alike, beside prompts, concurrency and temperature.
BASELINE_KEYS = ("hardware", "target", "max_new_tokens", "top_p", "enable_thinking")


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a figure stands in a table: a task at one concurrency and temperature."""

    task: str
    concurrency: int
    temperature: float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """All cells that one method with one K gave in one run, or in several of one label that differ in concurrency."""

    name: str
    method: str
    num_drafted: int | None = None  # K, in a run of several
    run: EvalRun
    cells: list[Cell]

    def at(self, spot: Spot) -> Cell | None:
        """The cells of a spot as one; None if it was not measured. An untold temperature fits every spot."""
        found = [
            cell
            for cell in self.cells
            if (cell.task, cell.concurrency) == (spot.task, spot.concurrency)
            and (cell.temperature == spot.temperature or cell.temperature is None or spot.temperature is None)
        ]
        return pool(found) if found else None

    @property
    def speculates(self) -> bool:
        """Whether it has acceptance to show."""
        return any(cell.acceptance is not None for cell in self.cells)


def series_of(runs: Sequence[EvalRun]) -> list[Series]:
    """Series in the order of the runs; names differ. Runs of one label under like conditions continue each other."""
    found: list[Series] = []
    for run in _joined(runs):
        kinds = list(dict.fromkeys((cell.method, cell.num_drafted) for cell in run.cells))
        several = len({drafted for _, drafted in kinds if drafted is not None}) > 1
        for method, drafted in kinds:
            what = f"K={drafted}" if several and drafted is not None else method
            name = run.label if len(kinds) == 1 else f"{run.label}, {what}"
            taken = sum(one.name == name or one.name.startswith(f"{name} #") for one in found)
            cells = [cell for cell in run.cells if (cell.method, cell.num_drafted) == (method, drafted)]
            name = f"{name} #{taken + 1}" if taken else name
            found.append(Series(name=name, method=method, num_drafted=drafted, run=run, cells=cells))
    return found


def _joined(runs: Sequence[EvalRun]) -> list[EvalRun]:
    joined: list[EvalRun] = []
    for run in runs:
        same = [
            place
            for place, one in enumerate(joined)
            if (one.kind, one.label, _conditions(one)) == (run.kind, run.label, _conditions(run))
            and not {_place(cell) for cell in one.cells} & {_place(cell) for cell in run.cells}
        ]
        if same:
            joined[same[0]] = replace(joined[same[0]], cells=[*joined[same[0]].cells, *run.cells])
        else:
            joined.append(run)
    return joined


def _conditions(run: EvalRun) -> list[Any]:
    return [run.protocol.get(key) for key in (*PROTOCOL_KEYS, "num_drafted", "engine", "drafter_sha256")]


def _place(cell: Cell) -> tuple[str, str | None, str, int | None, int, float | None]:
    return cell.task, cell.category, cell.method, cell.num_drafted, cell.concurrency, cell.temperature


def spots_of(series: Sequence[Series]) -> list[Spot]:
    """Every spot that any series has, in order; an untold temperature joins a told one."""
    spots: list[Spot] = []
    for cell in (cell for one in series for cell in one.cells):
        spot = Spot(task=cell.task, concurrency=cell.concurrency, temperature=cell.temperature)
        alike = [one for one in spots if (one.task, one.concurrency) == (spot.task, spot.concurrency)]
        if spot not in spots and not (alike and spot.temperature is None):
            spots = [one for one in spots if one.temperature is not None or one not in alike]
            spots.append(spot)
    return spots


def spot_names(spots: Sequence[Spot]) -> list[str]:
    """Short names: the concurrency and the temperature stand there only where a task has several."""
    names = []
    for spot in spots:
        same = [one for one in spots if one.task == spot.task]
        parts = [spot.task]
        if len({one.concurrency for one in same}) > 1:
            parts.append(f"c{spot.concurrency}")
        if len({one.temperature for one in same}) > 1 and spot.temperature is not None:
            parts.append("greedy" if spot.temperature == 0 else f"T={spot.temperature:g}")
        names.append(", ".join(parts))
    return names


def baseline_of(series: Sequence[Series], one: Series, spot: Spot) -> Cell | None:
    """Plain decoding of what ``one`` answered at ``spot``: same prompts, limits and hardware; None if no run has it."""
    cell = one.at(spot)
    for other in series:
        plain = other.at(spot) if other.method == AUTOREGRESSIVE else None
        if cell is None or plain is None:
            continue
        same_work = (plain.prompts_sha256, plain.requests.asked) == (cell.prompts_sha256, cell.requests.asked)
        if same_work and all(other.run.protocol.get(key) == one.run.protocol.get(key) for key in BASELINE_KEYS):
            return plain
    return None


def by_prompt_length(cell: Cell) -> list[tuple[str, int, Acceptance]]:
    """Range of prompt tokens, requests and their counts, shortest first; empty where requests told no counts."""
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for row in cell.per_request or []:
        groups.setdefault(bucket_range(row[PROMPT_TOKENS]), []).append(row)
    return [
        (
            f"{low} to {high - 1}",
            len(rows),
            Acceptance(
                rounds=sum(row[ROUNDS] for row in rows),
                proposed=0,
                accepted=sum(row[ACCEPTED] for row in rows),
                accepted_per_position=[],
            ),
        )
        for (low, high), rows in sorted(groups.items())
    ]
