"""A sweep in one picture: what the jobs ended with, and curves of the best of them over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.plots.figure import COLORS, LABEL_SIZE, Row, finish, write_panels
from dflash2_train.plots.overlay import overlay_panels
from dflash2_train.plots.training import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS = "0.7"  # grey of jobs whose curves are not drawn


def write_sweep_plot(
    ranked: Sequence[tuple[str, float]], curves: Mapping[str, Sequence[Row]], path: Path, *, by: str
) -> None:
    """Draw the figure that ranks and the curves of the best jobs into the PNG ``path``.

    Args:
        ranked: label and figure of each job, the best first.
        curves: label -> log rows, each step once, of the first of them; bars have the colours of their curves and
            stand for a legend.
        path: of the PNG.
        by: name of the figure.
    """
    drawn = f", curves of the best {len(curves)}" if len(curves) < len(ranked) else ""
    panels: list[Panel] = [partial(_bars, ranked, list(curves), by), *overlay_panels(curves, legends=False)]
    write_panels(panels, path, f"{len(ranked)} jobs by {by}{drawn}")


def _bars(ranked: Sequence[tuple[str, float]], drawn: Sequence[str], by: str, axes: Axes) -> None:
    labels = [label for label, _ in ranked]
    colors = [COLORS[drawn.index(label) % len(COLORS)] if label in drawn else OTHERS for label in labels]
    places = range(len(ranked))
    axes.barh(places, [value for _, value in ranked], color=colors)
    finish(axes, by, "")
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel(by, fontsize=LABEL_SIZE)
    values = [value for _, value in ranked]
    room = max(values) - min(values)
    if room > 0:  # differences are what a sweep is about: the axis does not begin at zero
        axes.set_xlim(min(values) - 0.3 * room, max(values) + 0.1 * room)
