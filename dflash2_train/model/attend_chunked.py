"""Attention of blocks a few at a time, over the keys that these few can see. Exact, on any device.

Blocks of a row come sorted by anchor, so what neighbours see is nearly the same run of keys. A chunk takes neighbours
while their scores fit a byte budget and while at most a third of them would be hidden; its scores cover the
union of their spans, the softmax joins them with the scores of the own blocks, and the few columns that some slot
of the chunk does not see get a bias of -inf there. For one long document that halves the work of the dense path, for
many packed ones it leaves a small part of it.

Weights that take little are kept for the backward pass. Others, of long contexts, are computed again there, chunk by
chunk in one buffer small enough for the cache, so what is held never grows with A * S.

Letters: B rows, A blocks a row, W block size, S context tokens, M key heads, R query heads a key head, D head size;
c blocks and L keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dflash2_train.budgets import KEPT_WEIGHT_BYTES, round_up
from dflash2_train.masks import ContextSpans
from dflash2_train.model.attend_dense import KeysValues

MAX_WASTE = 1.5  # scores computed, over those that some slot sees
# Columns of a product are rounded up, from where it costs little: in fp32 a product of 452 columns takes as long as one
# of 600. Fewer distinct sizes also mean fewer prepared kernels (see dflash2_train.shapes).
COLUMNS_MULTIPLE, COLUMNS_ROUNDED_FROM = 16, 128


class _Cut(NamedTuple):
    """Blocks ``start .. stop`` of a row, and the union ``first_key .. stop_key`` of their spans."""

    row: int
    start: int
    stop: int
    first_key: int
    stop_key: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Neighbouring blocks of a row that are computed together."""

    row: int
    blocks: slice  # c of the row's A
    keys: slice  # L of the row's S
    # Columns of the chunk that not every slot sees, and their bias [c, W | 1, columns]: -inf where hidden, else 0.
    ragged: tuple[tuple[slice, Tensor], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks, c."""
        return int(self.blocks.stop - self.blocks.start)

    @property
    def num_keys(self) -> int:
        """Keys, L."""
        return int(self.keys.stop - self.keys.start)


class ChunkedAttend:
    """Attention by chunks.

    Args:
        spans: what each slot sees.
        block_size: W.
        rows_per_block: M * W * R, score rows that one block has.
        chunk_bytes: scores of a chunk before its columns are rounded, bytes; at least one block is taken.
        dtype: of queries and keys.
    """

    def __init__(
        self, spans: ContextSpans, *, block_size: int, rows_per_block: int, chunk_bytes: int, dtype: torch.dtype
    ) -> None:
        columns = chunk_bytes // (rows_per_block * dtype.itemsize)  # c * (L + W) at most
        self.chunks = [_chunk(spans, cut, common, dtype) for cut, common in _cuts(spans, block_size, columns)]

        self._sizes = [rows_per_block * chunk.num_blocks * (chunk.num_keys + block_size) for chunk in self.chunks]
        self.keeps_weights = self.score_elements * dtype.itemsize <= KEPT_WEIGHT_BYTES

    @property
    def score_elements(self) -> int:
        """Scores that a forward pass computes."""
        return sum(self._sizes)

    @property
    def buffer_elements(self) -> int:
        """Scores of the largest chunk."""
        return max(self._sizes, default=0)

    def rooms(self, buffer: Tensor) -> Iterator[Tensor]:
        """Every chunk's part of a flat buffer: one behind the other while there is room, then from its start again."""
        start = 0
        for size in self._sizes:
            start = start if start + size <= len(buffer) else 0
            yield buffer[start : start + size]
            start += size

    def __call__(self, queries: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        out: Tensor = _ChunkedAttention.apply(queries, *context, *block, self)  # type: ignore[no-untyped-call]
        return out


def _cuts(spans: ContextSpans, block_size: int, columns: int) -> Iterator[tuple[_Cut, tuple[int, int]]]:
    """Cut every row. Also yields the keys ``first .. stop`` that all slots of the chunk see; none if first >= stop."""
    # One transfer from the device for all rows: first key of the first and of the last slot, stop.
    table = torch.stack([spans.first[..., 0], spans.first[..., -1], spans.stop]).tolist()
    for row, (first, last_first, stop) in enumerate(zip(*table, strict=True)):
        for cut in _cut_row(row, first, stop, block_size, columns):
            members = slice(cut.start, cut.stop)
            yield _rounded(cut, block_size, spans.num_keys), (max(last_first[members]), min(stop[members]))


def _rounded(cut: _Cut, width: int, num_keys: int) -> _Cut:
    """With a few keys more, hidden as others are, so that the columns L + W of a product become an even number."""
    columns = cut.stop_key - cut.first_key + width
    if columns < COLUMNS_ROUNDED_FROM:
        return cut
    return cut._replace(stop_key=min(num_keys, cut.stop_key + round_up(columns, COLUMNS_MULTIPLE) - columns))


def _cut_row(row: int, first: Sequence[int], stop: Sequence[int], width: int, columns: int) -> Iterator[_Cut]:
    """Neighbours together, while the budget and ``MAX_WASTE`` allow; blocks without context apart from the rest."""
    chunk: _Cut | None = None
    seen = 0  # columns that the blocks of the chunk see, summed
    for index, (low, high) in enumerate(zip(first, stop, strict=True)):
        if chunk is not None:
            grown = _Cut(row, chunk.start, index + 1, min(chunk.first_key, low), max(chunk.stop_key, high))
            area = (grown.stop - grown.start) * (grown.stop_key - grown.first_key + width)
            same_kind = (low == high) == (chunk.first_key == chunk.stop_key)
            if same_kind and low == high:
                grown, area = chunk._replace(stop=index + 1), (index + 1 - chunk.start) * width
            if same_kind and area <= columns and area <= MAX_WASTE * (seen + high - low + width):
                chunk, seen = grown, seen + high - low + width
                continue
            yield chunk
        chunk, seen = _Cut(row, index, index + 1, low, high), high - low + width
    if chunk is not None:
        yield chunk


def _chunk(spans: ContextSpans, cut: _Cut, common: tuple[int, int], dtype: torch.dtype) -> Chunk:
    """A cut with the bias of its ragged columns: those before and behind what all slots see."""
    low, high = cut.first_key, cut.stop_key
    begin, end = (min(max(common[0], low), high), min(max(common[1], low), high))
    ragged = [(low, high)] if begin >= end else [(low, begin), (end, high)]
    first = spans.first[cut.row, cut.start : cut.stop]  # [c, W | 1]
    stop = spans.stop[cut.row, cut.start : cut.stop, None]  # [c, 1]
    biases = []
    for left, right in ragged:
        if left < right:
            keys = torch.arange(left, right, device=first.device)
            hidden = (keys < first.unsqueeze(-1)) | (keys >= stop.unsqueeze(-1))  # [c, W | 1, columns]
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            biases.append((slice(left - low, right - low), bias))
    return Chunk(row=cut.row, blocks=slice(cut.start, cut.stop), keys=slice(low, high), ragged=tuple(biases))


class _ChunkedAttention(torch.autograd.Function):
    """Inputs as ``Attend`` takes them; the plan's chunks, one after the other."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, plan: Any
    ) -> Tensor:
        own = _per_block(queries, own_keys.transpose(-1, -2))  # [B, M, A, W * R, W]: scores, then weights
        out = torch.empty_like(queries)
        kept = plan.keeps_weights and any(ctx.needs_input_grad)
        buffer = queries.new_empty(plan.score_elements if kept else plan.buffer_elements)
        for chunk, room in zip(plan.chunks, plan.rooms(buffer), strict=True):
            weights = _weights(chunk, _rows(chunk, queries), _columns(chunk, keys, own), own, room)
            _put_own(chunk, own, weights)
            _put(chunk, out, torch.bmm(weights, _columns(chunk, values, own)))
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, *((buffer, own) if kept else ()))
        ctx.plan = plan
        return out.add_(_per_block(own, own_values).view_as(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, *kept = ctx.saved_tensors
        plan, grad_out = ctx.plan, grads[0].contiguous()
        buffer, own = kept or (
            queries.new_empty(plan.buffer_elements),
            _per_block(queries, own_keys.transpose(-1, -2)),
        )
        grad_own = _per_block(grad_out, own_values.transpose(-1, -2))  # by the weights, then by the scores
        grad_queries = torch.empty_like(queries)
        # [B, M, D, S]: a transposed product reads the weights along their rows, and sums of chunks stay in fp32.
        total = torch.promote_types(queries.dtype, torch.float32)
        grad_keys, grad_values = (torch.zeros_like(part.transpose(2, 3), dtype=total) for part in (keys, values))
        grad_buffer = queries.new_empty(plan.buffer_elements)
        for chunk, room in zip(plan.chunks, plan.rooms(buffer), strict=True):
            rows, grad_rows, columns = _rows(chunk, queries), _rows(chunk, grad_out), _columns(chunk, keys, own)
            if kept:
                weights = room.view(*rows.shape[:2], -1)
            else:
                weights = _weights(chunk, rows, columns, own, room)
                _put_own(chunk, own, weights)
            grad = _joint(chunk, grad_rows, _columns(chunk, values, own), grad_own, grad_buffer[: room.numel()])
            grad_scores = torch._softmax_backward_data(grad, weights, -1, grad.dtype, grad_input=grad)
            _put_own(chunk, grad_own, grad_scores)
            _put(chunk, grad_queries, torch.bmm(grad_scores, columns))
            for into, left, right in ((grad_values, grad_rows, weights), (grad_keys, rows, grad_scores)):
                product = torch.bmm(left.transpose(1, 2), right)  # [M, D, L + W]
                into[chunk.row, ..., chunk.keys].add_(product[..., : chunk.num_keys])
        grad_queries += _per_block(grad_own, own_keys).view_as(queries)
        return (
            grad_queries,
            grad_keys.transpose(2, 3).to(keys.dtype),
            grad_values.transpose(2, 3).to(values.dtype),
            grad_own.transpose(-1, -2) @ queries.flatten(3, 4),
            own.transpose(-1, -2) @ grad_out.flatten(3, 4),
            None,
        )


def _per_block(left: Tensor, right: Tensor) -> Tensor:
    """[B, M, A, n, k] (or [B, M, A, W, R, k]) times [B, M, A, k, m], block by block: [B, M, A, n, m]."""
    blocks = right.shape[:3]
    product = torch.bmm(left.reshape(blocks.numel(), -1, left.shape[-1]), right.flatten(0, 2))
    return product.unflatten(0, blocks)


def _of(chunk: Chunk, source: Tensor) -> Tensor:
    """The chunk's blocks of [B, M, A, ...] as [M, c, ...], a view."""
    return source[chunk.row, :, chunk.blocks]


def _put(chunk: Chunk, into: Tensor, part: Tensor) -> None:
    """Write what a chunk has found to its blocks in [B, M, A, ...]."""
    place = _of(chunk, into)
    place.copy_(part.view_as(place))


def _rows(chunk: Chunk, source: Tensor) -> Tensor:
    """The chunk's score rows of [B, M, A, W, R, D] as [M, c * W * R, D], contiguous."""
    return _of(chunk, source).flatten(1, 3).contiguous()


def _columns(chunk: Chunk, source: Tensor, own: Tensor) -> Tensor:
    """The chunk's keys of [B, M, S, D] and W rows of zeros, [M, L + W, D].

    The zeros stand for the own block, whose keys differ from block to block: products over all L + W columns then
    need no cut-outs, which bf16 kernels would copy first, and the own part is written or added apart.
    """
    return F.pad(source[chunk.row, :, chunk.keys], (0, 0, 0, own.shape[-1]))


def _joint(chunk: Chunk, rows: Tensor, columns: Tensor, own: Tensor, room: Tensor) -> Tensor:
    """``[ rows columns^T | own ]`` in ``room``: [M, c * W * R, L + W]."""
    joint = room.view(*rows.shape[:2], columns.shape[1])
    torch.bmm(rows, columns.transpose(1, 2), out=joint)
    joint[..., chunk.num_keys :].copy_(_of(chunk, own).flatten(1, 2))
    return joint


def _put_own(chunk: Chunk, own: Tensor, joint: Tensor) -> None:
    """Write the last W columns of a chunk to their blocks in [B, M, A, W * R, W]."""
    part = _of(chunk, own)
    part.copy_(joint[..., chunk.num_keys :].view_as(part))


def _weights(chunk: Chunk, rows: Tensor, columns: Tensor, own: Tensor, room: Tensor) -> Tensor:
    """Softmax of a chunk over context and own block, [M, c * W * R, L + W]."""
    joint = _joint(chunk, rows, columns, own, room)
    for ragged, bias in chunk.ragged:  # [c, W | 1, columns]
        slots = joint.view(len(joint), *bias.shape[:1], own.shape[-1], -1, joint.shape[-1])  # [M, c, W, R, L + W]
        slots[..., ragged].add_(bias.unsqueeze(2))
    return torch.softmax(joint, -1, out=joint)
