"""The plan: its arithmetic by hand, its origins, what fits, and a probe that ends in time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_gen import probe as probing
from data_gen import stage_plan
from data_gen.backends.base import CaptureRequest, Completion, Heartbeat, SamplingSettings, TakeRequest
from data_gen.plan import (
    ASSUMED,
    COUNTED,
    ESTIMATED,
    MEASURED,
    PROBED,
    Amounts,
    context_weights,
    cost,
    decode_rate,
    drafter_parameters,
    make_plan,
    prefill_rate,
    short,
    slot_weights,
    train_step_flops,
)
from data_gen.prepare import PromptCounts
from data_gen.prompts import PromptRecord
from dflash2_train.config import ConfigError, HardwareConfig, PlanConfig, RunConfig
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape

TOKEN_BYTES = 1000
PEAKS = HardwareConfig(name="two GPUs", devices=2, memory_gb=10, bf16_tflops=100, memory_gb_per_s=1000)


def amounts(**changes: Any) -> Amounts:
    values = {"prompts": 100, "prompt_tokens": 20.0, "answer_tokens": 30.0}
    origins = {f"{name}_origin": ASSUMED for name in values}
    return Amounts(**(values | origins | changes))  # type: ignore[arg-type]


def on_peaks(config: RunConfig, **target: Any) -> RunConfig:
    """The configuration on ``PEAKS`` with a target of known size."""
    sized = dataclasses.replace(config.target, num_parameters=1e9, **target)
    return dataclasses.replace(config, plan=PlanConfig(hardware=PEAKS), target=sized)


def test_tokens_bytes_and_hours_are_products_of_the_amounts(tiny_config: RunConfig) -> None:
    sampling = dataclasses.replace(tiny_config.data.sampling, repeats=3)
    config = dataclasses.replace(
        tiny_config,
        data=dataclasses.replace(tiny_config.data, sampling=sampling),
        plan=PlanConfig(regenerate_tokens_per_s=10, capture_tokens_per_s=50, train_seconds_per_step=7200),
    )
    plan = make_plan(config, amounts(), token_bytes=TOKEN_BYTES)
    generate, capture, train = plan.stages
    assert (generate.units, capture.units, train.units) == (100 * 3 * 30, 100 * 3 * 50, config.train.steps)
    assert dict(plan.sizes)["cache"] == 100 * 3 * 50 * TOKEN_BYTES
    assert generate.hours == pytest.approx(9000 / 10 / 3600)
    assert train.hours == pytest.approx(2 * config.train.steps)
    assert {stage.rate.origin for stage in plan.stages if stage.rate} == {MEASURED}
    assert cost(plan.stages, 8, 2.5)[0] == pytest.approx(9000 / 10 / 3600 * 8 * 2.5)


def test_without_peaks_or_measurements_hours_are_unknown_rather_than_guessed(tiny_config: RunConfig) -> None:
    plan = make_plan(tiny_config, amounts(), token_bytes=TOKEN_BYTES)
    assert [stage.hours for stage in plan.stages] == [None, None, None]
    assert cost(plan.stages, 8, 1.0) == [None, None, None]


def test_a_probe_wins_over_configured_rates_and_those_over_estimates(tiny_config: RunConfig) -> None:
    config = on_peaks(tiny_config)
    origins = [stage.rate.origin for stage in make_plan(config, amounts(), token_bytes=1).stages if stage.rate]
    assert origins == [ESTIMATED] * 3
    config.plan.capture_tokens_per_s = 5
    assert make_plan(config, amounts(), token_bytes=1).stages[1].rate.origin == MEASURED  # type: ignore[union-attr]
    probed = make_plan(config, amounts(), token_bytes=1, probed=(1.0, 2.0)).stages
    assert [(stage.rate.value, stage.rate.origin) for stage in probed[:2] if stage.rate] == [
        (1.0, PROBED),
        (2.0, PROBED),
    ]


def test_decoding_is_bound_by_weights_at_small_batches_and_by_arithmetic_at_large_ones(tiny_config: RunConfig) -> None:
    config = on_peaks(tiny_config, tensor_parallel_size=2)
    config.plan.decode_bandwidth_share, config.plan.prefill_flops_share = 0.5, 0.5
    config.data.max_num_seqs = 10
    rate = decode_rate(config)
    assert rate is not None and rate.value == pytest.approx(10 / (2e9 / (1000e9 * 0.5 * 2)))
    config.data.max_num_seqs = 10_000
    rate = decode_rate(config)
    assert rate is not None and rate.value == pytest.approx(100e12 * 0.5 * 2 / 2e9)


def test_devices_that_fill_no_replica_give_no_rate(tiny_config: RunConfig) -> None:
    config = on_peaks(tiny_config, tensor_parallel_size=4)
    assert decode_rate(config) is None
    assert prefill_rate(config) is None


def test_sparse_targets_prefill_with_the_weights_a_token_meets(tiny_config: RunConfig) -> None:
    dense, sparse = prefill_rate(on_peaks(tiny_config)), prefill_rate(on_peaks(tiny_config, num_active_parameters=1e8))
    assert dense is not None and sparse is not None
    assert sparse.value == pytest.approx(10 * dense.value)


def test_weights_are_those_of_the_real_drafter(tiny_config: RunConfig) -> None:
    target, drafter = tiny_config.target, tiny_config.drafter
    names = {field.name for field in dataclasses.fields(DrafterShape)}
    shared = {key: value for key, value in vars(drafter).items() if key in names}
    shape = DrafterShape(
        **{
            **shared,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_layers,
            "target_layer_ids": tuple(drafter.target_layer_ids),
            "layer_types": tuple(drafter.resolved_layer_types()),
        }
    )
    real = {name: value.numel() for name, value in Drafter(shape).named_parameters()}
    neutral = {name for name in real if "norm" in name or "base_kernel" in name or name == "mask_embedding"}
    assert drafter_parameters(tiny_config) == sum(size for name, size in real.items() if name not in neutral)
    context = sum(size for name, size in real.items() if name == "fc.weight" or ".k_proj" in name or ".v_proj" in name)
    assert context_weights(tiny_config) == context
    codebooks = sum(size for name, size in real.items() if "codebook" in name)
    assert slot_weights(tiny_config) == drafter_parameters(tiny_config) - codebooks - real["fc.weight"]


def test_a_step_costs_in_proportion_to_rows_and_no_more_anchors_than_a_document_has(tiny_config: RunConfig) -> None:
    one, two = train_step_flops(tiny_config, 32, 1), train_step_flops(tiny_config, 32, 2)
    assert two == pytest.approx(2 * one)
    tiny_config.train.anchors_per_document = 32
    capped = train_step_flops(tiny_config, 32, 1)
    tiny_config.train.anchors_per_document = 10_000
    assert train_step_flops(tiny_config, 32, 1) == capped


def test_what_does_not_fit_is_said_with_advice(tiny_config: RunConfig) -> None:
    config = on_peaks(tiny_config)
    config.data.max_prompt_tokens, config.data.sampling.max_tokens, config.train.row_tokens = 60, 60, 64
    fits = {fit.what: fit for fit in make_plan(config, amounts(prompts=10**15), token_bytes=TOKEN_BYTES).fits}
    assert {fit.what for fit in fits.values() if fit.verdict == "does not fit"} == {
        "cache on this machine's disk",
        "longest prompt and answer in a row",
    }
    assert all(fit.advice for fit in fits.values())
    config.target.num_parameters = 1e12
    assert {fit.verdict for fit in make_plan(config, amounts(), token_bytes=1).fits if "target's" in fit.what} == {
        "does not fit"
    }


def test_a_stream_needs_room_for_its_ring_and_not_for_the_cache(tiny_config: RunConfig) -> None:
    tiny_config.data.mode, tiny_config.data.stream.budget_mib = "stream", 3
    plan = make_plan(tiny_config, amounts(prompts=10**15), token_bytes=TOKEN_BYTES)
    assert plan.fits[0].needed == 3 * 2**20
    assert {fit.verdict for fit in plan.fits if "disk" in fit.what} == {"fits"}


@pytest.mark.parametrize(("value", "text"), [(999.0, "999 B"), (33_200_000_000_000.0, "33.2 TB"), (1500.0, "1.5 kB")])
def test_sizes_are_written_with_decimal_prefixes(value: float, text: str) -> None:
    assert short(value, "B") == text


def test_counted_prompts_win_over_assumed_ones(tiny_config: RunConfig) -> None:
    tiny_config.plan.prompts = 7
    assert stage_plan.find_amounts(tiny_config, None).prompts_origin == ASSUMED
    found = stage_plan.find_amounts(tiny_config, prepared(3))  # type: ignore[arg-type]
    assert (found.prompts, found.prompts_origin, found.prompt_tokens) == (3, COUNTED, 2.0)
    tiny_config.plan.prompts = None
    with pytest.raises(ConfigError, match=r"plan\.prompts"):
        stage_plan.find_amounts(tiny_config, None)


@pytest.mark.parametrize(("assumed", "planned"), [(5.0, 5.0), (90.0, 8.0), (None, 8.0)])
def test_no_answer_is_planned_longer_than_the_sampling_allows(
    tiny_config: RunConfig, assumed: float | None, planned: float
) -> None:
    tiny_config.data.sampling.max_tokens = 8
    config = dataclasses.replace(tiny_config, plan=PlanConfig(prompts=2, answer_tokens=assumed))
    assert stage_plan.find_amounts(config, None).answer_tokens == planned


def test_the_plan_stage_writes_its_numbers_and_starts_nothing(tiny_config: RunConfig, tmp_path: Path) -> None:
    tiny_config.plan.prompts, tiny_config.run_dir = 7, str(tmp_path / "run")
    stage_plan.plan_stage(tiny_config)
    record = json.loads((tmp_path / "run" / stage_plan.PLAN_FILE).read_text())
    assert record["amounts"]["prompts"] == 7
    assert [stage["hours"] for stage in record["stages"]] == [None, None, None]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [stage_plan.PLAN_FILE]


# ---------------------------------------------------------------------------------------------------------- the probe


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.ticks = itertools.count()

    def monotonic(self) -> float:
        return float(next(self.ticks))


class Endless:
    """An engine that never runs out of answers of three tokens, nor of states."""

    def __init__(self) -> None:
        self.closed = False

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion]:
        for request in itertools.cycle(list(iter(take, None))):
            yield Completion(request_id=request.request_id, completion_ids=[1, 2, 3], finish_reason="stop")
            heartbeat()

    def capture(self, requests: Sequence[CaptureRequest], heartbeat: Heartbeat) -> Iterator[Any]:
        for request in itertools.cycle(requests):
            yield SimpleNamespace(input_ids=request.input_ids)
            heartbeat()

    def close(self) -> None:
        self.closed = True


class Stuck(Endless):
    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion]:
        while True:
            heartbeat()
        yield


def prepared(count: int) -> SimpleNamespace:
    records = [
        PromptRecord(
            prompt_id=f"p{n}",
            source="s",
            license="mit",
            messages=[{"role": "user", "content": "w1"}],
            split="train",
        )
        for n in range(count)
    ]
    renderer = SimpleNamespace(prompt_ids=lambda _messages, _tools: [5, 6])
    counts = PromptCounts(turns=count, prompt_tokens=2 * count)
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_tokens=500, stop_ids=[0])
    return SimpleNamespace(
        train=records, counts=counts, renderer=renderer, folder=Path("target"), sampling=sampling, rejected=Counter()
    )


def test_a_probe_ends_in_time_and_closes_both_engines(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, capturer = Endless(), Endless()
    lengths = []
    monkeypatch.setattr(
        probing, "open_generator", lambda _c, _f, sampling: lengths.append(sampling.max_tokens) or generator
    )
    monkeypatch.setattr(probing, "open_capturer", lambda _c, _f: capturer)
    monkeypatch.setattr(probing, "time", Clock())
    tiny_config.plan.probe_seconds = 40
    result = probing.probe(tiny_config, prepared(4))  # type: ignore[arg-type]
    assert lengths == [probing.ANSWER_TOKENS]
    assert generator.closed and capturer.closed
    assert result.answer_tokens_per_s > 0 and result.captured_tokens_per_s > 0


def test_a_probe_too_short_for_one_answer_says_so(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Stuck()
    monkeypatch.setattr(probing, "open_generator", lambda *_: engine)
    monkeypatch.setattr(probing, "time", Clock())
    tiny_config.plan.probe_seconds = 10
    with pytest.raises(ConfigError, match=r"plan\.probe_seconds"):
        probing.probe(tiny_config, prepared(4))  # type: ignore[arg-type]
    assert engine.closed
