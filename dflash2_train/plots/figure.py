"""What all curve plots share: series out of log rows, a grid of panels, one look, a file whole or not at all."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash2_train.provenance import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, float]
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 5.2, 3.1, 3
LABEL_SIZE = 8
SMOOTHED_PARTS = 40  # a smooth curve is a mean over this part of its points
COLORS = ("#1f5fa8", "#c8553d", "#5a8f4e", "#8f6bb3", "#b8860b", "#4a9c9c", "#7a7a7a", "#b3477d")


class Series(NamedTuple):
    """One figure over the steps."""

    steps: np.ndarray  # [n], ascending
    values: np.ndarray  # [n] finite


def series(rows: Sequence[Row], name: str) -> Series:
    """The rows that have a finite value of ``name``; may be empty."""
    pairs = [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return Series(steps, values)


def smoothed(curve: Series) -> Series:
    """Running mean over a fortieth of the points, at the middle of each stretch; short curves stay as they are."""
    width = len(curve.values) // SMOOTHED_PARTS
    if width < 2:
        return curve
    mean = np.convolve(curve.values, np.full(width, 1 / width), mode="valid")
    first = (width - 1) // 2
    return Series(curve.steps[first : first + len(mean)], mean)


def draw(axes: Axes, curve: Series, label: str, color: object) -> None:
    """A smooth curve over its raw points, or nothing for an empty one."""
    if len(curve.values) == 0:
        return
    smooth = smoothed(curve)
    if smooth is not curve:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.18, linewidth=0.7)
    marker = "o" if len(curve.values) == 1 else None
    axes.plot(smooth.steps, smooth.values, color=color, linewidth=1.4, label=label, marker=marker, markersize=3)


def finish(axes: Axes, title: str, unit: str, *, log: bool = False, legend_columns: int = 2) -> None:
    """Title, unit, grid, and a legend where something has a label; a logarithmic scale where all is positive."""
    drawn = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    if log and drawn and all(np.min(values) > 0 for values in drawn if len(values)):
        axes.set_yscale("log", subs=[2, 5])
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:g}")
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit, fontsize=LABEL_SIZE)
    axes.set_xlabel("step", fontsize=LABEL_SIZE)
    axes.tick_params(labelsize=LABEL_SIZE, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=LABEL_SIZE - 1, frameon=False, ncols=legend_columns)


def write_panels(panels: Sequence[Callable[[Axes], None]], path: Path, title: str) -> None:
    """Draw each panel into its axes of one PNG at ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, max(1, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * lines + 0.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        panel(axes)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=11)
    png = io.BytesIO()
    canvas.print_png(png)
    atomic_write_bytes(path, png.getvalue())
