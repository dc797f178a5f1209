"""Keys and values of rows of unequal length, in buffers that are allocated once and never copied.

Row r keeps its tokens at places 0..length_r - 1 of its buffers, whatever the other rows hold. A block of S new tokens
is written behind them, at length_r..length_r + S - 1, and what a rejected draft left there is written over by the next
block: a rollback is a smaller number, nothing else. A place equals the token's position, so that the model's own mask
rules (causal, sliding window) hold unchanged, row by row; ``runner.row_attention`` applies them.

Prompts are prefilled one row at a time, without padding. Buffers start at zero and not empty: masked places have the
weight 0, and 0 times an uninitialised infinity would be no number.

Letters: B rows, M key heads, S new tokens, D head size, L places that a forward looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

SLIDING = "sliding_attention"


class RowPlaces:
    """Where the tokens of the next forward go: one row from the start (prefill), or a block behind every row.

    Args:
        num_rows: B.
        capacity: places a row, a rejected block included.
        device: of the target's input.
        static: look at all places in every block and keep every tensor's address, as CUDA graphs need.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device, *, static: bool = False) -> None:
        self.capacity, self.static = capacity, static
        self.lengths = [0] * num_rows
        self.prefill_row: int | None = None
        self.width = 0  # S of the block
        self.length_ids = torch.zeros(num_rows, dtype=torch.long, device=device)  # [B], the lengths for the masks
        self.rows = torch.arange(num_rows, device=device)[:, None]  # [B, 1]
        self.positions = torch.zeros(num_rows, 0, dtype=torch.long, device=device)  # [B, S] of the block

    @property
    def aligned(self) -> bool:
        """Whether all rows are equally long, so that a block is one slice."""
        return not self.static and min(self.lengths) == max(self.lengths)

    @property
    def num_places(self) -> int:
        """Places that hold anything once the block is written."""
        return self.capacity if self.static else max(self.lengths) + self.width

    def start_prefill(self, row: int) -> None:
        """The next forward is the whole prompt of ``row``."""
        self.prefill_row = row

    def start_block(self, width: int) -> None:
        """The next forward is a block of ``width`` tokens behind every row."""
        self.prefill_row, self.width = None, width
        self.length_ids.copy_(torch.tensor(self.lengths))
        if self.positions.shape[1] != width:
            self.positions = self.length_ids.new_zeros(len(self.lengths), width)
        torch.add(self.length_ids[:, None], torch.arange(width, device=self.rows.device), out=self.positions)

    def keep(self, indices: Tensor) -> None:
        """Drop all rows but ``indices``."""
        self.lengths = [self.lengths[index] for index in indices.tolist()]
        self.length_ids = self.length_ids[: len(indices)]
        self.rows = self.rows[: len(indices)]
        self.positions = self.positions[: len(indices)]


class RowLayer(CacheLayerMixin):
    """One attention layer's buffers [B, M, capacity, D]; ``window`` None = full attention."""

    is_compileable = True
    is_croppable = True

    def __init__(self, places: RowPlaces, window: int | None) -> None:
        super().__init__()
        self._places = places
        self._window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for all rows, from the first row's prompt."""
        num_rows, capacity = len(self._places.lengths), self._places.capacity
        self.keys = key_states.new_zeros(num_rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(num_rows, value_states.shape[1], capacity, value_states.shape[3])
        if self._places.static:  # CUDA graphs write to these, and would copy them otherwise
            torch._dynamo.mark_static_address(self.keys)
            torch._dynamo.mark_static_address(self.values)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [B, M, S, D] and return what the block looks at, [B, M, L, D]; in a prefill the prompt's own."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        row = self._places.prefill_row
        if row is not None:
            self.keys[row, :, : key_states.shape[2]] = key_states[0]
            self.values[row, :, : value_states.shape[2]] = value_states[0]
            return key_states, value_states
        self._store(self.keys, key_states)
        self._store(self.values, value_states)
        start, stop = self._first_place(), self._places.num_places
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def _store(self, buffer: Tensor, states: Tensor) -> None:
        if self._places.aligned:
            start = self._places.lengths[0]
            buffer[:, :, start : start + states.shape[2]] = states
        else:
            rows, positions = self._places.rows.to(buffer.device), self._places.positions.to(buffer.device)
            buffer[rows, :, positions] = states.transpose(1, 2)  # [B, S, M, D]

    def _first_place(self) -> int:
        """The first place inside any row's window."""
        if self._window is None or self._places.static:
            return 0
        return max(0, min(self._places.lengths) - self._window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of places that the next forward looks at, and the first of them."""
        if self._places.prefill_row is not None:
            return query_length, 0
        start = self._first_place()
        return self._places.num_places - start, start

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return 0 if self._places.prefill_row is not None else max(self._places.lengths)

    def get_max_length(self) -> int:
        """Places a row."""
        return self._places.capacity

    def keep(self, indices: Tensor) -> None:
        """Drop all rows but ``indices``."""
        if self.is_initialized:
            self.keys = self.keys.index_select(0, indices.to(self.keys.device))
            self.values = self.values.index_select(0, indices.to(self.values.device))


class RowCache(Cache):
    """A transformers cache of :class:`RowLayer`, all at the same places."""

    def __init__(self, windows: Sequence[int | None], places: RowPlaces) -> None:
        super().__init__(layers=[RowLayer(places, window) for window in windows])
        self.places = places

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Positions before the next forward's first token: 0 in a prefill, else a tensor [B]."""
        return 0 if self.places.prefill_row is not None else self.places.length_ids

    def keep(self, indices: Tensor) -> None:
        """Drop all rows but ``indices``."""
        for layer in self.layers:
            assert isinstance(layer, RowLayer)
            layer.keep(indices)
        self.places.keep(indices)


def attention_windows(config: PreTrainedConfig) -> list[int | None] | None:
    """The window of every layer, None = full attention; None as a whole if some layer keeps anything else."""
    windows: list[int | None] = []
    kinds = config.get_text_config(decoder=True).to_dict().get("layer_types") or []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer and (not kinds or kinds[index] == SLIDING):
            windows.append(int(layer.sliding_window))
        else:
            return None
    return windows
