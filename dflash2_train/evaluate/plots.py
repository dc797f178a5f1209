"""Two panels from a report: acceptance by drafted position, and how many drafts a round accepted.

The one door to matplotlib, opened only when a figure is drawn.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.evaluate.report import EvalReport, PassReport
from dflash2_train.provenance import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONDITIONAL_COLOR, PLAIN_COLOR, HISTOGRAM_COLOR = "#1f5fa8", "#9bbbdc", "#5a8f4e"
LABEL_SIZE = 8


def write_acceptance_plot(report: EvalReport, path: Path) -> None:
    """Draw the greedy pass into the PNG ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_positions(left, report.greedy)
    _draw_histogram(right, report.greedy)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    rates, counts = report.greedy.rates, report.greedy.counts
    length = "-" if rates.acceptance_length_pooled is None else f"{rates.acceptance_length_pooled:.3f}"
    figure.suptitle(
        f"{report.protocol['experiment']}: acceptance length {length} (pooled, greedy, "
        f"K={report.protocol['num_drafted']}, {counts.prompts} prompts, {counts.rounds} rounds)",
        fontsize=11,
    )
    png = io.BytesIO()
    canvas.print_png(png)
    atomic_write_bytes(path, png.getvalue())


def _draw_positions(axes: Axes, part: PassReport) -> None:
    positions = range(1, len(part.rates.plain_rates) + 1)
    width = 0.4
    series = (
        (part.rates.conditional_rates, -width / 2, CONDITIONAL_COLOR, "conditional: earlier drafts accepted"),
        (part.rates.plain_rates, width / 2, PLAIN_COLOR, "plain: of all proposed"),
    )
    for rates, offset, color, label in series:
        heights = [100 * (rate or 0.0) for rate in rates]
        bars = axes.bar([k + offset for k in positions], heights, width, color=color, label=label)
        texts = ["-" if rate is None else f"{100 * rate:.0f}" for rate in rates]
        axes.bar_label(bars, texts, fontsize=LABEL_SIZE, padding=1)
    axes.set_xticks(list(positions))
    axes.set_ylim(0, 118)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted, %")
    axes.set_title("Acceptance by position", fontsize=10)
    axes.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper right")


def _draw_histogram(axes: Axes, part: PassReport) -> None:
    histogram = part.counts.accepted_histogram
    total = max(part.counts.rounds, 1)
    shares = [100 * rounds / total for rounds in histogram]
    bars = axes.bar(range(len(histogram)), shares, 0.8, color=HISTOGRAM_COLOR)
    axes.bar_label(bars, [str(rounds) for rounds in histogram], fontsize=LABEL_SIZE, padding=1)
    axes.set_xticks(range(len(histogram)))
    axes.set_ylim(0, max([*shares, 1.0]) * 1.12)
    axes.set_xlabel("drafts accepted in a round")
    axes.set_ylabel("share of rounds, %")
    axes.set_title("Rounds by accepted drafts (bars labelled with the count)", fontsize=10)
