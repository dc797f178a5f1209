"""The operations that are reported are those that torch counts in a step, and work is what the masks let through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import BlockBatch, build_blocks
from dflash2_train.config import TrainConfig
from dflash2_train.data import PackedBatch
from dflash2_train.flops import StepFlops, StepWork, count_work, step_flops, visible_pairs
from dflash2_train.layer_execution import apply_layer_options
from dflash2_train.masks import context_masks
from dflash2_train.objective import Objective
from dflash2_train.shapes import ROWS_MULTIPLE, round_up
from tests.objective_case import MASK_ID, TEACHER_TOP_K, batch_of, make_objective, pack

PADDED = ("head", "selector")  # products whose rows are filled up
SHORT = 3  # of a drafter for blocks of 4: no path is walked for the record, which is no part of a step's work


@pytest.fixture
def case(tmp_path: Path) -> tuple[Objective, list[CapturedSample]]:
    config, objective, samples = make_objective(tmp_path)
    objective.drafter.attention = "dense"
    return objective, samples


def product_flops(states: list[int], head: list[int], *_: object, **__: object) -> int:
    """Of oneDNN's product of states [M, H] and head [n, H], which torch's counter does not know."""
    return 2 * states[0] * states[1] * head[0]


def counted_flops(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> int:
    """Of forward and backward, by torch's dispatcher."""
    objective.zero_grad()
    products = {torch.ops.mkldnn._linear_pointwise: product_flops}
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        objective(batch, blocks, denominator=torch.tensor(1.0), scale=1.0, selector_ramp=1.0).loss.backward()
    return int(counter.get_total_flops())


def executed_work(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> StepWork:
    """What the dense path computes: padding and hidden keys as well."""
    rows, anchors, width = blocks.block_ids.shape
    seen = rows * anchors * width * (batch.input_ids.shape[1] + width)
    return StepWork(
        tokens=batch.input_ids.numel(),
        blocks=rows * anchors,
        slots=rows * anchors * width,
        labels=int(blocks.supervised.sum()),
        pairs=objective.drafter.shape.num_layers * seen,
    )


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_makes_exactly_the_operations_that_are_reported(
    case: tuple[Objective, list[CapturedSample]], detach: bool, checkpointing: bool
) -> None:
    objective, samples = case
    objective.loss.detach_unary = detach
    if checkpointing:
        train = TrainConfig(output_dir="x", steps=1, row_tokens=8, rows=1, gradient_checkpointing=True)
        apply_layer_options(objective.drafter.layers, train, torch.device("cpu"))
    batch = pack([[samples[0], samples[1]], [samples[2]]])
    blocks = build_blocks(batch, block_size=SHORT, mask_token_id=MASK_ID)
    work = executed_work(objective, batch, blocks)
    options = {"detach_unary": detach, "gradient_checkpointing": checkpointing}
    flops = step_flops(objective.drafter.shape, work, **options)
    padded = step_flops(
        objective.drafter.shape, replace(work, labels=round_up(int(work.labels), ROWS_MULTIPLE)), **options
    )
    filling = sum(more[part] - one[part] for more, one in both_ways(padded, flops) for part in PADDED)
    # The gold token's and the teacher's share of the gradient is added from their own rows of the head; it is no more
    # than (1 + T) / V of a product with the head and is not reported.
    places = 2 * int(work.labels) * (1 + TEACHER_TOP_K) * objective.drafter.shape.hidden_size
    assert counted_flops(objective, batch, blocks) == flops.hardware + filling + places
    assert (flops.hardware > flops.model) is checkpointing


def both_ways(more: StepFlops, one: StepFlops) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [(more.forward, one.forward), (more.backward, one.backward)]


def test_pairs_are_those_that_the_mask_of_each_layer_lets_through(
    case: tuple[Objective, list[CapturedSample]],
) -> None:
    objective, samples = case
    shape = objective.drafter.shape
    assert set(shape.layer_types) == {"full_attention", "sliding_attention"}
    batch, blocks = batch_of([[samples[0], samples[1]], [samples[2]]])
    width = blocks.block_ids.shape[-1]
    masks = context_masks(
        shape.layer_types,
        shape.sliding_window,
        anchor_positions_local=blocks.block_position_ids[..., 0],
        block_document_ids=blocks.block_document_ids,
        block_valid=blocks.block_valid,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        block_size=width,
    )
    own = int(blocks.block_valid.sum()) * width * width
    seen = 0
    for kind in shape.layer_types:
        mask = masks[kind].dense() & blocks.block_valid[..., None, None]
        seen += int(mask.expand(-1, -1, width, -1).sum()) + own
    assert int(visible_pairs(blocks, shape)) == seen


def test_work_counts_no_padding_and_adds_up_over_micro_batches(case: tuple[Objective, list[CapturedSample]]) -> None:
    objective, samples = case
    shape = objective.drafter.shape
    batch, blocks = batch_of([[samples[0], samples[1]], [samples[2]]])
    assert bool((batch.document_ids < 0).any()), "the case needs padding"
    whole = StepWork.from_counts(count_work(batch.document_ids, blocks, shape).tolist())
    assert whole.tokens == sum(len(sample.input_ids) for sample in samples)
    assert whole.slots == whole.blocks * blocks.block_ids.shape[-1]
    assert whole.labels == int(blocks.supervised.sum())
    parts = [batch_of([row]) for row in ([samples[0], samples[1]], [samples[2]])]
    summed = sum(count_work(part.document_ids, cut, shape) for part, cut in parts)
    assert StepWork.from_counts(summed.tolist()) == whole  # type: ignore[union-attr]


def test_operations_are_linear_in_the_work(case: tuple[Objective, list[CapturedSample]]) -> None:
    shape = case[0].drafter.shape
    one = StepWork(tokens=3, blocks=1, slots=4, labels=3, pairs=40)
    two = StepWork(tokens=6, blocks=2, slots=8, labels=6, pairs=80)
    assert step_flops(shape, two).model == 2 * step_flops(shape, one).model
