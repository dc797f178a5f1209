"""The target on a batch of prompts: its caches, its logits for the rows that matter, its tap states.

Two kinds, chosen by :func:`open_session`:

- :class:`RowSession`: one forward for all rows, over a :class:`~dflash2_train.runner.row_cache.RowCache`. For targets
  whose layers all hold full or sliding attention and run on scaled dot-product attention.
- :class:`SeparateSession`: a transformers cache a row, one forward a row. For everything else that can be rolled back:
  indexed attention (GLM), recurrent layers, other attention implementations.

Both take a prompt a row (:meth:`prefill`), then blocks of equal width behind every row (:meth:`forward`), each followed
by :meth:`commit`, which says how many tokens of the block stay. The taps are what the decoder layers hand on
(``dflash2_train.streams``). Lengths are asserted, since a wrong rollback decodes on without an error.

Letters: B rows, S block tokens, V vocabulary, T taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from dflash2_train.config import ConfigError
from dflash2_train.runner.recurrent import Call, LayerState, RecurrentRollback
from dflash2_train.runner.row_attention import row_attention, supports_row_attention
from dflash2_train.runner.row_cache import RowCache, RowPlaces, attention_windows
from dflash2_train.streams import TapRecorder

STATELESS = ("moe", "mlp")  # kinds of layers without attention, which get an empty recurrent cache
CROPPED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)  # transformers rolls them back


class TargetRows(NamedTuple):
    """The target's output of a forward."""

    logits: Tensor  # [B, S, V] of a block, [1, 1, V] of a prompt; the model's dtype
    tap_hidden: Tensor  # [B, S, T*H] of every token, taps ascending; T = 0 without taps


class TargetSession(Protocol):
    """What the decoding loop asks of the target. A context manager: hooks live exactly as long as it is open."""

    static: bool  # rows can't be dropped

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of every row."""

    @property
    def device(self) -> torch.device:
        """Where the model takes its ids."""

    def __enter__(self) -> TargetSession: ...

    def __exit__(self, *_: object) -> None: ...

    def prefill(self, row: int, ids: Tensor) -> TargetRows:
        """Run a whole prompt [S] of an empty row; logits of the last token only."""

    def forward(self, block_ids: Tensor) -> TargetRows:
        """Run a block [B, S] behind every row."""

    def commit(self, num_kept: Sequence[int]) -> None:
        """Keep the first ``num_kept`` tokens of the last block, per row; forget the others."""

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Drop all rows but ``indices``, ascending."""


class _Model:
    """The model with its tap hooks."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[int], *, compiled: bool = False) -> None:
        self._taps = tuple(taps)
        self.recorder = TapRecorder(model, taps) if taps else None
        self._model = model
        self._block_model: Any = torch.compile(model, mode="reduce-overhead", dynamic=False) if compiled else model
        self._compiled = compiled

    def run(self, ids: Tensor, *, num_logit_rows: int, block: bool, **inputs: Any) -> TargetRows:
        if self._compiled and block:
            torch.compiler.cudagraph_mark_step_begin()
        model = self._block_model if block else self._model
        output = model(input_ids=ids, use_cache=True, logits_to_keep=num_logit_rows, **inputs)
        if self.recorder is None:
            return TargetRows(output.logits, output.logits.new_empty(*ids.shape, 0))
        streams = self.recorder.take()
        device = streams[self._taps[-1]].device  # layers may lie on several
        return TargetRows(output.logits, torch.cat([streams[tap].to(device) for tap in self._taps], dim=-1))


class RowSession:
    """All rows in one forward (:class:`TargetSession`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Sequence[int | None],
        *,
        num_rows: int,
        capacity: int,
        taps: Sequence[int] = (),
        static: bool = False,
        compiled: bool = False,
    ) -> None:
        self.static = static
        self._model = model
        self._runner = _Model(model, taps, compiled=compiled)
        self._places = RowPlaces(num_rows, capacity, model.device, static=static)
        self._cache = RowCache(windows, self._places)
        self._stack = ExitStack()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of every row."""
        return self._places.lengths

    @property
    def device(self) -> torch.device:
        """Where the model takes its ids."""
        return self._model.device

    def __enter__(self) -> RowSession:
        self._stack.enter_context(row_attention(self._model))
        if self._runner.recorder is not None:
            self._stack.enter_context(self._runner.recorder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prefill(self, row: int, ids: Tensor) -> TargetRows:
        """See :class:`TargetSession`."""
        assert self._places.lengths[row] == 0, f"row {row} is not empty"
        self._places.start_prefill(row)
        rows = self._runner.run(ids[None], num_logit_rows=1, block=False, past_key_values=self._cache)
        self._places.lengths[row] = ids.shape[0]
        return rows

    def forward(self, block_ids: Tensor) -> TargetRows:
        """See :class:`TargetSession`."""
        width = block_ids.shape[1]
        assert max(self.lengths) + width <= self._places.capacity, "target cache: the block does not fit"
        self._places.start_block(width)
        return self._runner.run(
            block_ids,
            num_logit_rows=width,
            block=True,
            position_ids=self._places.positions,
            past_key_values=self._cache,
        )

    def commit(self, num_kept: Sequence[int]) -> None:
        """See :class:`TargetSession`."""
        assert all(0 <= kept <= self._places.width for kept in num_kept), f"{list(num_kept)} of {self._places.width}"
        self._places.lengths = [length + kept for length, kept in zip(self.lengths, num_kept, strict=True)]

    def keep_rows(self, indices: Sequence[int]) -> None:
        """See :class:`TargetSession`."""
        assert not self.static, "a static cache keeps its rows"
        self._cache.keep(torch.tensor(indices, device=self._places.rows.device))


class _SeparateRow:
    """One row's cache and what is needed to undo its last block."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.before: dict[int, LayerState] = {}  # recurrent states before the block
        self.calls: dict[int, Call] = {}  # what the recurrent modules were fed in it

    def crop(self, num_removed: int) -> None:
        """Forget the last tokens of every attention layer; sliding ones also shed what has left their window."""
        for layer in self.cache.layers:
            if not isinstance(layer, LinearAttentionLayer):
                layer.crop(-num_removed)


class SeparateSession:
    """A cache and a forward a row (:class:`TargetSession`).

    Raises:
        ConfigError: the model has layers of a kind that can't be rolled back.
    """

    static = False

    def __init__(self, model: PreTrainedModel, *, num_rows: int, taps: Sequence[int] = ()) -> None:
        self._model = model
        self._runner = _Model(model, taps)
        self._rows = [_SeparateRow(_separate_cache(model)) for _ in range(num_rows)]
        layers = self._rows[0].cache.layers
        kinds = model.config.get_text_config(decoder=True).to_dict().get("layer_types") or [""] * len(layers)
        recurrent = [
            index
            for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
            if isinstance(layer, LinearAttentionLayer) and kind not in STATELESS
        ]
        self._rollback = RecurrentRollback(model, recurrent)
        self._has_recurrent = bool(recurrent)
        self._lengths = [0] * num_rows
        self._width = 0
        self._stack = ExitStack()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of every row."""
        return self._lengths

    @property
    def device(self) -> torch.device:
        """Where the model takes its ids."""
        return self._model.device

    def __enter__(self) -> SeparateSession:
        self._stack.enter_context(self._rollback.recording())
        if self._runner.recorder is not None:
            self._stack.enter_context(self._runner.recorder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prefill(self, row: int, ids: Tensor) -> TargetRows:
        """See :class:`TargetSession`."""
        assert self.lengths[row] == 0, f"row {row} is not empty"
        state = self._rows[row]
        rows = self._runner.run(ids[None], num_logit_rows=1, block=False, past_key_values=state.cache)
        self._rollback.take_calls()  # a prompt is never undone
        state.crop(0)
        self._advance(row, ids.shape[0])
        return rows

    def forward(self, block_ids: Tensor) -> TargetRows:
        """See :class:`TargetSession`."""
        self._width = block_ids.shape[1]
        outputs = []
        for row, ids in zip(self._rows, block_ids, strict=True):
            if self._has_recurrent and self._width > 1:
                row.before = self._rollback.snapshot(row.cache)
            outputs.append(
                self._runner.run(ids[None], num_logit_rows=self._width, block=False, past_key_values=row.cache)
            )
            row.calls = self._rollback.take_calls()
        return TargetRows(torch.cat([one.logits for one in outputs]), torch.cat([one.tap_hidden for one in outputs]))

    def commit(self, num_kept: Sequence[int]) -> None:
        """See :class:`TargetSession`."""
        for index, (row, kept) in enumerate(zip(self._rows, num_kept, strict=True)):
            assert 1 <= kept <= self._width, f"{kept} of {self._width}"
            row.crop(self._width - kept)
            if self._has_recurrent and kept < self._width:
                self._rollback.replay(row.cache, row.before, row.calls, kept)
            self._advance(index, kept)

    def _advance(self, row: int, num_tokens: int) -> None:
        self._lengths[row] += num_tokens
        held = int(self._rows[row].cache.get_seq_length())
        assert held == self.lengths[row], f"target cache holds {held} tokens, expected {self.lengths[row]}"

    def keep_rows(self, indices: Sequence[int]) -> None:
        """See :class:`TargetSession`."""
        self._rows = [self._rows[index] for index in indices]
        self._lengths = [self._lengths[index] for index in indices]


def _separate_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    supported = (*CROPPED, LinearAttentionLayer)
    unsupported = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in supported})
    if unsupported or not any(isinstance(layer, CROPPED) for layer in cache.layers):
        raise ConfigError(
            f"target {model.config.model_type}: its cache has layers of kind {', '.join(unsupported) or 'recurrent'}, "
            "which the built-in runner can't roll back. Measure this target on a vLLM or SGLang server."
        )
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    return cache


def open_session(
    model: PreTrainedModel,
    *,
    num_rows: int,
    capacity: int,
    taps: Sequence[int] = (),
    static: bool = False,
    compiled: bool = False,
) -> RowSession | SeparateSession:
    """The session that suits ``model``.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        num_rows: B.
        capacity: tokens that a row will hold at most, the last block included.
        taps: 0-based decoder layers whose output is captured, ascending; empty for plain decoding.
        static: keep the cache at its full size and every address as it is.
        compiled: compile the forward over blocks.

    Raises:
        ConfigError: a model that can't be rolled back, or one without a static cache although that is asked for.
    """
    windows = attention_windows(model.config) if supports_row_attention(model) else None
    if windows is not None:
        return RowSession(
            model, windows, num_rows=num_rows, capacity=capacity, taps=taps, static=static, compiled=compiled
        )
    if static:
        raise ConfigError(
            f"static_cache=True: target {model.config.model_type} does not keep plain full or sliding attention on "
            "scaled dot-product attention in every layer, and is decoded with transformers' growing caches. Turn "
            "static_cache and compile_target off."
        )
    return SeparateSession(model, num_rows=num_rows, taps=taps)
