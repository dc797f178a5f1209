"""Runs beside each other: which settings differ, and what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_train.runs.folder import RunFolder, acceptance_length, last_value
from dflash2_train.runs.measured import measured_lengths

LAST_ROWS = 50  # logged steps that a figure of the end is a mean over: one step is noise
MISSING = "-"
MEANS = (
    "loss",
    "ce",
    "kl",
    "selector",
    "top1",
    "recall",
    "overlap",
    "selector_path",
    "unary_path",
    "grad_norm",
    "tokens_per_second",
    "utilisation",
    "data_wait",
)
NEWEST = ("step", "seconds", "dropped", "memory/rss_peak", "memory/cuda_allocated_peak")
NAMES_OF_FOLDERS = ("name", "run_dir")  # differ between any two runs and say nothing


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a recorded configuration; places in the run's own folder read ``${run_dir}/...``."""
    run_dir = config.get("run_dir")
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, str) and run_dir and value.startswith(f"{run_dir}/"):
            flat[prefix] = "${run_dir}" + value.removeprefix(run_dir)
        else:
            flat[prefix] = value

    walk("", {key: value for key, value in config.items() if key not in NAMES_OF_FOLDERS})
    return flat


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all configurations: dotted key, and a text for each; ``-`` where it is missing.

    Keys come in the order of the schema.
    """
    flats = [flat_config(config) for config in configs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    table = [(key, [str(flat[key]) if key in flat else MISSING for flat in flats]) for key in keys]
    return [(key, texts) for key, texts in table if len(set(texts)) > 1]


def final_figures(run: RunFolder) -> dict[str, float]:
    """What a run ended with, or stands at: means over its last rows, newest values, validation and evaluations."""
    rows = run.rows()
    figures = {name: value for name in NEWEST if (value := last_value(rows, name)) is not None}
    for name in MEANS:
        values = [row[name] for row in rows if name in row][-LAST_ROWS:]
        if values:
            figures[name] = math.fsum(values) / len(values)
    measured = sorted({name for row in rows for name in row if name.startswith("validation/")})
    figures.update({name: value for name in measured if (value := last_value(rows, name)) is not None})
    report = run.evaluation()
    length = acceptance_length(report)
    if length is not None:
        figures["eval: acceptance length"] = length
    if report is not None and report.get("speedup") is not None:
        figures["eval: speed-up"] = float(report["speedup"])
    return figures | measured_lengths(run)


def figure_table(figures: Sequence[Mapping[str, float]]) -> list[tuple[str, list[str]]]:
    """Every figure that a run has: its name, and a text for each run."""
    names = dict.fromkeys(name for one in figures for name in one)
    return [(name, [number(one.get(name)) for one in figures]) for name in names]


def number(value: float | None) -> str:
    """A figure at four significant digits, whole numbers as such."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1e4 else f"{value:.4g}"
