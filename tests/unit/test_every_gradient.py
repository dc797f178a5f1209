"""Every parameter gets a gradient whatever a micro-batch holds: ZeRO-2 reduces them all, on all ranks, or breaks."""

from __future__ import annotations

import pytest
import torch

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import build_blocks
from dflash2_train.config import RunConfig
from dflash2_train.data import collate
from dflash2_train.objective import Objective, StepOutput
from dflash2_train.target import FrozenHead
from tests.cases import make_drafter

LENGTH, TEACHER = 14, 8
WRITTEN = (3, 7)  # ids of the text


def sample(config: RunConfig, *, labels: int) -> CapturedSample:
    generator = torch.Generator().manual_seed(4)
    width = len(config.drafter.target_layer_ids) * config.target.hidden_size
    return CapturedSample(
        sample_id="s",
        input_ids=torch.randint(*WRITTEN, (LENGTH,), generator=generator).int(),
        loss_mask=torch.arange(LENGTH) >= LENGTH - labels,
        tap_hidden=torch.randn(LENGTH, width, generator=generator).bfloat16(),
        teacher_ids=torch.randint(*WRITTEN, (LENGTH, TEACHER), generator=generator).int(),
        teacher_logprobs=torch.full((LENGTH, TEACHER), -3.0).half(),
        teacher_log_normaliser=torch.zeros(LENGTH),
    )


def play(config: RunConfig, *, labels: int, hits: bool) -> tuple[Objective, StepOutput]:
    table = torch.randn(config.target.vocab_size, config.target.hidden_size, generator=torch.Generator().manual_seed(8))
    head = table.clone()
    # Logits of the text far from 0, so often among the candidates; or 0, below the best of the others.
    head[slice(*WRITTEN)] *= 20.0 if hits else 0.0
    objective = Objective(make_drafter(config), FrozenHead(table, head), config.loss)
    rows = [[sample(config, labels=labels)]]
    batch = collate(rows, anchors_per_document=5, seed=0, epochs=[0]).to(torch.device("cpu"), torch.float32)
    blocks = build_blocks(batch, block_size=config.drafter.block_size, mask_token_id=config.drafter.mask_token_id)
    output = objective(batch, blocks, denominator=torch.tensor(1.0), scale=1.0, selector_ramp=1.0)
    output.loss.backward()
    return objective, output


@pytest.mark.parametrize(("labels", "hits"), [(8, True), (8, False), (1, False), (0, False)])
def test_every_parameter_gets_a_finite_gradient(tiny_config: RunConfig, labels: int, hits: bool) -> None:
    objective, output = play(tiny_config, labels=labels, hits=hits)
    assert labels < 2 or (output.sums.rates()["recall"] > 0) == hits
    missing = [name for name, p in objective.named_parameters() if p.grad is None]
    assert missing == []
    assert all(bool(p.grad.isfinite().all()) for p in objective.parameters() if p.grad is not None)
