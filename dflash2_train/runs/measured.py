"""What evaluations beside the hold-out's found: tasks, sweeps over K and temperature, and servers."""

from __future__ import annotations

from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.runs import Cell
from dflash2_train.runs.folder import RunFolder


def measured_lengths(run: RunFolder) -> dict[str, float]:
    """Pooled acceptance length of every cell with speculation, as ``eval/runner: GSM8K, K 7, T 0``.

    Raises:
        UserError: a report is damaged, or of another version of this program.
    """
    lengths = {}
    for path in run.reports():
        report = read_run(path)
        place = path.parent.relative_to(run.root).as_posix()
        usual = report.protocol.get("num_drafted")
        for cell in report.cells:
            length = None if cell.acceptance is None else cell.acceptance.length
            if length is not None:
                lengths[f"{place}: {name_of(cell, usual)}"] = length
    return lengths


def name_of(cell: Cell, num_drafted: int | None) -> str:
    """What tells a cell from the others of its report; ``num_drafted`` is K where it has none of its own."""
    task = cell.task if cell.category is None else f"{cell.task} ({cell.category})"
    drafted = num_drafted if cell.num_drafted is None else cell.num_drafted
    parts = [
        task,
        *([] if drafted is None else [f"K {drafted}"]),
        *([] if cell.temperature is None else [f"T {cell.temperature:g}"]),
        *([] if cell.concurrency == 1 else [f"{cell.concurrency} at once"]),
    ]
    return ", ".join(parts)
