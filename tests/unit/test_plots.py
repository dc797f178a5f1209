"""A picture shows what was recorded, each step once, and leaves out what was not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dflash2_train.plots.figure import Series, series, smoothed
from dflash2_train.plots.overlay import overlay_panels, write_overlay
from dflash2_train.plots.training import panels_of, slots_of, write_training_plot

PNG = b"\x89PNG\r\n\x1a\n"


def log_rows(steps: int = 120, slots: int = 7) -> list[dict[str, float]]:
    """A made-up run with short blocks, a dropped window, validation and looks at gradients now and then."""
    rows: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        loss = 3 + 8 * math.exp(-step / 30)
        row = {"step": step, "attempt": 1, "loss": loss, "ce": loss * 0.6, "kl": loss * 0.4, "selector": 0.9}
        row |= {"lr": 1e-3 / step, "lr/matrices": 1e-3 / step, "lr/gains": 3e-3 / step, "lr/codebooks": 1e-3 / step}
        row |= {"grad_norm": 1 + 9 / step, "dropped": float(step > 60), "data_wait": 0.02 if step % 9 else 0.4}
        row |= {"tokens_per_second": 600.0 + step % 7, "utilisation": 0.4, "memory/rss": 2.0, "memory/rss_peak": 2.1}
        row["mask_embedding/ratio"] = 1 + step / 100
        size = slots if step % 4 == 0 else slots // 2
        for slot in range(1, size + 1):
            row |= {f"ce/slot{slot}": loss + slot, f"top1/slot{slot}": 0.5 / slot, f"kl/slot{slot}": loss - 1}
        if size == slots:
            row |= {"selector_path": 0.2 + step / 100, "unary_path": 0.1 + step / 120}
            row |= {f"accepted/slot{slot}": 0.6**slot for slot in range(1, slots + 1)}
        if step % 20 == 0:
            row |= {"gradient_share/ce": 0.5, "gradient_share/kl": 0.3, "gradient_share/selector": 0.2}
            row["validation/acceptance_length"] = 1.2 + step / 150
        rows.append(row)
    return rows


def test_a_series_holds_the_steps_that_have_a_finite_value() -> None:
    rows = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": math.nan}, {"step": 4, "a": 5.0}]
    found = series(rows, "a")
    assert found.steps.tolist() == [1, 4]
    assert found.values.tolist() == [2.0, 5.0]
    assert len(series(rows, "b").values) == 0


def test_smoothing_keeps_a_straight_line_where_it_is_and_short_curves_alone() -> None:
    steps = np.arange(401.0)
    found = smoothed(Series(steps, 2 * steps))
    assert np.allclose(found.values, 2 * found.steps, atol=1.0)
    assert len(found.steps) > 380
    short = Series(steps[:30], steps[:30])
    assert smoothed(short) is short


def test_a_whole_log_gives_one_picture_and_old_ones_fewer_panels(tmp_path: Path) -> None:
    rows = log_rows()
    write_training_plot(rows, tmp_path / "metrics.png", "made up")
    assert (tmp_path / "metrics.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.png"], "no temporary file stays"
    names = {name for row in rows for name in row}
    old = {name for name in names if "/" not in name and name not in ("tokens_per_second", "utilisation")}
    assert 0 < len(panels_of(rows, old)) < len(panels_of(rows, names))


def test_slots_are_in_order_of_their_number() -> None:
    assert slots_of({f"ce/slot{k}" for k in range(1, 12)} | {"ce", "ce/slotted"}, "ce") == list(range(1, 12))


@pytest.mark.parametrize("rows", [[], log_rows(1), [{"step": 1, "attempt": 1, "grad_norm": 0.0}]])
def test_runs_of_no_step_or_one_are_drawn_as_well(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    write_training_plot(rows, tmp_path / "metrics.png", "short")
    assert (tmp_path / "metrics.png").read_bytes().startswith(PNG)


def test_runs_of_unlike_figures_are_laid_over_each_other(tmp_path: Path) -> None:
    old = [{"step": step, "attempt": 1, "loss": 2.0} for step in range(1, 9)]
    write_overlay({"new": log_rows(), "old": old}, tmp_path / "runs.png", "new | old")
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)


def test_what_each_run_measured_only_once_gets_no_panel_of_points() -> None:
    once = [{"step": step, "loss": 2.0} for step in (1, 2)]
    once[-1]["validation/acceptance_length"] = 1.4
    twice = [{**row, "validation/acceptance_length": 1.4} for row in once]
    assert len(overlay_panels({"a": once, "b": once})) == 1
    assert len(overlay_panels({"a": once, "b": twice})) == 2
