"""Curves of several runs over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.plots.figure import COLORS, Row, draw, finish, series, write_panels
from dflash2_train.plots.training import LENGTHS, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (name, title, unit, logarithmic); drawn where at least one run has it
CURVES = (
    ("loss", "Loss", "nats", True),
    ("ce", "Cross-entropy", "nats", True),
    ("kl", "Divergence from the teacher", "nats", True),
    ("selector_path", "Forecast: drafts accepted a block", "tokens", False),
    ("top1", "Best unary logit is the token", "share", False),
    ("recall", "Token among the candidates", "share", False),
    ("grad_norm", "Norm of the gradient", "", True),
    ("lr", "Learning rate", "", False),
    ("tokens_per_second", "Throughput", "tokens/s", False),
)


def write_overlay(runs: Mapping[str, Sequence[Row]], path: Path, title: str) -> None:
    """Draw the figures that at least one run has, a curve a run, into the PNG ``path``.

    Args:
        runs: label -> log rows, each step once.
        path: of the PNG.
        title: of the picture.
    """
    write_panels(overlay_panels(runs), path, title)


def overlay_panels(runs: Mapping[str, Sequence[Row]], *, legends: bool = True) -> list[Panel]:
    """A panel for each figure that at least one run has, with a curve a run."""
    names = {name for rows in runs.values() for row in rows for name in row}
    # One look at the end is a point, and a table or a bar tells it better.
    lengths = [name for name in sorted(names) if name.startswith(LENGTHS) and _most_points(runs, name) > 1]
    measured = [(name, name.removeprefix("validation/").replace("_", " "), "tokens", False) for name in lengths]
    curves = [curve for curve in (*measured, *CURVES) if curve[0] in names]
    return [partial(_panel, runs, *curve, legends) for curve in curves]


def _most_points(runs: Mapping[str, Sequence[Row]], name: str) -> int:
    return max(len(series(rows, name).values) for rows in runs.values())


def _panel(
    runs: Mapping[str, Sequence[Row]], name: str, title: str, unit: str, log: bool, legend: bool, axes: Axes
) -> None:
    for place, (label, rows) in enumerate(runs.items()):
        draw(axes, series(rows, name), label if legend else "", COLORS[place % len(COLORS)])
    finish(axes, title, unit, log=log)
