"""Anchors moved to where a server starts its blocks: along the served chain, whatever they are packed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data_gen.cache.format import CapturedSample
from dflash2_train.config import LossConfig
from dflash2_train.data import PackedBatch
from dflash2_train.losses import Moment
from dflash2_train.objective import Objective
from dflash2_train.runner.propose import DraftProposer
from dflash2_train.served_anchors import move_anchors
from tests.drafters import as_head
from tests.objective_case import BLOCK_SIZE, make_objective, pack

PROMPT = 3
ACCEPTED = [0, 3, 1, 3, 2, 0, 1, 3, 2]  # of each round of the chain that the text is made of
MOMENT = Moment(step=3, steps=10, seed=4)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Objective, list[CapturedSample]]:
    _, objective, samples = make_objective(tmp_path_factory.mktemp("served"))
    return objective, samples


@pytest.fixture
def objective(case: tuple[Objective, list[CapturedSample]]) -> Iterator[Objective]:
    """Moves every anchor, by one round."""
    case[0].loss = LossConfig(served_anchor_share=1.0, served_anchor_hops=1)
    yield case[0]


@pytest.fixture
def samples(case: tuple[Objective, list[CapturedSample]]) -> list[CapturedSample]:
    return case[1]


def served_chain(objective: Objective, like: CapturedSample, name: str) -> tuple[CapturedSample, list[int]]:
    """A document whose text is what serving this drafter commits, with the accepted counts of ``ACCEPTED``, and the
    positions at which its blocks start. Drafts come from the runner, not from the training path."""
    length = PROMPT + 1 + sum(ACCEPTED) + len(ACCEPTED) + 4
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(length, like.tap_hidden.shape[1], generator=generator)
    ids = torch.randint(3, 90, (length,), generator=generator)
    start, starts = PROMPT, [PROMPT]
    for accepted in ACCEPTED:
        proposer = DraftProposer(
            objective.drafter,
            embedding_weight=objective.frozen.embedding,
            head=as_head(objective.frozen.head),
            num_drafted=BLOCK_SIZE - 1,
            capacity=length + BLOCK_SIZE,
        )
        with torch.no_grad():
            proposer.start(0, taps[:start])
            drafts = proposer.propose([int(ids[start])], [start]).draft_ids[0]
        ids[start + 1 : start + 1 + accepted] = drafts[:accepted]
        if accepted < len(drafts):  # the target's own token, another than the draft
            ids[start + 1 + accepted] = (int(drafts[accepted]) + 1) % 90
        start += accepted + 1
        starts.append(start)
    sample = replace(
        like,
        sample_id=name,
        input_ids=ids.to(like.input_ids.dtype),
        loss_mask=torch.arange(length) >= PROMPT,
        tap_hidden=taps,
        teacher_ids=like.teacher_ids[:1].expand(length, -1),
        teacher_logprobs=like.teacher_logprobs[:1].expand(length, -1),
        teacher_log_normaliser=like.teacher_log_normaliser[:1].expand(length),
    )
    return sample, starts


def anchored(batch: PackedBatch, anchors: list[int]) -> PackedBatch:
    return replace(
        batch, anchor_positions=torch.tensor([anchors]), anchor_valid=torch.ones(1, len(anchors), dtype=torch.bool)
    )


def anchors_of(batch: PackedBatch) -> list[list[int]]:
    rows = zip(batch.anchor_positions, batch.anchor_valid, strict=True)
    return [positions[valid].tolist() for positions, valid in rows]


def move(objective: Objective, batch: PackedBatch, moment: Moment = MOMENT) -> PackedBatch:
    return move_anchors(objective, batch, block_size=BLOCK_SIZE, moment=moment)


@pytest.mark.parametrize("hops", [1, 2, 4])
def test_every_hop_moves_an_anchor_to_the_next_block_that_the_server_would_start(
    objective: Objective, samples: list[CapturedSample], hops: int
) -> None:
    document, starts = served_chain(objective, samples[0], "chain")
    objective.loss.served_anchor_hops = hops
    for place in range(len(starts) - hops):
        batch = anchored(pack([[document]]), [starts[place]])
        assert anchors_of(move(objective, batch)) == [[starts[place + hops]]]


def test_anchors_that_meet_are_kept_once(objective: Objective, samples: list[CapturedSample]) -> None:
    document, starts = served_chain(objective, samples[0], "chain")
    objective.loss.served_anchor_hops = 1
    batch = anchored(pack([[document]]), [starts[0], starts[1], starts[0]])
    assert anchors_of(move(objective, batch)) == [[starts[1], starts[2]]]


def test_moved_anchors_do_not_depend_on_what_they_are_packed_with(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    document, _ = served_chain(objective, samples[0], "chain")
    objective.loss = LossConfig(served_anchor_share=0.5, served_anchor_hops=2)
    alone = [anchors_of(move(objective, pack([[one]])))[0] for one in (samples[1], document)]
    packed = anchors_of(move(objective, pack([[samples[1], document], [document]])))
    offset = len(samples[1].input_ids)
    assert packed == [[*alone[0], *(anchor + offset for anchor in alone[1])], alone[1]]


def test_a_share_of_zero_changes_nothing_and_a_share_moves_about_that_many(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    document, _ = served_chain(objective, samples[0], "chain")
    batch = anchored(pack([[document]]), list(range(PROMPT, PROMPT + 12)))
    objective.loss.served_anchor_share = 0.0
    assert move(objective, batch) is batch
    objective.loss.served_anchor_share = 0.5
    sizes = [len(set(anchors_of(move(objective, batch, replace(MOMENT, seed=n)))[0])) for n in range(20)]
    results = {tuple(anchors_of(move(objective, batch, replace(MOMENT, seed=n)))[0]) for n in range(20)}
    assert len(results) > 10  # other seeds choose other anchors
    assert 4 <= sum(sizes) / len(sizes) < 12
    assert anchors_of(move(objective, batch)) == anchors_of(move(objective, batch, replace(MOMENT, step=9)))


def test_an_anchor_without_room_behind_it_stays_and_padding_stays_padding(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    rows = [[samples[1], samples[2]], [samples[0]]]
    batch = pack(rows, anchors=40)
    moved = move(objective, batch)
    ends = torch.tensor([len(samples[1].input_ids), len(samples[1].input_ids) + len(samples[2].input_ids)])
    for row, anchors in enumerate(anchors_of(moved)):
        assert anchors == sorted(set(anchors))
        for anchor in anchors:
            assert moved.loss_mask[row, anchor] and moved.loss_mask[row, anchor + 1]
            assert moved.document_ids[row, anchor] == moved.document_ids[row, anchor + 1]
    last = anchors_of(moved)[0]
    assert int(ends[0]) - 2 in last  # the last anchor of a document has one label and nowhere to go
    assert len(last) <= len(anchors_of(batch)[0])


def test_moving_touches_neither_gradients_nor_the_global_generator(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    state = torch.get_rng_state()
    objective.zero_grad()
    move(objective, pack([samples]))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in objective.parameters())
