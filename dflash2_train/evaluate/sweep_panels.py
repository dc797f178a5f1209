"""Panels of a sweep: acceptance length by K and by temperature, and the pace of decoding by K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from dflash2_train.evaluate.runs import Cell
from dflash2_train.evaluate.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f5fa8", "#c9622f", "#5a8f4e", "#8a5aa8", "#b08a1e", "#3f8f99")
Panel = Callable[["Axes"], None]
Points = list[tuple[float, float]]


def at_lowest_temperature(series: Sequence[Series]) -> tuple[list[Series], str]:
    """Of a sweep over temperatures only the lowest, and its name: figures of several do not mix."""
    told = {cell.temperature for one in series for cell in one.cells if cell.num_drafted is not None}
    temperatures = sorted(value for value in told if value is not None)
    if len(temperatures) < 2:
        return list(series), ""
    lowest = temperatures[0]
    kept = [replace(one, cells=[cell for cell in one.cells if cell.temperature in (lowest, None)]) for one in series]
    return [one for one in kept if one.cells], named(lowest)


def named(temperature: float | None) -> str:
    """A temperature in a legend."""
    if temperature is None:
        return "temperature not told"
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def drafted_panel(series: Sequence[Series]) -> Panel | None:
    """Acceptance length by K, a line a temperature."""
    lines = {
        prefix + named(temperature): _points([cell for cell in cells if cell.temperature == temperature], "num_drafted")
        for prefix, cells in _swept(series)
        for temperature in dict.fromkeys(cell.temperature for cell in cells)
    }
    return _panel(lines, "K, tokens drafted a round", "acceptance length (pooled)", "Acceptance length by K, all tasks")


def temperature_panel(series: Sequence[Series]) -> Panel | None:
    """Acceptance length by temperature, a line a K."""
    lines = {
        f"{prefix}K={drafted}": _points([cell for cell in cells if cell.num_drafted == drafted], "temperature")
        for prefix, cells in _swept(series)
        for drafted in dict.fromkeys(cell.num_drafted for cell in cells)
    }
    return _panel(lines, "temperature", "acceptance length (pooled)", "Acceptance length by temperature, all tasks")


def pace_panel(series: Sequence[Series]) -> Panel | None:
    """Decoding speed by K, a line a temperature; plain decoding stands at K=0."""
    lines = {}
    for prefix, cells in _by_run(series):
        for temperature in dict.fromkeys(cell.temperature for cell in cells):
            by_drafted: dict[int, list[Cell]] = {}
            for cell in cells:
                if cell.temperature == temperature:
                    by_drafted.setdefault(cell.num_drafted or 0, []).append(cell)
            paces = ((drafted, _pace(members)) for drafted, members in sorted(by_drafted.items()))
            lines[prefix + named(temperature)] = [(float(drafted), pace) for drafted, pace in paces if pace is not None]
    return _panel(lines, "K, tokens drafted a round (0: plain decoding)", "decode tokens/s", "Decoding speed by K")


def _by_run(series: Sequence[Series]) -> list[tuple[str, list[Cell]]]:
    """What a run's lines are called first, and its cells that the built-in runner timed; nothing of two runs mixes."""
    groups: dict[int, list[Series]] = {}
    for one in series:
        groups.setdefault(id(one.run), []).append(one)
    found = [
        (members[0].run.label, [cell for one in members for cell in one.cells if cell.seconds_by_part is not None])
        for members in groups.values()
    ]
    found = [(label, cells) for label, cells in found if cells]
    if len(found) == 1:
        return [("", found[0][1])]
    return [(f"{label} #{number}, ", cells) for number, (label, cells) in enumerate(found, start=1)]


def _swept(series: Sequence[Series]) -> list[tuple[str, list[Cell]]]:
    """The same, of cells that speculate."""
    return [
        (prefix, [one for one in cells if one.num_drafted is not None and one.acceptance])
        for prefix, cells in _by_run(series)
    ]


def _points(cells: Sequence[Cell], key: str) -> Points:
    """Pooled acceptance length of all tasks at each value of ``key``, ascending."""
    groups: dict[float, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(vars(cell)[key], []).append(cell)
    points = []
    for value, members in sorted(groups.items()):
        length = reduce(add, (cell.acceptance for cell in members if cell.acceptance is not None)).length
        if length is not None:
            points.append((float(value), length))
    return points


def _pace(cells: Sequence[Cell]) -> float | None:
    seconds = sum(sum((cell.seconds_by_part or {}).values()) for cell in cells)
    seconds -= sum((cell.seconds_by_part or {}).get("prefill", 0.0) for cell in cells)
    tokens = sum(cell.output_tokens - cell.requests.answered for cell in cells)
    return tokens / seconds if seconds > 0 else None


def _panel(lines: dict[str, Points], x_label: str, y_label: str, title: str) -> Panel | None:
    """One line a name; None unless some line has two points."""
    if all(len(points) < 2 for points in lines.values()):
        return None

    def draw(axes: Axes) -> None:
        for (name, points), color in zip(lines.items(), COLORS * len(lines), strict=False):
            places, heights = zip(*points, strict=True) if points else ((), ())
            axes.plot(places, heights, marker="o", markersize=4, color=color, label=name)
        axes.set_xticks(sorted({place for points in lines.values() for place, _ in points}))
        axes.set_ylim(0, 1.1 * max(height for points in lines.values() for _, height in points))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, fontsize=10)

    return draw
