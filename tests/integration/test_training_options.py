"""With every option of the objective on, a run still equals itself on two ranks and after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash2_train.config import RunConfig
from tests.integration.trainings import curve, run, variant, weights

OPTIONS = {
    "position_weights": "dpace",
    "kl_kind": "total_variation",
    "missing_candidate": "curriculum",
    "inject_share": 0.5,
    "selector_denominator": "hits",
    "sampled_predecessor": 0.8,
    "sampled_predecessor_ramp": 0.2,
    "served_anchor_share": 0.5,
}


def with_options(config: RunConfig) -> RunConfig:
    for key, value in OPTIONS.items():
        setattr(config.loss, key, value)
    config.train.short_block_size, config.train.short_block_share, config.train.short_block_random = 2, 0.5, True
    return config


@pytest.mark.slow
def test_every_option_at_once_gives_the_same_run_on_two_ranks_and_after_a_stop(
    base: RunConfig,
    tmp_path: Path,
) -> None:
    straight = with_options(variant(base, tmp_path / "one"))
    run(straight)
    stopped = with_options(variant(base, tmp_path / "stopped", max_seconds=0.001))
    run(stopped, expect=143)
    stopped.train.max_seconds = None
    run(stopped)
    assert curve(stopped) == curve(straight)
    two = with_options(variant(base, tmp_path / "two", rows=1))
    run(two, ranks=2)
    for one, other in zip(curve(straight), curve(two), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    expected, again, found = weights(straight), weights(stopped), weights(two)
    for name in expected:
        assert torch.equal(expected[name], again[name])
        torch.testing.assert_close(expected[name], found[name], rtol=1e-3, atol=2e-5)
