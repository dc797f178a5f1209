"""The trainer as a process: it learns, resumes bit for bit, equals itself on two ranks, and applies no bad step."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash2_train.config import RunConfig
from dflash2_train.telemetry.catalogue import METRICS, described
from tests.integration.forked import finish
from tests.integration.trainings import STEPS, curve, run, start, variant, weights


def test_training_lowers_the_loss_and_exports_a_drafter(straight: RunConfig) -> None:
    losses = [row["loss"] for row in curve(straight)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert (Path(straight.export.output_dir) / "mask_embedding.pt").exists()
    record = json.loads((Path(straight.train.output_dir) / "run.json").read_text())
    assert record["attestation"]["tokens"] >= straight.data.attest.tokens
    assert record["warm_start"] == []
    exported = json.loads((Path(straight.export.output_dir) / "run.json").read_text())
    assert exported["run_id"] == record["run_id"]


def test_what_is_recorded_is_in_the_guide_and_recording_it_changes_no_weight(
    base: RunConfig, straight: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, gradient_share_every=2, peak_tflops=1.0)
    run(config)
    expected, found = weights(straight), weights(config)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    names = {name for row in curve(config, whole=True) for name in row}
    assert [name for name in names if described(name) is None] == []
    recorded = {described(name) for name in names}
    assert [m.name for m in METRICS if m not in recorded and "cuda" not in m.name] == []
    assert [row["step"] for row in curve(config) if "gradient_share/ce" in row] == [2, 4, 6]
    assert (Path(config.train.output_dir) / "metrics.png").exists()


def test_a_killed_run_resumed_equals_the_uninterrupted_one_bit_for_bit(
    base: RunConfig, straight: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, save_every=2)
    process = start(config)[0]
    committed = Path(config.train.output_dir) / "step000002"
    deadline = time.monotonic() + 200
    while not committed.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (Path(config.train.output_dir) / f"step{STEPS:06d}").exists()
    run(config)
    assert curve(config) == curve(straight)
    expected, found = weights(straight), weights(config)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_finished_run_started_again_does_no_step(straight: RunConfig) -> None:
    before = (Path(straight.train.output_dir) / "metrics.jsonl").read_text()
    output = run(straight)
    assert "complete" in output
    assert (Path(straight.train.output_dir) / "metrics.jsonl").read_text() == before


def test_the_same_global_batch_gives_the_same_update_on_one_rank_and_on_two(
    straight: RunConfig, on_two_ranks: RunConfig
) -> None:
    for one, two in zip(curve(straight), curve(on_two_ranks), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    expected, found = weights(straight), weights(on_two_ranks)
    for name in expected:
        torch.testing.assert_close(expected[name], found[name], rtol=1e-3, atol=2e-5)


def test_accumulation_gives_the_same_update_as_one_large_batch(
    base: RunConfig, straight: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, rows=1, accumulation=2)
    run(config)
    expected, found = weights(straight), weights(config)
    for name in expected:
        torch.testing.assert_close(expected[name], found[name], rtol=1e-3, atol=2e-5)


def test_two_ranks_continue_what_one_began_with_other_means_to_the_same_end(
    base: RunConfig, straight: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, max_seconds=0.0, ema_decay=0.5)
    run(config, expect=143)  # out of time after the first step
    assert [path.name for path in Path(config.train.output_dir).glob("step*")] == ["step000001"]
    config.train.rows, config.train.max_seconds = 1, None
    config.train.zero_stage, config.train.gradient_checkpointing = 2, True
    config.export.weights, config.export.dtype = "ema", "float32"
    output = run(config, ranks=2)
    assert "was saved on 1 ranks and continues on 2" in output
    for one, two in zip(curve(straight), curve(config), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["lr"] == two["lr"]
    expected, found = weights(straight), weights(config)
    for name in expected:
        torch.testing.assert_close(expected[name], found[name], rtol=1e-3, atol=2e-5)
    average = load_file(Path(config.train.output_dir) / f"step{STEPS:06d}" / "average.safetensors")
    exported = load_file(Path(config.export.output_dir) / "model.safetensors")
    assert torch.equal(average["fc.weight"], exported["fc.weight"])
    assert not torch.equal(average["fc.weight"], found["fc.weight"])


def test_a_warm_start_from_a_run_begins_where_that_one_ended(
    base: RunConfig, straight: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, steps=1, warm_start=straight.train.output_dir, lr=1e-9)
    run(config)
    assert curve(config)[0]["loss"] < curve(straight)[0]["loss"]
    expected, found = weights(straight), weights(config, step=1)
    for name in expected:
        torch.testing.assert_close(expected[name], found[name], rtol=0, atol=1e-8)
    (parent,) = json.loads((Path(config.train.output_dir) / "run.json").read_text())["warm_start"]
    assert (parent["kind"], parent["step"]) == ("checkpoint", STEPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_continues(base: RunConfig, tmp_path: Path, number: signal.Signals) -> None:
    config = variant(base, tmp_path, steps=4000, save_every=100000)
    process = start(config)[0]
    metrics = Path(config.train.output_dir) / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            break
        time.sleep(0.05)
    process.send_signal(number)
    output = process.communicate(timeout=120)
    assert process.returncode == 143, output
    saved = sorted(Path(config.train.output_dir).glob("step*"))
    assert len(saved) == 1, output
    assert load_file(saved[0] / "exp_avg.safetensors").keys() == load_file(saved[0] / "drafter.safetensors").keys()


def test_resuming_under_other_settings_is_refused_with_the_differences(base: RunConfig, straight: RunConfig) -> None:
    config = variant(base, Path(straight.train.output_dir).parent, lr=1e-3)
    config.loss.gamma = 4.0
    output = run(config, expect=2)
    assert "train.lr: 0.003 -> 0.001" in output
    assert "loss.gamma: 6.5 -> 4.0" in output


def test_a_cache_of_other_taps_is_refused_with_the_difference(base: RunConfig, tmp_path: Path) -> None:
    config = variant(base, tmp_path)
    config.drafter.target_layer_ids = [0, 1, 4]
    output = run(config, expect=2)
    assert "target_layer_ids: [0, 2, 4] -> [0, 1, 4]" in output


def test_a_refused_cache_ends_every_rank_and_leaves_its_verdicts(base: RunConfig, tmp_path: Path) -> None:
    config = variant(base, tmp_path)
    config.data.attest.min_agreement = 1.0
    output = run(config, ranks=2, expect=2)
    assert "labels: all" in output
    assert "the first rank refused the cache" in output
    assert json.loads((Path(config.train.output_dir) / "attestation.json").read_text())["passed"] is False
    assert not (Path(config.train.output_dir) / "run.json").exists()


def test_steps_with_a_non_finite_loss_are_dropped_named_and_end_the_run_after_a_few(
    base: RunConfig, tmp_path: Path
) -> None:
    # A final norm of 1e39 overflows fp32, so every logit and every loss is infinite or no number.
    config = variant(base, tmp_path, max_bad_steps=2, init_norm_scale=1e39)
    output = run(config, expect=2)
    assert "not finite" in output
    lines = (Path(config.train.output_dir) / "dropped-rank0.jsonl").read_text().splitlines()
    dropped = [json.loads(line) for line in lines]
    assert [(row["step"], row["reason"]) for row in dropped] == [(1, "loss"), (2, "loss")]
    assert all(row["sample_ids"] for row in dropped)
    assert not list(Path(config.train.output_dir).glob("step*"))


def test_a_disk_too_small_for_a_checkpoint_is_refused_before_the_first_step(base: RunConfig, tmp_path: Path) -> None:
    config = variant(base, tmp_path)
    output = finish(start(config, "--full-disk"), expect=2)
    assert "GiB free, a checkpoint needs" in output
    assert not (Path(config.train.output_dir) / "metrics.jsonl").exists()
