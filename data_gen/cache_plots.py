"""Two panels of a cache: how long its samples are, and how well each source agrees with the teacher.

This package's one door to matplotlib, opened only when a figure is drawn.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from data_gen.cache.statistics import StoreStatistics
from dflash2_train.provenance import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH_COLOR, TOP_K_COLOR, ARGMAX_COLOR = "#5a8f4e", "#9bbbdc", "#1f5fa8"
LABEL_SIZE = 8
MOST_SOURCES = 16  # drawn, the largest ones


def write_cache_plot(statistics: StoreStatistics, path: Path, title: str) -> None:
    """Draw the PNG ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_lengths(left, statistics)
    _draw_sources(right, statistics)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    left.grid(axis="y", color="0.9")
    right.grid(axis="x", color="0.9")
    total = statistics.total
    figure.suptitle(f"{title}: {total.samples:,} samples, {total.tokens:,} tokens, {statistics.dtype}", fontsize=11)
    png = io.BytesIO()
    canvas.print_png(png)
    atomic_write_bytes(path, png.getvalue())


def _draw_lengths(axes: Axes, statistics: StoreStatistics) -> None:
    edges = statistics.length_edges
    axes.bar(edges[:-1], statistics.length_counts, edges[1] - edges[0], align="edge", color=LENGTH_COLOR, ec="white")
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.set_title("Lengths", fontsize=10)


def _draw_sources(axes: Axes, statistics: StoreStatistics) -> None:
    largest = sorted(statistics.sources.items(), key=lambda item: item[1].tokens)[-MOST_SOURCES:]
    places, height = range(len(largest)), 0.4
    for color, label, offset, shares in (
        (TOP_K_COLOR, "in the teacher's top-k", height / 2, [part.in_top_k_share for _, part in largest]),
        (ARGMAX_COLOR, "its first choice", -height / 2, [part.argmax_share for _, part in largest]),
    ):
        bars = axes.barh([place + offset for place in places], [100 * share for share in shares], height, color=color)
        bars.set_label(label)
        axes.bar_label(bars, [f"{100 * share:.1f}" for share in shares], fontsize=LABEL_SIZE, padding=1)
    axes.set_yticks(list(places), [f"{name} ({part.samples:,})" for name, part in largest], fontsize=LABEL_SIZE)
    axes.set_ylim(-0.7, max(len(largest), 4) - 0.3)  # a single source must not fill the panel
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("labels, %")
    axes.set_title("Agreement with the teacher by source (samples)", fontsize=10)
    axes.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
