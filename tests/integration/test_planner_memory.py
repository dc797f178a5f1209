"""The planner's memory against real training steps; ``tests/bench/bench_planner.py`` shows more cases."""

from __future__ import annotations

import pytest

from dflash2_train.planning.fit import device_timeline
from tests.bench.bench_planner import CASES, measured, planned_steps, setting_of

TOLERANCE = 0.1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_is_within_a_tenth_of_the_peak_of_real_steps(ranks: int) -> None:
    case = CASES["smollm2_cpu"]
    peak = max(result["steps"] for result in measured(case, ranks, steps=3, threads=1))
    planned = planned_steps(device_timeline(setting_of(case, ranks)), case)
    assert planned == pytest.approx(peak, rel=TOLERANCE)
