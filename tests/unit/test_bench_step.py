"""The step benchmark: it still runs, and its bound counts what a step needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.step_ours import loss_of, make_batch, make_objective, unfused_loss
from tests.bench.train_step import WORKLOADS

TINY = replace(WORKLOADS["tiny"], vocab=512, tokens=128, anchors=16, intermediate=128)


@pytest.mark.parametrize("loss", [loss_of, unfused_loss])
def test_the_bound_is_a_little_less_than_what_a_step_computes(loss: object) -> None:
    device = torch.device("cpu")
    objective = make_objective(TINY, device, torch.float32)
    batch, blocks = make_batch(TINY, TINY.anchors, device, torch.float32)
    with FlopCounterMode(display=False) as counter:
        value = loss(objective, batch, blocks)  # type: ignore[operator]
        value.backward()
    assert value.isfinite()
    needed = TINY.forward_backward_flops()
    assert 0.7 * counter.get_total_flops() < needed < 1.05 * counter.get_total_flops()
