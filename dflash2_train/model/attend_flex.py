"""Attention of blocks through FlexAttention, for CUDA: one fused kernel that skips all tiles nobody sees.

    queries  [B, M, A * W * R, D]      the R query heads of a key head lie side by side: a tile of 128 rows then spans
                                       few blocks, and its keys are a short run
    keys     [ S context | A * W own ] each part filled up to whole tiles

The tiles are listed straight from the spans: a tile of queries needs the context tiles between the first and the last
key that one of its rows sees, in full where all rows see all of it, and those that hold its blocks' own keys. No mask
of queries times keys is built on the way; what is built is one flag a tile, and its size is known before.

Rows that fill up the last tile repeat the last block's view and are cut from the result, so nothing depends on them.

Letters: B rows, A blocks a row, W block size, S context tokens, M key heads, R query heads a key head, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash2_train.config import ConfigError
from dflash2_train.masks import ContextSpans
from dflash2_train.model.attend_dense import KeysValues

TILE = 128  # queries and keys of a tile
MAX_TABLE_BYTES = 1 << 30  # of the tile lists
_BYTES_PER_TILE = 40  # two lists and their transposes as int32, and the int64 order they are sorted by


def table_bytes(num_rows: int, query_rows: int, num_keys: int, own_keys: int) -> int:
    """Estimate of the memory that the tile lists of one layer type take while they are built, bytes."""
    tiles = _whole_tiles(query_rows) * (_whole_tiles(num_keys) + _whole_tiles(own_keys))
    return num_rows * tiles * _BYTES_PER_TILE


class FlexAttend:
    """Attention by FlexAttention.

    Args:
        spans: what each slot sees.
        block_size: W.
        heads_per_key: R.
        compiled: False runs the unfused form (tests on CPU; no gradient there).

    Raises:
        ConfigError: the tile lists would need more than ``MAX_TABLE_BYTES``.
    """

    def __init__(self, spans: ContextSpans, *, block_size: int, heads_per_key: int, compiled: bool = True) -> None:
        rows, blocks = spans.stop.shape
        self._block_rows = block_size * heads_per_key
        self._num_queries = blocks * self._block_rows
        self._num_keys, self._num_own = spans.num_keys, blocks * block_size
        needed = table_bytes(rows, self._num_queries, self._num_keys, self._num_own)
        if needed > MAX_TABLE_BYTES:
            raise ConfigError(
                f"train.attention='flex': the tile lists of {rows} rows with {blocks} blocks over {self._num_keys} "
                f"keys take about {needed >> 20} MiB, limit {MAX_TABLE_BYTES >> 20} MiB. Use fewer anchors or tokens "
                "a row, or train.attention=chunked."
            )
        self.block_mask = self._block_mask(spans, block_size, heads_per_key)
        self._attention = _compiled() if compiled else cast(Callable[..., Any], flex_attention)

    def __call__(self, queries: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        rows = _pad(queries.flatten(2, 4), self._num_queries)  # [B, M, A * W * R up to whole tiles, D]
        keys, values = (
            torch.cat([_pad(seen, self._num_keys), _pad(own.flatten(2, 3), self._num_own)], 2)
            for seen, own in zip(context, block, strict=True)
        )
        out: Tensor = self._attention(rows, keys, values, block_mask=self.block_mask, scale=1.0)
        return out[:, :, : self._num_queries].reshape(queries.shape)

    def _block_mask(self, spans: ContextSpans, block_size: int, heads_per_key: int) -> BlockMask:
        first = spans.first.expand(-1, -1, block_size).repeat_interleave(heads_per_key, -1).flatten(1)  # [B, A * W * R]
        stop = spans.stop.repeat_interleave(self._block_rows, 1)
        first, stop = (_repeat_last(part, _whole_tiles(part.shape[1]) * TILE).int() for part in (first, stop))
        partial, full = _tiles(first, stop, self._num_keys)  # [B, query tiles, context tiles]
        own = self._own_tiles(block_size, first.device).expand(len(first), -1, -1)
        partial, full = torch.cat([partial, own], -1), torch.cat([full, torch.zeros_like(own)], -1)
        context_rows, block_rows, last = _whole_tiles(self._num_keys) * TILE, self._block_rows, self._last_block

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            on_context = (k >= first[b, q]) & (k < stop[b, q])
            on_own = (k >= context_rows) & ((k - context_rows) // block_size == (q // block_rows).clamp(max=last))
            return on_context | on_own

        return BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(full),
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=(first.shape[1], partial.shape[-1] * TILE),
        )

    @property
    def _last_block(self) -> int:
        return self._num_queries // self._block_rows - 1

    def _own_tiles(self, block_size: int, device: torch.device) -> Tensor:
        """Which tiles of own keys hold keys of the blocks of each query tile, bool [1, query tiles, own tiles]."""
        start = torch.arange(_whole_tiles(self._num_queries), device=device)[:, None] * TILE
        blocks = (torch.cat([start, start + TILE - 1], 1) // self._block_rows).clamp(max=self._last_block)
        first, last = blocks[:, :1] * block_size // TILE, ((blocks[:, 1:] + 1) * block_size - 1) // TILE
        tiles = torch.arange(_whole_tiles(self._num_own), device=device)
        return ((tiles >= first) & (tiles <= last)).unsqueeze(0)


def _tiles(first: Tensor, stop: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Context tiles that some row of a query tile may see, and those that all of its rows see whole.

    Args:
        first: [B, query tiles * TILE] first key of each row.
        stop: the same, behind its last key.
        num_keys: S.

    Returns:
        partial and full, bool [B, query tiles, context tiles]; no tile is both.
    """
    first, stop = first.unflatten(1, (-1, TILE)), stop.unflatten(1, (-1, TILE))
    empty = first >= stop
    nobody = num_keys + TILE  # behind every tile
    low = first.masked_fill(empty, nobody).amin(-1, keepdim=True)  # [B, query tiles, 1]
    high = stop.masked_fill(empty, 0).amax(-1, keepdim=True)
    begin = torch.arange(_whole_tiles(num_keys), device=first.device) * TILE
    end = begin + TILE
    any_row = (begin < high) & (end > low)
    every_row = (begin >= first.amax(-1, keepdim=True)) & (end <= stop.amin(-1, keepdim=True))
    return any_row & ~every_row, every_row


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Flags [B, query tiles, key tiles] as counts and indices, the flagged ones first; one head axis for all heads."""
    order = flags.int().argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def _whole_tiles(length: int) -> int:
    return -(-length // TILE)


def _pad(source: Tensor, length: int) -> Tensor:
    """[B, M, length, D] with zeros up to whole tiles."""
    missing = _whole_tiles(length) * TILE - length
    return F.pad(source, (0, 0, 0, missing)) if missing else source


def _repeat_last(source: Tensor, length: int) -> Tensor:
    """[B, n] with its last column repeated up to ``length``."""
    return torch.cat([source, source[:, -1:].expand(-1, length - source.shape[1])], 1)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # fullgraph: without it, too many shapes would make torch fall back to the unfused form without an error.
    return torch.compile(flex_attention, fullgraph=True)
