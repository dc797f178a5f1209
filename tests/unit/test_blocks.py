"""Anchors, block contents, labels and supervision."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2_train.blocks import BlockBatch, build_blocks, draw_anchors

BLOCK = 5  # K = 4
MASK_ID = 999
TOP = 3


@dataclass
class Rows:
    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    teacher_ids: Tensor
    teacher_logprobs: Tensor
    anchor_positions: Tensor
    anchor_valid: Tensor


def rows_of(documents: list[Tensor], anchors: list[list[int]], padding: int = 0, first_id: int = 100) -> Rows:
    """One packed row of loss masks. The token at row position i has id first_id + i, its teacher row 10 i."""
    length = sum(len(mask) for mask in documents)
    starts = [sum(len(mask) for mask in documents[:index]) for index in range(len(documents))]
    tokens = torch.arange(length)
    positions = [start + anchor for start, own in zip(starts, anchors, strict=True) for anchor in own]
    return Rows(
        input_ids=F.pad(tokens + first_id, (0, padding))[None],
        loss_mask=F.pad(torch.cat(documents), (0, padding))[None],
        position_ids=F.pad(torch.cat([torch.arange(len(mask)) for mask in documents]), (0, padding))[None],
        document_ids=F.pad(
            torch.cat([torch.full((len(mask),), index) for index, mask in enumerate(documents)]), (0, padding), value=-1
        )[None],
        teacher_ids=F.pad(tokens * 10, (0, padding))[None, :, None] + torch.arange(TOP),
        teacher_logprobs=-F.pad(tokens.float(), (0, padding))[None, :, None].expand(1, -1, TOP).contiguous(),
        anchor_positions=torch.tensor([positions]),
        anchor_valid=torch.ones(1, len(positions), dtype=torch.bool),
    )


def mask_of(text: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in text], dtype=torch.bool)


def blocks_of(rows: Rows) -> BlockBatch:
    return build_blocks(rows, block_size=BLOCK, mask_token_id=MASK_ID)


class TestDrawAnchors:
    MASK = mask_of("0" * 5 + "1" * 40)

    def draw(self, mask: Tensor | None = None, **changes: object) -> list[int]:
        arguments = {"limit": 8, "seed": 1, "epoch": 0, "sample_id": "a"} | changes
        return draw_anchors(self.MASK if mask is None else mask, **arguments).tolist()  # type: ignore[arg-type]

    def test_an_anchor_is_a_completion_token_that_a_completion_token_follows(self) -> None:
        assert self.draw(mask_of("001110110100")) == [2, 3, 6]

    def test_no_eligible_position_gives_no_anchor(self) -> None:
        assert self.draw(mask_of("000101")) == []
        assert self.draw(mask_of("")) == []

    def test_at_most_limit_anchors_are_drawn_ascending_and_unique(self) -> None:
        drawn = self.draw()
        assert len(drawn) == 8
        assert drawn == sorted(set(drawn))
        assert all(5 <= anchor <= 43 for anchor in drawn)

    def test_the_draw_repeats_and_depends_on_seed_epoch_and_sample_id_alone(self) -> None:
        first = self.draw()
        torch.manual_seed(1234)
        assert self.draw() == first
        assert self.draw(seed=2) != first
        assert self.draw(epoch=1) != first
        assert self.draw(sample_id="b") != first

    def test_padding_changes_no_anchor(self) -> None:
        assert self.draw(F.pad(self.MASK, (0, 100))) == self.draw()

    def test_every_eligible_position_is_reached_over_epochs(self) -> None:
        seen = {anchor for epoch in range(60) for anchor in self.draw(epoch=epoch)}
        assert seen == set(range(5, 44))

    def test_drawing_leaves_the_global_generator_alone(self) -> None:
        state = torch.get_rng_state()
        self.draw()
        assert torch.equal(torch.get_rng_state(), state)

    def test_wrong_input_is_refused(self) -> None:
        with pytest.raises(ValueError, match="loss_mask"):
            self.draw(torch.ones(4))
        with pytest.raises(ValueError, match="limit"):
            self.draw(limit=0)


class TestBuildBlocks:
    def test_label_of_slot_k_is_the_token_at_a_plus_k(self) -> None:
        blocks = blocks_of(rows_of([mask_of("0" * 3 + "1" * 17)], [[3, 7]], first_id=0))
        assert blocks.target_ids[0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert blocks.predecessor_ids[0].tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]
        assert blocks.supervised.all()

    def test_slot_zero_holds_the_anchor_and_the_rest_the_mask_token(self) -> None:
        blocks = blocks_of(rows_of([mask_of("1" * 12)], [[0, 4]]))
        assert blocks.block_ids[0].tolist() == [[100] + [MASK_ID] * 4, [104] + [MASK_ID] * 4]

    def test_the_teacher_of_slot_k_is_row_a_plus_k_minus_one(self) -> None:
        blocks = blocks_of(rows_of([mask_of("1" * 12)], [[2]]))
        assert blocks.teacher_ids[0, 0, :, 0].tolist() == [20, 30, 40, 50]
        assert blocks.teacher_logprobs[0, 0, :, 0].tolist() == [-2.0, -3.0, -4.0, -5.0]
        assert blocks.teacher_ids.shape == (1, 1, 4, TOP)

    def test_positions_are_counted_in_the_document(self) -> None:
        blocks = blocks_of(rows_of([mask_of("1" * 6), mask_of("1" * 9)], [[1], [3]]))
        assert blocks.block_position_ids[0].tolist() == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]
        assert blocks.block_document_ids[0].tolist() == [0, 1]
        assert blocks.anchor_positions[0].tolist() == [1, 9]

    def test_supervision_stops_at_the_first_unsupervised_label(self) -> None:
        blocks = blocks_of(rows_of([mask_of("111011111")], [[0, 2, 4]]))
        assert blocks.supervised[0].tolist() == [
            [True, True, False, False],  # labels 1, 2, then the gap at 3: what follows it does not count
            [False, False, False, False],
            [True, True, True, True],
        ]

    def test_supervision_stops_at_the_end_of_the_document_and_of_the_row(self) -> None:
        blocks = blocks_of(rows_of([mask_of("1" * 6), mask_of("1" * 7)], [[3], [5]]))
        assert blocks.supervised[0].tolist() == [[True, True, False, False], [True, False, False, False]]

    def test_a_short_reply_counts_only_its_own_labels(self) -> None:
        blocks = blocks_of(rows_of([mask_of("00111")], [[2, 3]], padding=9))
        assert blocks.supervised[0].sum(-1).tolist() == [2, 1]

    def test_padding_blocks_are_never_supervised_and_belong_to_no_document(self) -> None:
        rows = rows_of([mask_of("1" * 12)], [[2, 0]])
        rows.anchor_valid[0, 1] = False
        blocks = blocks_of(rows)
        assert blocks.supervised[0].any(-1).tolist() == [True, False]
        assert blocks.block_document_ids[0].tolist() == [0, -1]
        assert blocks.block_valid[0].tolist() == [True, False]

    def test_unsupervised_slots_carry_no_data(self) -> None:
        blocks = blocks_of(rows_of([mask_of("1" * 6), mask_of("1" * 7)], [[4], []]))
        hidden = ~blocks.supervised
        assert hidden.sum() == 3
        assert (blocks.target_ids[hidden] == 0).all() and (blocks.predecessor_ids[hidden] == 0).all()
        assert (blocks.teacher_ids[hidden] == 0).all() and blocks.teacher_logprobs[hidden].isneginf().all()

    def test_a_document_gives_the_same_blocks_packed_padded_or_alone(self) -> None:
        document = mask_of("0011101111")
        alone = blocks_of(rows_of([document], [[2, 6, 8]]))
        padded = blocks_of(rows_of([document], [[2, 6, 8]], padding=20))
        packed = blocks_of(rows_of([document, mask_of("1" * 9)], [[2, 6, 8], []]))
        for name in [field.name for field in fields(BlockBatch)]:
            assert torch.equal(getattr(padded, name), getattr(alone, name)), name
            assert torch.equal(getattr(packed, name), getattr(alone, name)), name

    def test_rows_of_a_batch_do_not_mix(self) -> None:
        one, two = rows_of([mask_of("1" * 12)], [[2]]), rows_of([mask_of("0" * 4 + "1" * 8)], [[5]], first_id=300)
        both = Rows(**{f.name: torch.cat([getattr(one, f.name), getattr(two, f.name)]) for f in fields(Rows)})
        together, first, second = blocks_of(both), blocks_of(one), blocks_of(two)
        for name in [field.name for field in fields(BlockBatch)]:
            expected = torch.cat([getattr(first, name), getattr(second, name)])
            assert torch.equal(getattr(together, name), expected), name

    def test_a_block_without_drafted_slots_is_refused(self) -> None:
        with pytest.raises(ValueError, match="block_size=1"):
            build_blocks(rows_of([mask_of("111")], [[0]]), block_size=1, mask_token_id=MASK_ID)
