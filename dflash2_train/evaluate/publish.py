"""The reports of one or more runs into a folder: Markdown, one HTML file, the plots, and the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dflash2_train.evaluate.compare import Comparison
from dflash2_train.evaluate.html import to_html
from dflash2_train.evaluate.render import markdown_table, rich_table
from dflash2_train.evaluate.report import FORMULAS
from dflash2_train.evaluate.runs import EvalRun
from dflash2_train.evaluate.tables import Table, tables_of
from dflash2_train.provenance import atomic_write_bytes, atomic_write_text

MARKDOWN_NAME, HTML_NAME, PLOTS_NAME = "report.md", "report.html", "plots.png"
CAPTION = "Acceptance by position, by task and by prompt length, and throughput"


def runs_markdown(title: str, tables: Sequence[Table], *, plot_name: str | None) -> str:
    """All tables as one Markdown document."""
    parts = [f"# {title}", ""]
    for table in tables:
        parts += [f"## {table.title}", "", markdown_table(table.header, table.rows), ""]
        parts += [f"- {note}" for note in table.notes]
        parts += [""] if table.notes else []
    if plot_name is not None:
        parts += [f"![{CAPTION}]({plot_name})", ""]
    parts += ["## Formulas", "", *(f"- `{name}` = {formula}" for name, formula in FORMULAS.items()), ""]
    return "\n".join(parts)


def write_runs_report(
    folder: Path, title: str, runs: Sequence[EvalRun], comparisons: Sequence[Comparison] = (), *, markdown: bool = True
) -> list[Table]:
    """Write report.html, plots.png and, unless ``markdown`` is off, report.md; each whole or not at all.

    Returns:
        The tables that were written, for the console.
    """
    from dflash2_train.evaluate.plots import draw_runs

    tables = tables_of(runs, comparisons)
    png = draw_runs(runs)
    images = [] if png is None else [(CAPTION, png)]
    if png is not None:
        atomic_write_bytes(folder / PLOTS_NAME, png)
    if markdown:
        text = runs_markdown(title, tables, plot_name=None if png is None else PLOTS_NAME)
        atomic_write_text(folder / MARKDOWN_NAME, text)
    atomic_write_text(folder / HTML_NAME, to_html(title, tables, images))
    return tables


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Tables and their notes on a console."""
    for table in tables:
        console.print(rich_table(table.title, table.header, table.rows))
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False, style="yellow" if "UNLIKE" in note else None)
