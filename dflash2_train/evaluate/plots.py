"""Figures: the runner's acceptance by position and by round, and runs beside each other.

The one door to matplotlib, opened only when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.evaluate.intervals import length_interval
from dflash2_train.evaluate.report import EvalReport, PassReport
from dflash2_train.evaluate.runs import Acceptance, Cell, EvalRun
from dflash2_train.evaluate.series import Series, Spot, by_prompt_length, series_of, spot_names, spots_of
from dflash2_train.evaluate.sweep_panels import (
    Panel,
    at_lowest_temperature,
    drafted_panel,
    pace_panel,
    temperature_panel,
)
from dflash2_train.provenance import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONDITIONAL_COLOR, PLAIN_COLOR, HISTOGRAM_COLOR = "#1f5fa8", "#9bbbdc", "#5a8f4e"
LABEL_SIZE = 8
SERIES_COLORS = ("#1f5fa8", "#c9622f", "#5a8f4e", "#8a5aa8", "#b08a1e", "#3f8f99", "#a83f5f", "#6b6b6b")
PANEL_WIDTH, PANEL_HEIGHT = 6.4, 4.2  # inches
NAMES_WIDTH = 70  # characters that fit side by side along an axis
WIDEST_BAR = 0.25  # of the distance between two groups
FEW_ROUNDS = 30  # a share of fewer is drawn as an outline


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
        (
            part.rates.conditional_rates,
            -width / 2,
            CONDITIONAL_COLOR,
            f"conditional: earlier drafts accepted (outlined: in fewer than {FEW_ROUNDS} rounds)",
        ),
        (part.rates.plain_rates, width / 2, PLAIN_COLOR, "plain: of all rounds"),
    )
    for rates, offset, color, label in series:
        heights = [100 * (rate or 0.0) for rate in rates]
        bars = axes.bar([k + offset for k in positions], heights, width, color=color, label=label)
        if offset < 0:
            for bar, reached in zip(bars, part.counts.reached_per_position, strict=True):
                bar.set(edgecolor=color, facecolor="white" if reached < FEW_ROUNDS else color)
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


def draw_runs(runs: Sequence[EvalRun]) -> bytes | None:
    """Runs beside each other as a PNG: by position, by task, by prompt length, throughput by concurrency, sweeps.

    A panel without figures is left out; None if none is left. The first run that speculates is dashed: it is what the
    others are read against.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = series_of(runs)
    shown, only = at_lowest_temperature(series)
    makers = (_positions_panel, _tasks_panel, _lengths_panel, _throughput_panel)
    panels = [_titled(panel, only) for panel in (make(shown) for make in makers) if panel is not None]
    sweeps = (drafted_panel, temperature_panel, pace_panel)
    panels += [panel for panel in (make(series) for make in sweeps) if panel is not None]
    if not panels:
        return None
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)  # type: ignore[union-attr, call-arg]
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes in list(grid)[len(panels) :]:
        axes.set_axis_off()
    for axes, draw in zip(figure.axes, panels, strict=False):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        _place_legend(axes)
    png = io.BytesIO()
    canvas.print_png(png)
    return png.getvalue()


def _place_legend(axes: Axes) -> None:
    """Names above the figures, in room made for them: bars and their labels must not meet them."""
    names = len(axes.get_legend_handles_labels()[1])
    columns = 1 if names < 3 else 3
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
    axes.set_ylim(low, high * (1 + 0.065 * -(-names // columns)))
    place = "upper right" if columns == 1 else "upper center"
    axes.legend(fontsize=LABEL_SIZE, frameon=False, ncols=columns, loc=place, borderaxespad=0.2)


def _bar_places(groups: Sequence[int], index: int, count: int) -> tuple[list[float], float]:
    """Where the bars of series ``index`` of ``count`` stand in each group, and how wide they are."""
    width = min(0.8 / count, WIDEST_BAR)
    return [group + (index - (count - 1) / 2) * width for group in groups], width


def _titled(panel: Panel, addition: str) -> Panel:
    """The panel, with what its figures are restricted to in its title."""
    if not addition:
        return panel

    def draw(axes: Axes) -> None:
        panel(axes)
        axes.set_title(f"{axes.get_title()}, {addition}", fontsize=10)

    return draw


def _color(one: Series, series: Sequence[Series]) -> str:
    """The same in every panel."""
    return SERIES_COLORS[[other.name for other in series].index(one.name) % len(SERIES_COLORS)]


def _line(one: Series, series: Sequence[Series]) -> dict[str, Any]:
    speculating = [other for other in series if other.speculates]
    dashed = len({id(other.run) for other in speculating}) > 1 and one.name == speculating[0].name
    style = "--" if dashed else "-"
    return {"marker": "o", "markersize": 4, "label": one.name, "color": _color(one, series), "linestyle": style}


def _positions_panel(series: Sequence[Series]) -> Panel | None:
    lines = []
    for one in series:
        parts = [cell.acceptance for cell in one.cells if cell.acceptance and cell.acceptance.accepted_per_position]
        if parts and len({len(part.accepted_per_position) for part in parts}) == 1:
            total = sum(parts[1:], start=parts[0])
            lines.append((one, [100 * rate for rate in total.plain_rates]))

    def draw(axes: Axes) -> None:
        for one, rates in lines:
            axes.plot(range(1, len(rates) + 1), rates, **_line(one, series))
        axes.set_ylim(0, 100)
        axes.set_xticks(range(1, max(len(rates) for _, rates in lines) + 1))
        axes.set_xlabel("drafted position")
        axes.set_ylabel("accepted, % of rounds")
        axes.set_title("Acceptance by position, all tasks pooled", fontsize=10)

    return draw if lines else None


def _tasks_panel(series: Sequence[Series]) -> Panel | None:
    speculating = [one for one in series if one.speculates]
    spots = spots_of(speculating)
    names = spot_names(spots)
    if not spots:
        return None

    def draw(axes: Axes) -> None:
        for index, one in enumerate(speculating):
            shown = [(place, cell) for place, spot in enumerate(spots) if (cell := _with_length(one, spot)) is not None]
            heights = [_length(cell) for _, cell in shown]
            places, width = _bar_places([place for place, _ in shown], index, len(speculating))
            bars = axes.bar(
                places,
                heights,
                width,
                yerr=_error_bars([cell for _, cell in shown]),
                error_kw={"elinewidth": 0.8},
                color=_color(one, series),
                label=one.name,
            )
            if len(spots) * len(speculating) <= 16:
                axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=LABEL_SIZE, padding=1)
        _name_ticks(axes, names)
        axes.set_xlim(-0.5, len(spots) - 0.5)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_ylabel("acceptance length (pooled)")
        axes.set_title("Acceptance length by task, with 95% intervals", fontsize=10)

    return draw


def _name_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Names along the x axis, slanted where they would meet."""
    slanted = sum(len(name) + 2 for name in names) > NAMES_WIDTH
    axes.set_xticks(
        range(len(names)),
        names,
        fontsize=LABEL_SIZE,
        rotation=35 if slanted else 0,
        ha="right" if slanted else "center",
    )


def _with_length(series: Series, spot: Spot) -> Cell | None:
    cell = series.at(spot)
    return cell if cell is not None and cell.acceptance is not None and cell.acceptance.length is not None else None


def _length(cell: Cell) -> float:
    assert cell.acceptance is not None and cell.acceptance.length is not None
    return cell.acceptance.length


def _error_bars(cells: Sequence[Cell]) -> list[list[float]]:
    """Distances below and above each length; 0 where no interval is known."""
    below, above = [], []
    for cell in cells:
        interval = length_interval(cell)
        below.append(0.0 if interval is None else max(0.0, _length(cell) - interval.low))
        above.append(0.0 if interval is None else max(0.0, interval.high - _length(cell)))
    return [below, above]


def _lengths_panel(series: Sequence[Series]) -> Panel | None:
    lines: list[tuple[Series, dict[str, float]]] = []
    for one in series:
        sums: dict[str, Acceptance] = {}
        for cell in one.cells:
            for tokens, _, counts in by_prompt_length(cell):
                sums[tokens] = sums[tokens] + counts if tokens in sums else counts
        lengths = {tokens: counts.length for tokens, counts in sums.items() if counts.length is not None}
        if lengths:
            lines.append((one, lengths))
    buckets = sorted({tokens for _, lengths in lines for tokens in lengths}, key=lambda text: int(text.split()[0]))
    if len(buckets) < 2:
        return None

    def draw(axes: Axes) -> None:
        for one, lengths in lines:
            places = [place for place, tokens in enumerate(buckets) if tokens in lengths]
            axes.plot(places, [lengths[buckets[place]] for place in places], **_line(one, series))
        _name_ticks(axes, buckets)
        axes.set_ylim(0, 1.1 * max(length for _, lengths in lines for length in lengths.values()))
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("acceptance length (pooled)")
        axes.set_title("Acceptance length by prompt length", fontsize=10)

    return draw


def _throughput_panel(series: Sequence[Series]) -> Panel | None:
    lines = []
    for one in series:
        by_concurrency: dict[int, list[Cell]] = {}
        for cell in one.cells:
            by_concurrency.setdefault(cell.concurrency, []).append(cell)
        speeds = {
            concurrency: sum(cell.output_tokens for cell in cells) / sum(cell.seconds for cell in cells)
            for concurrency, cells in sorted(by_concurrency.items())
            if sum(cell.seconds for cell in cells) > 0
        }
        if speeds:
            lines.append((one, speeds))
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        steps = sorted({concurrency for _, speeds in lines for concurrency in speeds})
        for index, (one, speeds) in enumerate(lines):
            places, width = _bar_places([steps.index(concurrency) for concurrency in speeds], index, len(lines))
            bars = axes.bar(places, list(speeds.values()), width, color=_color(one, series), label=one.name)
            if len(steps) * len(lines) <= 16:
                axes.bar_label(bars, [_pace_text(speed) for speed in speeds.values()], fontsize=LABEL_SIZE, padding=1)
        axes.set_xticks(range(len(steps)), [str(step) for step in steps])
        axes.set_xlim(-0.5, len(steps) - 0.5)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlabel("concurrency")
        axes.set_ylabel("output tokens/s")
        axes.set_title("Throughput, all tasks of a run", fontsize=10)

    return draw


def _pace_text(speed: float) -> str:
    """Three figures are enough to tell bars apart."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
