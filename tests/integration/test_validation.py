"""Validation in a running training: it changes no bit, agrees over ranks, and its best checkpoint survives a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash2_train.config import RunConfig
from tests.integration.trainings import STEPS, curve, run, variant, weights

SHARE = 0.34


def held_out(config: RunConfig, **validation: object) -> RunConfig:
    config.train.validation.share = SHARE
    for key, value in validation.items():
        setattr(config.train.validation, key, value)
    return config


def figures(config: RunConfig) -> dict[int, dict[str, float]]:
    """Validated values by step, times left out."""
    rows = {int(row["step"]): row for row in curve(config)}
    named = {
        step: {key: value for key, value in row.items() if key.startswith("validation/") and "seconds" not in key}
        for step, row in rows.items()
    }
    return {step: row for step, row in named.items() if row}


def generators(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.train.output_dir) / f"step{STEPS:06d}" / "random.safetensors")


def best(config: RunConfig) -> Any:
    return json.loads((Path(config.train.output_dir) / "best.json").read_text())


@pytest.fixture(scope="module")
def validated(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, str]:
    """A run that validates every second step and decodes two prompts each time; what it printed."""
    config = variant(base, tmp_path_factory.mktemp("validated"), validate_every=2, gradient_checkpointing=True)
    held_out(config, decode_prompts=2, decode_tokens=8)
    return config, run(config)


def test_training_with_validation_is_training_without_it_to_the_last_bit(
    base: RunConfig,
    validated: tuple[RunConfig, str],
    tmp_path: Path,
) -> None:
    plain = held_out(variant(base, tmp_path, gradient_checkpointing=True))
    run(plain)
    assert not figures(plain)
    expected, found = weights(plain), weights(validated[0])
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    before, after = generators(plain), generators(validated[0])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [row["loss"] for row in curve(plain)] == [row["loss"] for row in curve(validated[0])]


def test_figures_are_recorded_shown_and_pick_the_best_checkpoint(validated: tuple[RunConfig, str]) -> None:
    config, output = validated
    found = figures(config)
    assert list(found) == [2, 4, 6]
    for row in found.values():
        assert 1 <= row["validation/acceptance_length"] <= config.drafter.block_size
        assert 1 <= row["validation/acceptance_length_real"] <= config.drafter.block_size
        assert 0 <= row["validation/overlap"] <= row["validation/overlap_bound"] <= 1
    assert "validation at step 6" in output and "lost: missed" in output
    marked = best(config)
    assert marked["metric"] == "validation/acceptance_length_real"
    real = {step: row[marked["metric"]] for step, row in found.items()}
    assert marked["value"] == max(real.values())
    assert marked["checkpoint"] == f"step{max(real, key=lambda step: real[step]):06d}"
    assert (Path(config.train.output_dir) / marked["checkpoint"] / "MANIFEST.json").exists()


def test_a_stopped_run_goes_on_to_the_same_weights_figures_and_best(
    base: RunConfig,
    validated: tuple[RunConfig, str],
    tmp_path: Path,
) -> None:
    config = variant(base, tmp_path, validate_every=2, gradient_checkpointing=True, max_seconds=0.0)
    held_out(config, decode_prompts=2, decode_tokens=8)
    run(config, expect=143)
    config.train.max_seconds = None
    run(config)
    assert figures(config) == figures(validated[0])
    assert best(config) == best(validated[0])
    expected, found = weights(validated[0]), weights(config)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_ranks_share_the_rows_and_the_best_averaged_weights_are_exported(
    base: RunConfig,
    tmp_path: Path,
) -> None:
    options = {"steps": 2, "validate_every": 1, "lr": 1e-9, "ema_decay": 0.5}  # weights stand still
    one = held_out(variant(base, tmp_path / "one", **options), decode_prompts=1, decode_tokens=6)
    two = held_out(variant(base, tmp_path / "two", rows=1, zero_stage=2, **options), decode_prompts=1, decode_tokens=6)
    for config in (one, two):
        config.export.weights, config.export.checkpoint, config.export.dtype = "ema", "best", "float32"
    assert "averaged weights" in run(one)
    run(two, ranks=2)
    expected, found = figures(one), figures(two)
    assert list(expected) == list(found) == [1, 2]
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, abs=2e-3)
    assert best(two)["checkpoint"] == "step000001"  # the second is no better
    average = load_file(Path(two.train.output_dir) / "step000001" / "average.safetensors")
    exported = load_file(Path(two.export.output_dir) / "model.safetensors")
    assert torch.equal(average["fc.weight"], exported["fc.weight"])


def test_a_share_is_refused_to_a_run_that_was_begun_without(
    base: RunConfig,
    validated: tuple[RunConfig, str],
) -> None:
    config = variant(base, Path(validated[0].train.output_dir).parent, gradient_checkpointing=True)
    output = run(config, expect=2)
    assert "held_back" in output and "'share': 0.34" in output
