"""What came out of a sweep: a row a job, best first, as a table, ``sweep.md`` and ``sweep.png`` in its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import UserError
from dflash2_train.provenance import atomic_write_text
from dflash2_train.runs.compare import MISSING, final_figures, number
from dflash2_train.runs.folder import RunFolder, find_run, read_json

if TYPE_CHECKING:
    from rich.table import Table

SWEEP_FILE, TABLE_FILE, PLOT_FILE = "sweep.json", "sweep.md", "sweep.png"
# What jobs are ranked by: the first of these that a job has. What is measured goes before what is forecast.
RANKINGS = (
    "eval: acceptance length",
    "validation/acceptance_length_real",
    "validation/acceptance_length",
    "selector_path",
    "loss",
)
SMALLER_IS_BETTER = ("loss", "ce", "kl", "selector", "grad_norm", "data_wait", "seconds", "dropped")
SHOWN = ("selector_path", "recall", "loss", "step", "seconds")  # beside the figure that ranks
DRAWN_CURVES = 8  # more would repeat colours


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One job."""

    name: str
    changes: dict[str, str]
    state: str  # of its latest attempt; "waiting" before the first
    cause: str
    figures: dict[str, float] = field(default_factory=dict)
    run: RunFolder | None = None

    @property
    def open_end(self) -> str:
        """Why a job is not at its end, and what then; empty for one that is, or that has not ended."""
        why = f": {self.cause}" if self.cause else ""
        if self.state == "stopped":
            return f"stopped, the same command continues it{why}"
        return f"{self.state}{why}" if why else ""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Jobs of a sweep, the best first; jobs without the figure that ranks come last."""

    folder: Path
    command: str
    by: str
    rows: tuple[SweepRow, ...]

    @property
    def keys(self) -> list[str]:
        """Swept keys, in the order of the command."""
        return list(dict.fromkeys(key for row in self.rows for key in row.changes))

    @property
    def columns(self) -> list[str]:
        """Headings of the table."""
        shown = [name for name in SHOWN if name != self.by and any(name in row.figures for row in self.rows)]
        return [*self.keys, "state", self.by, *shown]

    def cells(self, row: SweepRow) -> list[str]:
        """Texts of one job under the headings."""
        keys, figures = self.keys, self.columns[len(self.keys) + 1 :]
        changes = [row.changes.get(key, MISSING) for key in keys]
        return [*changes, row.state, *(number(row.figures.get(name)) for name in figures)]

    def label(self, row: SweepRow) -> str:
        """A short name for legends: keys without the parts that all of them share."""
        short = {key: key.rsplit(".", 1)[-1] for key in self.keys}
        names = short if len(set(short.values())) == len(short) else {key: key for key in short}
        return " ".join(f"{names[key]}={value}" for key, value in row.changes.items())

    def markdown(self) -> str:
        """The table, the command, and what went wrong where."""
        head = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        body = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in self.cells(row))} |" for row in self.rows]
        open_ends = [f"- `{row.name}` {row.open_end}" for row in self.rows if row.open_end]
        parts = [f"# Sweep, ranked by {self.by}", f"`{self.command}`", "\n".join([*head, *body])]
        return "\n\n".join([*parts, *(["## Not at their end", "\n".join(open_ends)] if open_ends else [])]) + "\n"

    def table(self) -> Table:
        """The same for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD)
        for place, heading in enumerate(self.columns):
            table.add_column(heading, overflow="fold", justify="left" if place <= len(self.keys) else "right")
        for row in self.rows:
            table.add_row(*self.cells(row))
        return table


def read_sweep(folder: Path, *, by: str | None = None) -> SweepResult:
    """The jobs of a sweep as their files tell, finished or under way.

    Args:
        folder: with ``sweep.json``, or a run's folder with such a one in ``sweep/``.
        by: figure to rank by; None = the first of RANKINGS that any job has.

    Raises:
        UserError: no sweep is there, or no job has the figure.
    """
    folder = folder.resolve()
    if not (folder / SWEEP_FILE).exists() and (folder / "sweep" / SWEEP_FILE).exists():
        folder = folder / "sweep"
    if not (folder / SWEEP_FILE).exists():
        raise UserError(
            f"{folder}: no sweep, {SWEEP_FILE} is missing. Name the folder of one; for other runs there is "
            "dflash2-runs compare."
        )
    record = read_json(folder / SWEEP_FILE)
    rows = [_row_of(folder, job) for job in record["jobs"]]
    names = {name for row in rows for name in row.figures}
    if by is not None and by not in names:
        there = ", ".join(sorted(names)) or "none"
        raise UserError(f"--by {by}: no job of {folder} has this figure. There are: {there}.")
    chosen = by or next((name for name in RANKINGS if name in names), RANKINGS[-1])
    rows.sort(key=lambda row: _rank(row, chosen))
    return SweepResult(folder=folder, command=" ".join(record["command"]), by=chosen, rows=tuple(rows))


def report_sweep(folder: Path, *, by: str | None = None) -> SweepResult:
    """Print the table of a sweep and write it and its picture into the folder."""
    from dflash2_train.app import open_console
    from dflash2_train.plots.sweep import write_sweep_plot

    result = read_sweep(folder, by=by)
    atomic_write_text(result.folder / TABLE_FILE, result.markdown())
    console = open_console()
    console.print(result.table(), highlight=False, markup=False)
    for row in result.rows:
        if row.open_end:
            console.print(f"{row.name} {row.open_end}", highlight=False, markup=False)
    ranked = [row for row in result.rows if result.by in row.figures]
    if ranked:
        write_sweep_plot(
            [(result.label(row), row.figures[result.by]) for row in ranked],
            {result.label(row): row.run.rows() for row in ranked[:DRAWN_CURVES] if row.run is not None},
            result.folder / PLOT_FILE,
            by=result.by,
        )
    console.print(f"table and picture: {result.folder}", highlight=False, markup=False)
    return result


def _row_of(folder: Path, job: dict[str, Any]) -> SweepRow:
    place = folder / job["name"]
    record = read_json(place / "job.json") if (place / "job.json").exists() else {}
    run = find_run(place)
    return SweepRow(
        name=job["name"],
        changes=job["changes"],
        state=record.get("state", "waiting"),
        cause=record.get("cause", ""),
        figures={} if run is None else final_figures(run),
        run=run,
    )


def _rank(row: SweepRow, by: str) -> float:
    """Smallest first; those without the figure behind all others."""
    value = row.figures.get(by)
    if value is None:
        return math.inf
    return value if by in SMALLER_IS_BETTER else -value
