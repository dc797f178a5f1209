"""Elementwise work by pieces."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.model.pieces import PIECE_ELEMENTS, piece_buffers, piece_rows, pieces, place, widened


@pytest.mark.parametrize("rows", [0, 1, 7, 1000, 3001])
def test_pieces_cover_every_row_once_and_fit_the_buffers(rows: int) -> None:
    source, other = torch.zeros(rows, 600), torch.arange(rows)
    (buffer,) = piece_buffers(source, 1)
    cut = list(pieces(source, other))
    assert torch.cat([part for _, part in cut]).tolist() == list(range(rows))
    assert all(len(first) == len(second) <= len(buffer) for first, second in cut)


def test_pieces_hold_few_elements_and_hardly_differ_in_size() -> None:
    source = torch.zeros(PIECE_ELEMENTS // 100, 251)
    lengths = [len(part) for (part,) in pieces(source)]
    assert lengths == [piece_rows(source)] * 2 + [lengths[-1]]
    assert max(lengths) * 251 <= PIECE_ELEMENTS + 251
    assert max(lengths) - min(lengths) < len(lengths)


def test_a_row_larger_than_a_piece_is_taken_alone() -> None:
    assert [len(part) for (part,) in pieces(torch.zeros(3, 2, PIECE_ELEMENTS))] == [1, 1, 1]


def test_another_device_takes_all_rows_at_once() -> None:
    assert piece_rows(torch.zeros(9, 2 * PIECE_ELEMENTS, device="meta")) == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_are_widened_in_a_buffer_only_where_they_must_be(dtype: torch.dtype) -> None:
    source = torch.randn(5, 3).to(dtype)
    (buffer,) = piece_buffers(source, 1)
    wide = widened(source, buffer)
    assert buffer.dtype == wide.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(wide, source.to(wide.dtype))
    own = dtype != torch.bfloat16
    assert (wide.data_ptr() == source.data_ptr()) == (place(source, buffer).data_ptr() == source.data_ptr()) == own
