"""One run in one picture: what it lost, what it learned to draft, how its gradient behaved, how fast it went.

A panel whose figures were not recorded is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dflash2_train.plots.figure import COLORS, LABEL_SIZE, Row, Series, draw, finish, series, smoothed, write_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_NAME = "metrics.png"
LENGTHS = "validation/acceptance_length"  # prefix of what validation measures
SLOTTED = (
    ("ce", "Cross-entropy by slot", "nats"),
    ("kl", "Divergence from the teacher by slot", "nats"),
    ("selector", "Selector by slot", "nats"),
    ("top1", "Best unary logit is the token, by slot", "share"),
    ("accepted", "Forecast: drafts accepted up to slot k", "share of blocks"),
)

Panel = Callable[["Axes"], None]


def write_training_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw a run's log rows, each step once, into the PNG ``path``."""
    names = {name for row in rows for name in row}
    last = int(rows[-1]["step"]) if rows else 0
    write_panels(panels_of(rows, names), path, f"{title}: {last:,} steps")


def panels_of(rows: Sequence[Row], names: set[str]) -> list[Panel]:
    """The panels that these names give something to draw."""
    panels: list[Panel] = []
    if "loss" in names:
        panels.append(partial(_losses, rows))
    lengths = sorted(name for name in names if name.startswith(LENGTHS))
    if lengths or "selector_path" in names:
        panels.append(partial(_acceptance, rows, lengths))
    for metric, title, unit in SLOTTED:
        slots = slots_of(names, metric)
        if slots:
            panels.append(partial(_by_slot, rows, metric, slots, title, unit))
    if "grad_norm" in names:
        panels.append(partial(_gradient, rows))
    if any(name.startswith("gradient_share/") for name in names):
        panels.append(partial(_family, rows, names, "gradient_share/", "Pull of each loss at the backbone", "share"))
    if "lr" in names:
        panels.append(partial(_rates, rows))
    if "tokens_per_second" in names:
        panels.append(partial(_throughput, rows))
    elif "data_wait" in names:
        panels.append(partial(_one, rows, "data_wait", "Waiting for data", "share of the time"))
    if "utilisation" in names:
        panels.append(partial(_one, rows, "utilisation", "Utilisation of the device", "share of its peak"))
    if any(name.startswith("memory/") for name in names):
        panels.append(partial(_family, rows, names, "memory/", "Memory of the first rank", "GiB"))
    if "mask_embedding/ratio" in names:
        panels.append(partial(_one, rows, "mask_embedding/ratio", "Norm of the mask vector", "x usual table row"))
    return panels


def slots_of(names: set[str], metric: str) -> list[int]:
    """Slots that a metric was recorded for, ascending."""
    found = (re.fullmatch(re.escape(metric) + r"/slot(\d+)", name) for name in names)
    return sorted(int(match.group(1)) for match in found if match)


def _losses(rows: Sequence[Row], axes: Axes) -> None:
    for name, color in zip(("loss", "ce", "kl", "selector"), COLORS, strict=False):
        draw(axes, series(rows, name), name, color)
    finish(axes, "Loss and its parts", "nats", log=True)


def _acceptance(rows: Sequence[Row], lengths: Sequence[str], axes: Axes) -> None:
    for name, label, color in (
        ("selector_path", "forecast on training text, selector", COLORS[0]),
        ("unary_path", "forecast on training text, unary", COLORS[6]),
    ):
        accepted = series(rows, name)
        draw(axes, Series(accepted.steps, 1 + accepted.values), label, color)
    for name, color in zip(lengths, COLORS[1:6] * len(lengths), strict=False):
        measured = series(rows, name)
        label = name.removeprefix("validation/").replace("_", " ")
        axes.plot(measured.steps, measured.values, color=color, marker="o", markersize=3.5, label=label)
    finish(axes, "Acceptance length", "tokens a round")


def _by_slot(rows: Sequence[Row], metric: str, slots: Sequence[int], title: str, unit: str, axes: Axes) -> None:
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    for place, slot in enumerate(slots):
        color = shades(0.9 * place / max(1, len(slots) - 1))
        # Raw points of seven slots would hide each other: the smooth curves alone.
        curve = smoothed(series(rows, f"{metric}/slot{slot}"))
        if len(curve.values):
            axes.plot(curve.steps, curve.values, color=color, linewidth=1.3, label=f"{slot}")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.15 * (top - bottom))  # room for the legend above the curves
    finish(axes, title, unit, legend_columns=len(slots))


def _gradient(rows: Sequence[Row], axes: Axes) -> None:
    draw(axes, series(rows, "grad_norm"), "", COLORS[0])
    finish(axes, "Norm of the gradient before clipping (red: dropped windows)", "", log=True)
    dropped = series(rows, "dropped")
    for step, before, now in zip(dropped.steps[1:], dropped.values, dropped.values[1:], strict=False):
        if now > before:
            axes.axvline(step, color=COLORS[1], linewidth=0.8, alpha=0.7)


def _rates(rows: Sequence[Row], axes: Axes) -> None:
    names = [name for name in rows[-1] if name.startswith("lr/")] or ["lr"]
    drawn: list[tuple[Series, list[str]]] = []  # groups with one rate are one curve
    for name in names:
        curve, label = series(rows, name), name.removeprefix("lr/").replace("_", " ")
        twin = next((labels for one, labels in drawn if np.array_equal(one.values, curve.values)), None)
        if twin is None:
            drawn.append((curve, [label]))
        else:
            twin.append(label)
    for (curve, labels), color in zip(drawn, COLORS, strict=False):
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.3, label=", ".join(labels))
    finish(axes, "Learning rate", "")


def _throughput(rows: Sequence[Row], axes: Axes) -> None:
    draw(axes, series(rows, "tokens_per_second"), "", COLORS[0])
    axes.set_ylim(bottom=0)
    finish(axes, "Throughput, and share of the time waiting for data", "context tokens/s")
    waiting = series(rows, "data_wait")
    if len(waiting.values):
        beside = axes.twinx()
        beside.fill_between(waiting.steps, 0, waiting.values, color=COLORS[1], alpha=0.35, linewidth=0)
        beside.set_ylim(0, 1)
        beside.set_ylabel("waiting", fontsize=LABEL_SIZE, color=COLORS[1])
        beside.tick_params(labelsize=LABEL_SIZE, colors=COLORS[1])
        beside.spines[["top"]].set_visible(False)


def _family(rows: Sequence[Row], names: set[str], prefix: str, title: str, unit: str, axes: Axes) -> None:
    members = sorted(name for name in names if name.startswith(prefix))
    for name, color in zip(members, COLORS, strict=False):
        draw(axes, series(rows, name), name.removeprefix(prefix).replace("_", " "), color)
    axes.set_ylim(bottom=0)
    finish(axes, title, unit)


def _one(rows: Sequence[Row], name: str, title: str, unit: str, axes: Axes) -> None:
    draw(axes, series(rows, name), "", COLORS[0])
    axes.set_ylim(bottom=0)
    finish(axes, title, unit)
