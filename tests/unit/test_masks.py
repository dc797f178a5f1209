"""The visibility rule of context keys, as runs of neighbouring keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.masks import check_packing, context_masks, context_spans

BLOCK = 4
WINDOW = 6
# Row 0: documents of 9 and 5 tokens, 2 of padding. Row 1: one document of 16.
POSITIONS = torch.tensor([[*range(9), *range(5), 0, 0], [*range(16)]])
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 5 + [-1] * 2, [0] * 16])
# The last block of each row is padding, with values that would see something if they counted.
ANCHORS = torch.tensor([[0, 3, 8, 2, 4, 1], [0, 1, 7, 12, 15, 9]])  # in the document
ANCHOR_DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
VALID = torch.tensor([[True] * 5 + [False]] * 2)


def masked(window: int | None) -> Tensor:
    return context_spans(ANCHORS, ANCHOR_DOCUMENTS, VALID, POSITIONS, DOCUMENTS, BLOCK, window).dense()


def naive(window: int | None) -> Tensor:
    rows, blocks, width, tokens = 2, ANCHORS.shape[1], BLOCK, POSITIONS.shape[1]
    out = torch.zeros(rows, blocks, width, tokens, dtype=torch.bool)
    for row in range(rows):
        for block in range(blocks):
            anchor = int(ANCHORS[row, block])
            for slot in range(width):
                for key in range(tokens):
                    position = int(POSITIONS[row, key])
                    out[row, block, slot, key] = (
                        bool(VALID[row, block])
                        and int(DOCUMENTS[row, key]) == int(ANCHOR_DOCUMENTS[row, block])
                        and position < anchor
                        and (window is None or anchor + slot - position < window)
                    )
    return out


@pytest.mark.parametrize("window", [None, WINDOW, BLOCK, 100])
def test_the_mask_equals_a_naive_double_loop(window: int | None) -> None:
    expected = naive(window)
    assert expected.any() and not expected.all()
    assert torch.equal(masked(window).expand_as(expected), expected)


def test_full_attention_is_stored_once_for_all_slots() -> None:
    assert masked(None).shape == (2, 6, 1, 16)
    assert masked(WINDOW).shape == (2, 6, BLOCK, 16)


def test_the_anchor_itself_and_all_after_it_are_hidden() -> None:
    visible = masked(None)[1, 2, 0]  # anchor at 7
    assert visible.tolist() == [True] * 7 + [False] * 9


def test_later_slots_see_less_of_the_far_context_through_a_window() -> None:
    visible = masked(WINDOW)[1, 3]  # anchor at 12: slot i sees 12 + i - j < 6
    assert [row.nonzero().squeeze(-1).tolist() for row in visible] == [
        [7, 8, 9, 10, 11],
        [8, 9, 10, 11],
        [9, 10, 11],
        [10, 11],
    ]


def test_padding_blocks_see_nothing_even_of_padding() -> None:
    for window in (None, WINDOW):
        assert not masked(window)[:, -1].any()
        assert not masked(window)[0, :, :, -2:].any()


def test_there_is_one_mask_per_layer_type_that_occurs() -> None:
    arguments = {
        "anchor_positions_local": ANCHORS,
        "block_document_ids": ANCHOR_DOCUMENTS,
        "block_valid": VALID,
        "position_ids": POSITIONS,
        "document_ids": DOCUMENTS,
        "block_size": BLOCK,
    }
    both = context_masks(["sliding_attention", "full_attention", "sliding_attention"], WINDOW, **arguments)
    assert set(both) == {"sliding_attention", "full_attention"}
    assert torch.equal(both["full_attention"].dense(), masked(None))
    assert torch.equal(both["sliding_attention"].dense(), masked(WINDOW))
    assert set(context_masks(["full_attention"], None, **arguments)) == {"full_attention"}
    with pytest.raises(ValueError, match="sliding_window"):
        context_masks(["sliding_attention"], None, **arguments)


def test_the_spans_of_random_packed_rows_equal_a_naive_double_loop() -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for _ in range(40):
        opening, documents = draw(3), [1 + draw(8) for _ in range(1 + draw(3))]
        names = torch.randperm(5, generator=generator)[: len(documents)].tolist()  # in no order
        positions = [0] * opening + [position for length in documents for position in range(length)] + [0] * draw(3)
        ids = [-1] * opening + [name for name, length in zip(names, documents, strict=True) for _ in range(length)]
        ids += [-1] * (len(positions) - len(ids))
        blocks = 6
        anchors = torch.randint(0, 12, (1, blocks), generator=generator)  # some behind the end of their document
        owners = torch.randint(-1, 5, (1, blocks), generator=generator)  # some documents are not in the row
        valid = torch.rand(1, blocks, generator=generator) > 0.2
        window = (None, BLOCK, WINDOW)[draw(3)]
        row = (anchors, owners, valid, torch.tensor([positions]), torch.tensor([ids]))
        check_packing(row[3], row[4])
        found = context_spans(*row, BLOCK, window).dense().expand(-1, -1, BLOCK, -1)
        for block in range(blocks):
            for slot in range(BLOCK):
                anchor, owner = int(anchors[0, block]), int(owners[0, block])
                expected = [
                    bool(valid[0, block])
                    and name == owner >= 0
                    and position < anchor
                    and (window is None or anchor + slot - position < window)
                    for position, name in zip(positions, ids, strict=True)
                ]
                assert found[0, block, slot].tolist() == expected


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        ([0, 1, 3, 4], [0, 0, 0, 0]),  # a gap
        ([0, 1, 0, 1], [0, 0, 0, 0]),  # two documents under one name
        ([0, 1, 0, 2], [0, 0, 1, 0]),  # torn apart
        ([0, 0, 1, 0], [0, -1, 0, -1]),  # torn apart by padding
    ],
)
def test_rows_that_are_not_packed_are_refused(positions: list[int], documents: list[int]) -> None:
    check_packing(torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.int64))
    good, bad = torch.arange(4), torch.tensor(positions)
    with pytest.raises(ValueError, match="row 1: .* neighbours"):
        check_packing(torch.stack([good, bad]), torch.tensor([[0] * 4, documents]))


def test_a_row_without_tokens_shows_nothing() -> None:
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    check_packing(nothing, nothing)
    one = torch.zeros(1, 1, dtype=torch.int64)
    spans = context_spans(one, one, torch.ones(1, 1, dtype=torch.bool), nothing, nothing, BLOCK, None)
    assert spans.dense().shape == (1, 1, 1, 0) and spans.first.item() == spans.stop.item()
