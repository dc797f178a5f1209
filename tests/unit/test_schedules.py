"""The learning rate warms up, holds and falls as its name says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dflash2_train.config import TrainConfig
from dflash2_train.config.train import SCHEDULES
from dflash2_train.schedules import rate_factor


def rates(steps: int = 100, **changes: Any) -> list[float]:
    train = TrainConfig(output_dir="x", steps=steps, row_tokens=64, rows=2, final_lr_ratio=0.1, **changes)
    factor = rate_factor(train)
    return [factor(step) for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_warms_up_linearly_to_one_and_ends_at_its_share(schedule: str) -> None:
    values = rates(warmup=0.1, schedule=schedule)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(values) == values[9] == values[10] == 1.0
    assert all(a >= b for a, b in zip(values[10:], values[11:], strict=False))
    assert values[100] == pytest.approx(0.1)


def test_cosine_is_halfway_at_half_the_way_and_flat_at_both_ends() -> None:
    values = rates(warmup=0.1)
    assert values[55] == pytest.approx(0.55)
    assert values[10] - values[11] < 0.001
    assert values[99] - values[100] < 0.001
    assert values[28] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))


def test_linear_falls_by_the_same_at_every_step() -> None:
    values = rates(warmup=0.1, schedule="linear")
    assert [a - b for a, b in zip(values[10:100], values[11:], strict=True)] == pytest.approx([0.01] * 90)


def test_wsd_holds_the_full_rate_until_its_last_share() -> None:
    values = rates(warmup=0.1, schedule="wsd", decay=0.2)
    assert values[9:81] == [1.0] * 72
    assert values[81] < 1.0
    assert values[90] == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_one_step_and_steps_beyond_the_end_have_a_rate(schedule: str) -> None:
    assert rates(steps=1, schedule=schedule, warmup=0.0)[0] == 1.0
    train = TrainConfig(output_dir="x", steps=10, row_tokens=64, rows=2, schedule=schedule, final_lr_ratio=0.0)
    assert rate_factor(train)(1000) == 0.0
