"""The visibility rule of context keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.masks import context_mask, context_masks

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
    return context_mask(ANCHORS, ANCHOR_DOCUMENTS, VALID, POSITIONS, DOCUMENTS, BLOCK, window)


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
    assert torch.equal(both["full_attention"], masked(None))
    assert torch.equal(both["sliding_attention"], masked(WINDOW))
    assert set(context_masks(["full_attention"], None, **arguments)) == {"full_attention"}
    with pytest.raises(ValueError, match="sliding_window"):
        context_masks(["sliding_attention"], None, **arguments)
