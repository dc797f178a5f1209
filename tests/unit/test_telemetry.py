"""What a log line says of speed, work and memory is right on any number of ranks, and the guide names all of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.flops import StepWork, count_work, step_flops
from dflash2_train.objective import Objective
from dflash2_train.telemetry.catalogue import METRICS, described, markdown_table
from dflash2_train.telemetry.gradients import is_due, with_gradient_shares
from dflash2_train.telemetry.memory import memory_values
from dflash2_train.telemetry.peaks import PEAKS, named_peak, peak_tflops
from dflash2_train.telemetry.recorder import StepRecorder, median_row_norm
from tests.objective_case import batch_of, make_objective

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Objective, list[CapturedSample]]:
    return make_objective(tmp_path_factory.mktemp("telemetry"))


def recorder(
    case: tuple[RunConfig, Objective, list[CapturedSample]], clock: Clock, *, world_size: int = 1
) -> StepRecorder:
    return StepRecorder(case[0], case[1], device=CPU, world_size=world_size, clock=clock)


def alone(value: Tensor) -> Tensor:
    return value


def test_rates_are_over_training_time_without_what_was_saved_or_validated_meanwhile(
    case: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    clock = Clock()
    one = recorder(case, clock)
    batch, blocks = batch_of([[case[2][0], case[2][1]]])
    work = StepWork.from_counts(count_work(batch.document_ids, blocks, case[1].drafter.shape).tolist())
    for _ in range(2):
        one.count([batch], [blocks])
        clock.now += 1.0
    with one.paused():
        clock.now += 50.0
    values = one.values(0.5, alone)
    assert values["tokens_per_second"] == pytest.approx(work.tokens, rel=1e-5)  # two windows in two seconds
    assert values["blocks_per_second"] == pytest.approx(work.blocks, rel=1e-5)
    assert values["tflops"] == pytest.approx(step_flops(case[1].drafter.shape, work).model / 1e12, rel=1e-5)
    assert values["data_wait"] == 0.25


def test_each_look_starts_anew(case: tuple[RunConfig, Objective, list[CapturedSample]]) -> None:
    clock = Clock()
    one = recorder(case, clock)
    batch, blocks = batch_of([[case[2][0]]])
    one.count([batch], [blocks])
    clock.now += 1.0
    first = one.values(0.5, alone)
    one.count([batch], [blocks])
    clock.now += 2.0
    second = one.values(0.5, alone)
    assert second["tokens_per_second"] == pytest.approx(first["tokens_per_second"] / 2, rel=1e-3)
    assert (first["data_wait"], second["data_wait"]) == (0.5, 0.0)


def test_two_ranks_do_twice_the_work_at_the_same_utilisation(
    case: tuple[RunConfig, Objective, list[CapturedSample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case[0].train, "peak_tflops", 1e-6)
    clock = Clock()
    batch, blocks = batch_of([[case[2][0]]])
    single, double = recorder(case, clock), recorder(case, clock, world_size=2)
    for one in (single, double):
        one.count([batch], [blocks])
    clock.now += 1.0
    expected, found = single.values(0.25, alone), double.values(0.25, lambda value: 2 * value)
    assert found["tokens_per_second"] == pytest.approx(2 * expected["tokens_per_second"], rel=1e-5)
    for name in ("data_wait", "tflops", "utilisation", "hardware_utilisation"):
        assert found[name] == expected[name]
    assert expected["utilisation"] > 0


def test_utilisation_is_absent_where_no_peak_is_known(
    case: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    clock = Clock()
    one = recorder(case, clock)
    clock.now += 1.0
    assert not {"utilisation", "hardware_utilisation"} & one.values(0.0, alone).keys()


def test_a_stated_peak_goes_before_the_table_and_fp32_has_none() -> None:
    assert peak_tflops(CPU, torch.bfloat16, None) is None
    assert peak_tflops(CPU, torch.float32, 3.5) == 3.5
    assert peak_tflops(torch.device("cuda"), torch.float32, None) is None


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(gpu: str, peak: float | None) -> None:
    assert named_peak(gpu) == peak


def test_no_entry_of_the_peaks_is_hidden_by_an_earlier_one() -> None:
    for entry in PEAKS:
        assert named_peak(" ".join(("NVIDIA", *entry.words))) == entry.tflops


def test_the_mask_vector_is_measured_against_the_tables_usual_row(
    case: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    table = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0], [0.0, 20.0]])
    assert median_row_norm(table) == 10.0
    values = recorder(case, Clock()).values(0.0, alone)
    norm = float(case[1].drafter.mask_embedding.detach().norm())
    assert values["mask_embedding/norm"] == pytest.approx(norm)
    assert values["mask_embedding/ratio"] == pytest.approx(norm / median_row_norm(case[1].frozen.embedding))


def test_memory_of_a_cpu_run_is_its_resident_size_and_nothing_of_cuda() -> None:
    values = memory_values(CPU)
    assert values.keys() == {"memory/rss", "memory/rss_peak"}
    assert 0.01 < values["memory/rss"] <= values["memory/rss_peak"] * 1.01


@pytest.mark.parametrize(("every", "log_every"), [(1, 1), (10, 1), (10, 4), (3, 10), (10, 10)])
def test_gradients_are_measured_once_for_each_interval_and_on_logged_steps_alone(every: int, log_every: int) -> None:
    due = [step for step in range(1, 121) if is_due(step, every=every, log_every=log_every)]
    assert all(step % log_every == 0 for step in due)
    assert len(due) == 120 // max(every, log_every)
    assert not any(is_due(step, every=0, log_every=log_every) for step in range(1, 121))


def test_squared_norms_become_norms_and_shares_and_all_else_stays() -> None:
    rates = {"loss": 2.0, "gradient_square/ce": 9.0, "gradient_square/kl": 1.0, "gradient_square/selector": 0.0}
    assert with_gradient_shares(rates) == {
        "loss": 2.0,
        "gradient_norm/ce": 3.0,
        "gradient_norm/kl": 1.0,
        "gradient_norm/selector": 0.0,
        "gradient_share/ce": 0.75,
        "gradient_share/kl": 0.25,
        "gradient_share/selector": 0.0,
    }
    assert with_gradient_shares({"loss": 1.0}) == {"loss": 1.0}
    assert with_gradient_shares({"gradient_square/ce": math.inf}) == {}, "JSON has no infinity"


def test_the_guide_holds_the_catalogue_as_it_is(repo_root: Path) -> None:
    guide = (repo_root / "dflash2_train/telemetry/README.md").read_text()
    assert markdown_table() in guide, "paste dflash2_train.telemetry.catalogue.markdown_table() into the guide"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ce", "ce"),
        ("ce/slot7", "ce/{k}"),
        ("ce/slot0", None),
        ("accepted/slot11", "accepted/{k}"),
        ("lr/mask_embedding", "lr/{group}"),
        ("gradient_share/kl", "gradient_share/{part}"),
        ("validation/acceptance_length", None),
        ("cex", None),
    ],
)
def test_a_name_is_found_in_the_catalogue_or_is_not_the_trainers(name: str, entry: str | None) -> None:
    found = described(name)
    assert (None if found is None else found.name) == entry
    assert sum(metric.matches(name) for metric in METRICS) == (entry is not None)


@pytest.mark.parametrize(("key", "value"), [("gradient_share_every", -1), ("peak_tflops", 0.0)])
def test_settings_that_make_no_sense_are_refused(tiny_config: RunConfig, key: str, value: float) -> None:
    setattr(tiny_config.train, key, value)
    with pytest.raises(ConfigError, match=rf"train\.{key}"):
        tiny_config.check()
