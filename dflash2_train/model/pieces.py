"""Elementwise work a few rows at a time, in buffers that all pieces share.

Elementwise work is bound by memory. Done for all rows at once, each of its steps writes a fresh tensor of megabytes
that the next one reads back; done for a few rows at a time in the same buffers, what lies between stays in the cache.
On a CPU that saves time and peak memory. A GPU has fused kernels and pays for every launch: it takes all rows.

Arithmetic is done in the dtype of the buffers, fp32 or wider, on copies of what has another dtype: a CPU computes with
mixed dtypes many times slower. The result is written once, which is its one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 18  # of one fp32 buffer; several live at once in the cache


def piece_rows(source: Tensor) -> int:
    """Rows of the first axis that are taken at a time, at least 1; all of them unless ``source`` lies on a CPU."""
    rows = max(1, len(source))
    if source.device.type != "cpu":
        return rows
    pieces = min(rows, -(-source.numel() // PIECE_ELEMENTS))
    return -(-rows // max(1, pieces))  # pieces of nearly the same size


def pieces(source: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of ``source`` and ``others`` along their first axis, as long in all, cut by the size of ``source``."""
    rows = piece_rows(source)
    return zip(*(tensor.split(rows) for tensor in (source, *others)), strict=True)


def piece_buffers(source: Tensor, count: int) -> Tensor:
    """``count`` buffers for pieces of ``source``: [count, rows of a piece, ...] in at least fp32, without values."""
    dtype = torch.promote_types(source.dtype, torch.float32)
    return source.new_empty((count, piece_rows(source), *source.shape[1:]), dtype=dtype)


def place(piece: Tensor, buffer: Tensor) -> Tensor:
    """Where the values of ``piece`` stand in the dtype of ``buffer``: in itself if it has that dtype, else in there."""
    return piece if piece.dtype == buffer.dtype else buffer[: len(piece)]


def widened(piece: Tensor, buffer: Tensor) -> Tensor:
    """``piece`` in the dtype of ``buffer``, copied there unless it has that dtype; not to be written to."""
    return piece if piece.dtype == buffer.dtype else buffer[: len(piece)].copy_(piece)
