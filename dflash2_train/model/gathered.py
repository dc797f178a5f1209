"""Products of states with chosen rows of a large table, the rows gathered a few at a time.

The head's rows of 16 candidates a slot, or the successor codebook's, are [N, C, H]: more than all else that a slot
needs, and fresh memory for it costs more than the products. So a piece of it is gathered into one small buffer,
multiplied and forgotten, in the forward pass and again in the backward pass.

Letters: N rows, C chosen table rows each, V rows of the table, H features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.model.table_gradient import PIECE_ELEMENTS, table_gradient


def gathered_dots(states: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """``dots[n, c] = states[n] . table[ids[n, c]]``, differentiable in ``states`` and ``table``.

    Args:
        states: [N, H]; products are made in its dtype, sums of their gradients in at least fp32.
        table: [V, H].
        ids: [N, C] int64.

    Returns:
        [N, C] in at least fp32.
    """
    dots: Tensor = _GatheredDots.apply(states, table, ids)  # type: ignore[no-untyped-call]
    return dots


def gathered_sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """``sums[n] = sum over c of weights[n, c] table[ids[n, c]]``, without a gradient.

    Args:
        weights: [N, C]; products and sums are made in its dtype.
        table: [V, H].
        ids: [N, C] int64.

    Returns:
        [N, H] in the dtype of ``weights``.
    """
    sums = weights.new_empty(len(ids), table.shape[1])
    for piece, rows in _gathered(table, ids, weights.dtype):
        sums[piece] = torch.bmm(weights[piece].unsqueeze(1), rows).squeeze(1)  # [m, 1, C] @ [m, C, H]
    return sums


def gathered_rows(table: Tensor, ids: Tensor) -> Tensor:
    """``table[ids]``, differentiable in ``table``.

    Args:
        table: [V, H].
        ids: [N] int64.

    Returns:
        [N, H] in the dtype of ``table``.
    """
    rows: Tensor = _GatheredRows.apply(table, ids)  # type: ignore[no-untyped-call]
    return rows


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(table, ids)
        return table.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        table, ids = ctx.saved_tensors
        return table_gradient(table, ids.unsqueeze(1), slope), None


class _GatheredDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        dots = torch.empty(ids.shape, dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        for piece, rows in _gathered(table, ids, states.dtype):
            dots[piece] = torch.bmm(rows, states[piece].unsqueeze(-1)).squeeze(-1)  # [m, C, H] @ [m, H, 1]
        ctx.save_for_backward(states, table, ids)
        return dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, table, ids = ctx.saved_tensors
        by_states, by_table = ctx.needs_input_grad[:2]
        states_gradient = gathered_sums(slope, table, ids).to(states.dtype) if by_states else None
        return states_gradient, table_gradient(table, ids, states, slope) if by_table else None, None


def _gathered(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the N rows, and the table rows [m, C, H] of each in ``dtype``, valid until the next piece.

    The last of several begins early enough to be as long as the others (see :mod:`dflash2_train.shapes`), so some rows
    come twice.
    """
    table = table.detach()
    pieces = _pieces(ids, table.shape[1])
    if len(pieces) > 1:
        pieces[-1] = slice(len(ids) - pieces[0].stop, len(ids))
    size = (ids[pieces[0]].numel(), table.shape[1]) if pieces else (0, 0)  # of the longest
    buffer = torch.empty(size, dtype=table.dtype, device=table.device)
    cast = buffer if dtype == table.dtype else torch.empty_like(buffer, dtype=dtype)
    for piece in pieces:
        chosen = ids[piece]  # [m, C]
        count = chosen.numel()
        rows = torch.index_select(table, 0, chosen.flatten(), out=buffer[:count])  # [m * C, H]
        if cast is not buffer:
            rows = cast[:count].copy_(rows)
        yield piece, rows.view(*chosen.shape, -1)


def _pieces(ids: Tensor, features: int) -> list[slice]:
    count, chosen = ids.shape
    step = max(1, PIECE_ELEMENTS // max(1, chosen * features))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
