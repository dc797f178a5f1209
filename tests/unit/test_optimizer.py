"""Every parameter is in one group with its factor and decay; without ZeRO the optimizer guards itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dflash2_train.averaging import WeightAverage
from dflash2_train.config import TrainConfig
from dflash2_train.optimizer import ClippedAdamW, build_optimizer, parameter_groups
from tests.drafters import random_drafter


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"output_dir": "x", "steps": 100, "row_tokens": 64, "rows": 2, "lr": 1e-3, **changes})


def groups(**changes: Any) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in parameter_groups(random_drafter(), settings(**changes))}


def test_every_parameter_of_a_drafter_is_in_exactly_one_group() -> None:
    drafter = random_drafter()
    listed = [p for group in parameter_groups(drafter, settings(conv_lr_scale=2.0)) for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(drafter.parameters()))
    assert set(listed) == set(drafter.parameters())


def test_each_part_has_its_own_factor_and_only_matrices_decay() -> None:
    found = groups(weight_decay=0.1, conv_lr_scale=2.0, selector_lr_scale=3.0, gain_lr_scale=4.0, mask_lr_scale=5.0)
    assert {name: group["lr"] / 1e-3 for name, group in found.items()} == pytest.approx(
        {"matrices": 1.0, "conv": 2.0, "selector": 3.0, "codebooks": 3.0, "gains": 4.0, "mask_embedding": 5.0}
    )
    assert {name for name, group in found.items() if group["weight_decay"]} == {"matrices", "conv", "selector"}
    assert len(found["conv"]["params"]) == 2 * 3  # two convolutions in each of three layers
    assert len(found["selector"]["params"]) == 1


def test_parts_with_factor_one_share_the_matrices_buffer() -> None:
    assert list(groups(selector_lr_scale=1.0)) == ["matrices", "codebooks", "gains", "mask_embedding"]


def test_by_default_the_selector_alone_learns_faster() -> None:
    assert {name: group["lr"] / 1e-3 for name, group in groups().items()} == pytest.approx(
        {"matrices": 1.0, "selector": 2.0, "codebooks": 2.0, "gains": 1.0, "mask_embedding": 1.0}
    )


def one_weight(**changes: Any) -> tuple[nn.Linear, ClippedAdamW]:
    module = nn.Linear(3, 1, bias=False)
    optimizer = build_optimizer(module, settings(zero_stage=0, dtype="float32", **changes))
    assert isinstance(optimizer, ClippedAdamW)
    return module, optimizer


def test_without_zero_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module, optimizer = one_weight()
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[1.0, float("nan"), 1.0]])
    optimizer.step()
    assert optimizer.overflow
    assert torch.equal(module.weight, before)
    assert not optimizer.state
    module.weight.grad = torch.ones(1, 3)
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(module.weight, before)


def test_without_zero_gradients_are_clipped_to_the_norm() -> None:
    module, optimizer = one_weight(grad_clip=0.5)
    module.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    optimizer.step()
    assert optimizer._global_grad_norm == pytest.approx(5.0)
    assert float(module.weight.grad.norm()) == pytest.approx(0.5, rel=1e-4)


def test_the_average_follows_its_formula_and_leaves_the_weights_alone() -> None:
    weight = torch.tensor([1.0])
    average = WeightAverage([weight], decay=0.9)
    expected = 1.0
    for update in range(120):
        weight += 1.0
        share = 1 - min(0.9, (1 + update) / (10 + update))
        expected += share * (float(weight) - expected)
        average.update([weight])
    assert float(average.shards[0]) == pytest.approx(expected, rel=1e-5)
    assert float(weight) == 121.0
    assert 105.0 < expected < 115.0  # lags behind by about decay / (1 - decay) = 9 steps
