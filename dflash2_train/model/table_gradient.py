"""The gradient of a large table of which a step uses few rows.

Autograd's dense gradient of a [V, H] table is filled with zeros, on fresh memory, and then written at the rows that
were used. Here a CPU's gradient is a mapping of its own: the system gives it zeros, and memory only for the pages that
are written. Of a codebook over 154,880 tokens a step may touch a tenth, so the rest costs neither time nor memory.

Letters: N slots, C chosen table rows each, U different ones of them, V rows of the table, H features.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor
from torch.nn import functional as F

PIECE_ELEMENTS = 1 << 19  # of table rows gathered or summed at once; 2 MiB in fp32 stay in a core's cache


def table_gradient(table: Tensor, ids: Tensor, states: Tensor, weights: Tensor | None = None) -> Tensor:
    """Row v is the sum of ``weights[n, c] states[n]`` over all ``ids[n, c] = v``, in an order that never changes.

    Args:
        table: [V, H], for its shape, dtype and device.
        ids: [N, C] int64.
        states: [N, H].
        weights: [N, C]; None stands for ones.

    Returns:
        [V, H] in the dtype of ``table``; sums are made in at least fp32 on a CPU.
    """
    if table.device.type != "cpu":  # there index_add is atomic, so its order is anyone's
        products = states.unsqueeze(1) if weights is None else weights.unsqueeze(-1) * states.unsqueeze(1)  # [N, C, H]
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(products.to(table.dtype), ids, len(table), -1, False)
        return gradient
    gradient = _zeros(table)
    work = torch.promote_types(states.dtype, torch.float32)
    states, weights = states.to(work), None if weights is None else weights.to(work).flatten()
    sorted_ids, order = ids.flatten().sort(stable=True)  # [N * C]
    rows, counts = sorted_ids.unique_consecutive(return_counts=True)  # [U]
    starts = counts.cumsum(0) - counts
    slots = order.div(ids.shape[1], rounding_mode="floor")
    step = max(1, PIECE_ELEMENTS // table.shape[1])
    bounds = [0, *starts[step::step].tolist(), len(order)]
    for number, (piece, offsets) in enumerate(zip(rows.split(step), starts.split(step), strict=True)):
        span = slice(bounds[number], bounds[number + 1])
        factors = None if weights is None else weights[order[span]]
        sums = F.embedding_bag(slots[span], states, offsets - span.start, mode="sum", per_sample_weights=factors)
        gradient.index_copy_(0, piece, sums.to(table.dtype))
    return gradient


def _zeros(table: Tensor) -> Tensor:
    """Zeros like ``table`` that take no memory before they are written, and are given back to the system at the end."""
    size = max(1, table.numel() * table.element_size())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=table.dtype, count=table.numel()).view(table.shape)
