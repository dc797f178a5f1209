"""The tables of a report, from runs in one form: acceptance by task, throughput, positions, lengths, requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash2_train.evaluate.cell_tables import cell_tables
from dflash2_train.evaluate.compare import Comparison, TaskComparison
from dflash2_train.evaluate.intervals import length_interval
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, Acceptance, Cell, EvalRun
from dflash2_train.evaluate.series import (
    Series,
    Spot,
    baseline_of,
    by_prompt_length,
    series_of,
    spot_names,
    spots_of,
)
from dflash2_train.evaluate.table import NONE, Table

__all__ = ["Table", "tables_of"]
SWEPT = {"num_drafted": "draft_lengths", "temperature": "temperatures"}  # key of a protocol -> all its values


def tables_of(runs: Sequence[EvalRun], comparisons: Sequence[Comparison] = ()) -> list[Table]:
    """All tables that the runs have figures for."""
    series = series_of(runs)
    spots = spots_of(series)
    tables = [runs_table(runs), acceptance_table(series, spots), throughput_table(series, spots)]
    tables += [comparison_table(one) for one in comparisons]
    tables += cell_tables(series)
    tables += [table for one in series if one.speculates for table in (positions_table(one), lengths_table(one))]
    tables.append(requests_table(series))
    return [table for table in tables if table.rows]


def runs_table(runs: Sequence[EvalRun]) -> Table:
    """How each run was measured."""
    keys = (
        ("engine", "engine"),
        ("hardware", "hardware"),
        ("num_drafted", "K"),
        ("max_new_tokens", "max tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("enable_thinking", "thinking"),
        ("prefix_caching", "prefix caching"),
    )
    return Table(
        title="Runs",
        header=("run", *(name for _, name in keys)),
        rows=[(run.label, *(_condition(run, key) for key, _ in keys)) for run in runs],
        notes=[f"{run.label}: {label}" for run in runs for label in run.labels],
    )


def acceptance_table(series: Sequence[Series], spots: Sequence[Spot]) -> Table:
    """Pooled acceptance length by task, with its interval, and the plain mean over tasks."""
    speculating = [one for one in series if one.speculates]
    rows, notes = [], []
    for spot, name in zip(spots, spot_names(spots), strict=True):
        cells = [one.at(spot) for one in speculating]
        if any(cell is not None and cell.acceptance is not None for cell in cells):
            rows.append((name, *(_length(cell) for cell in cells)))
            notes += [
                f"{name}, {one.name}: {label}"
                for one, cell in zip(speculating, cells, strict=True)
                if cell
                for label in cell.labels
            ]
    if len(rows) > 1:
        rows.append(("mean over the rows", *(_mean_length(one, spots) for one in speculating)))
    bases = sorted(
        {interval.basis for one in speculating for cell in one.cells if (interval := length_interval(cell)) is not None}
    )
    if bases:
        notes.append(f"in brackets: 95% interval, drawn over {' or '.join(bases)}")
    return Table(
        title="Acceptance length by task",
        header=("task", *(one.name for one in speculating)),
        rows=rows,
        notes=list(dict.fromkeys(notes)),
    )


def throughput_table(series: Sequence[Series], spots: Sequence[Spot]) -> Table:
    """Output tokens a second and the speed-up against plain decoding at the same concurrency."""
    rows = []
    for spot in spots:
        cells = [(one, one.at(spot)) for one in series]
        shown = [_speed(cell, baseline_of(series, one, spot), one.method) for one, cell in cells]
        if any(text != NONE for text in shown):
            temperature = NONE if spot.temperature is None else f"{spot.temperature:g}"
            rows.append((spot.task, str(spot.concurrency), temperature, *shown))
    return Table(
        title="Throughput, output tokens/s",
        header=("task", "concurrency", "temperature", *(one.name for one in series)),
        rows=rows,
        notes=[
            "in brackets: speed-up against autoregressive decoding of the same prompts at the same concurrency, with "
            "the same limits, on the same hardware"
        ],
    )


def cell_name(cell: Cell, series: Series) -> str:
    """Task and category, and the temperature where the series has the task at several."""
    name = " / ".join(part for part in (cell.task, cell.category) if part)
    same = {one.temperature for one in series.cells if one.task == cell.task}
    if len(same) < 2 or cell.temperature is None:
        return name
    return f"{name}, greedy" if cell.temperature == 0 else f"{name}, T={cell.temperature:g}"


def positions_table(series: Series) -> Table:
    """Per cent of rounds that accepted each position, by task and category."""
    cells = [cell for cell in series.cells if cell.acceptance is not None and cell.acceptance.accepted_per_position]
    width = max((len(_counts(cell).accepted_per_position) for cell in cells), default=0)
    rows = [
        (
            cell_name(cell, series),
            str(cell.concurrency),
            str(_counts(cell).rounds),
            *(f"{100 * rate:.1f}" for rate in _counts(cell).plain_rates),
            *([NONE] * (width - len(_counts(cell).plain_rates))),
            _number(_counts(cell).length),
        )
        for cell in cells
    ]
    return Table(
        title=f"Accepted by position, % of rounds: {series.name}",
        header=("task", "concurrency", "rounds", *(str(k + 1) for k in range(width)), "acceptance length"),
        rows=rows,
        notes=["a position counts as accepted if it and all before it were"],
    )


def lengths_table(series: Series) -> Table:
    """Pooled acceptance length by prompt length, where requests told their counts; empty if all lengths are alike."""
    rows = [
        (
            cell_name(cell, series),
            str(cell.concurrency),
            tokens,
            str(requests),
            str(counts.rounds),
            _number(counts.length),
        )
        for cell in series.cells
        for tokens, requests, counts in by_prompt_length(cell)
    ]
    if len({row[2] for row in rows}) < 2:
        rows = []
    return Table(
        title=f"By prompt length: {series.name}",
        header=("task", "concurrency", "prompt tokens", "requests", "rounds", "acceptance length"),
        rows=rows,
    )


def requests_table(series: Sequence[Series]) -> Table:
    """What became of the requests."""
    rows = []
    for one in series:
        for cell in one.cells:
            counts = cell.requests
            causes = ", ".join(f"{number} {cause}" for cause, number in counts.failed.items()) or "0"
            hits = NONE if cell.prefix_hit_rate is None else f"{100 * cell.prefix_hit_rate:.1f}%"
            rows.append(
                (
                    one.name,
                    cell_name(cell, one),
                    str(cell.concurrency),
                    f"{counts.answered} of {counts.asked}",
                    causes,
                    str(counts.retried),
                    str(counts.too_long),
                    str(cell.output_tokens),
                    f"{cell.seconds:.1f}",
                    hits,
                )
            )
    return Table(
        title="Requests",
        header=(
            "run",
            "task",
            "concurrency",
            "answered",
            "failed",
            "tried again",
            "too long to send",
            "output tokens",
            "seconds",
            "prefix cache hits",
        ),
        rows=rows,
    )


def comparison_table(comparison: Comparison) -> Table:
    """One run against another, with the noise."""
    base, other = comparison.base.label, comparison.other.label
    band = f"{comparison.confidence:.0%} noise band"
    bases = sorted({one.noise.basis for one in comparison.tasks if one.noise})
    return Table(
        title=f"{other} against {base}",
        header=("task", "concurrency", base, other, "difference", band, "verdict", "speed"),
        rows=[_comparison_row(task) for task in comparison.tasks],
        notes=[
            *(f"UNLIKE, {difference}" for difference in comparison.unlike),
            *(f"only in {base}: {name}" for name in comparison.only_in_base),
            *(f"only in {other}: {name}" for name in comparison.only_in_other),
            *(f"band drawn over {basis}" for basis in bases),
        ],
    )


def _comparison_row(task: TaskComparison) -> tuple[str, ...]:
    band = NONE if task.noise is None else f"{task.noise.low:+.3f} to {task.noise.high:+.3f}"
    drafted = task.other.num_drafted
    return (
        task.task if drafted is None else f"{task.task}, T={task.other.temperature:g}, K={drafted}",
        str(task.concurrency),
        _number(task.base.acceptance.length if task.base.acceptance else None),
        _number(task.other.acceptance.length if task.other.acceptance else None),
        NONE if task.difference is None else f"{task.difference:+.3f}",
        band,
        task.verdict,
        NONE if task.speed_ratio is None else f"{task.speed_ratio:.2f}x",
    )


def _counts(cell: Cell) -> Acceptance:
    assert cell.acceptance is not None
    return cell.acceptance


def _length(cell: Cell | None) -> str:
    if cell is None or cell.acceptance is None:
        return NONE
    interval = length_interval(cell)
    band = "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
    return f"{_number(cell.acceptance.length)}{band}"


def _mean_length(series: Series, spots: Sequence[Spot]) -> str:
    """The plain mean over all spots; none if one is missing, or means would be of different tasks."""
    cells = [series.at(spot) for spot in spots]
    lengths = [cell.acceptance.length for cell in cells if cell is not None and cell.acceptance is not None]
    known = [length for length in lengths if length is not None]
    return _number(sum(known) / len(known)) if known and len(known) == len(spots) else NONE


def _speed(cell: Cell | None, baseline: Cell | None, method: str) -> str:
    if cell is None or cell.tokens_per_second is None:
        return NONE
    speed = f"{cell.tokens_per_second:,.1f}"
    if method == AUTOREGRESSIVE or baseline is None or not baseline.tokens_per_second:
        return speed
    return f"{speed} ({cell.tokens_per_second / baseline.tokens_per_second:.2f}x)"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _condition(run: EvalRun, key: str) -> str:
    """One value of a run's protocol; all of them where it was swept."""
    swept = run.protocol.get(SWEPT.get(key, key))
    if run.protocol.get(key) is None and isinstance(swept, list):
        return ", ".join(f"{value:g}" for value in swept)
    return _value(run.protocol.get(key))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return NONE if value is None or value == "" else str(value)
