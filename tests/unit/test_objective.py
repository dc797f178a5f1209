"""One global window gives one loss and one gradient, however it is packed or spread."""

from __future__ import annotations

import pytest
import torch

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import BlockBatch
from dflash2_train.config import RunConfig
from dflash2_train.objective import Objective, StepOutput
from tests.objective_case import batch_of, make_objective


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Objective, list[CapturedSample]]:
    return make_objective(tmp_path_factory.mktemp("objective"))


def run(objective: Objective, rows: list[list[CapturedSample]], denominator: torch.Tensor) -> StepOutput:
    batch, blocks = batch_of(rows)
    return objective(batch, blocks, denominator=denominator, scale=1.0, selector_ramp=1.0)


def gradients(objective: Objective, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    objective.zero_grad()
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def test_packed_separate_and_batched_documents_give_the_same_loss_and_gradient(
    made: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    _, objective, samples = made
    packed_rows = [[samples[0], samples[1]], [samples[2]]]
    total = objective.window_weight(batch_of(packed_rows)[1])
    packed = run(objective, packed_rows, total)
    single = [run(objective, [[one]], total) for one in samples]
    torch.testing.assert_close(packed.loss, torch.stack([one.loss for one in single]).sum(), rtol=1e-5, atol=1e-6)
    expected = gradients(objective, [one.loss for one in single])
    found = gradients(objective, [packed.loss])
    assert found.keys() == expected.keys() == dict(objective.named_parameters()).keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_sums_of_micro_batches_add_up_to_those_of_the_whole(
    made: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    _, objective, samples = made
    total = objective.window_weight(batch_of([[one] for one in samples])[1])
    whole = run(objective, [[one] for one in samples], total).sums
    parts = [run(objective, [[one]], total).sums for one in samples]
    assert (parts[0] + parts[1] + parts[2]).rates() == pytest.approx(whole.rates(), rel=1e-5)


def test_frozen_tables_are_no_part_of_the_module_and_get_no_gradient(
    made: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    _, objective, samples = made
    run(objective, [[samples[0]]], torch.tensor(1.0)).loss.backward()
    assert all(name.startswith("drafter.") for name in objective.state_dict())
    assert objective.frozen.head.grad is None
    assert not objective.frozen.head.requires_grad


def test_a_window_without_a_label_keeps_every_parameter_in_the_graph_and_every_metric_name(
    made: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    _, objective, samples = made
    full = run(objective, [[samples[0]]], torch.tensor(1.0))
    batch, blocks = batch_of([[samples[0]]])
    empty = BlockBatch(**{**blocks.__dict__, "supervised": torch.zeros_like(blocks.supervised)})
    output = objective(batch, empty, denominator=torch.tensor(1.0), scale=1.0, selector_ramp=1.0)
    assert output.sums.names() == full.sums.names()
    assert float(output.loss.detach()) == 0.0
    objective.zero_grad()
    output.loss.backward()


def test_injection_changes_the_selector_loss_but_not_the_reported_recall(
    made: tuple[RunConfig, Objective, list[CapturedSample]],
) -> None:
    _, objective, samples = made
    masked = run(objective, [[samples[0]]], torch.tensor(1.0)).sums.rates()
    objective.loss.missing_candidate = "inject"
    injected = run(objective, [[samples[0]]], torch.tensor(1.0)).sums.rates()
    objective.loss.missing_candidate = "mask"
    assert masked["recall"] == injected["recall"] < 1.0
    assert masked["selector_path"] == injected["selector_path"]
    assert masked["selector"] != injected["selector"]
