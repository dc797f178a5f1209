"""One prompt's run of the target: its cache, its logits for the rows that matter, its tap states.

The taps are what the decoder layers hand on (``dflash2_train.streams``). The cache only ever grows by a forward and
shrinks by :meth:`TargetSession.crop`; its length is checked after both, since a wrong rollback decodes on without an
error.

Supported are targets whose cache holds full attention in every layer. Sliding and recurrent layers need another
rollback and are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dflash2_train.config import ConfigError
from dflash2_train.streams import TapRecorder


class TargetRows(NamedTuple):
    """The target's output for the last rows of a forward."""

    logits: Tensor  # [n, V], the model's dtype
    tap_hidden: Tensor  # [S, T*H] of all S rows of the forward, taps ascending; [S, 0] without taps


def make_full_attention_cache(model: PreTrainedModel) -> DynamicCache:
    """A fresh cache for ``model``.

    Raises:
        ConfigError: the model keeps anything but full-attention keys and values in some layer.
    """
    cache = DynamicCache(config=model.config)
    unsupported = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if unsupported:
        raise ConfigError(
            f"target {model.config.model_type}: its cache has layers of kind {', '.join(unsupported)}, and the "
            "built-in runner can roll back full-attention layers only. Measure this target on a vLLM or SGLang server."
        )
    return cache


class TargetSession:
    """The target on one prompt. Use as a context manager: hooks live exactly as long as the session.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        taps: 0-based decoder layers whose output is captured; empty for plain decoding.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self._model = model
        self._cache = make_full_attention_cache(model)
        self._taps = tuple(taps)
        self._recorder = TapRecorder(model, taps) if taps else None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length())

    def __enter__(self) -> TargetSession:
        if self._recorder is not None:
            self._recorder.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.__exit__()

    def forward(self, ids: Tensor, *, num_logit_rows: int) -> TargetRows:
        """Run ``ids`` [S] after what the cache holds.

        Args:
            ids: [S] int64.
            num_logit_rows: rows, counted from the end, for which the output head is applied.

        Returns:
            logits [num_logit_rows, V] and the taps of all S rows.
        """
        before = self.length
        output = self._model(
            input_ids=ids[None],  # [1, S]
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logit_rows,
        )
        self._expect_length(before + ids.shape[0])
        if self._recorder is None:
            return TargetRows(output.logits[0], output.logits.new_empty(ids.shape[0], 0))
        streams = self._recorder.take()
        return TargetRows(output.logits[0], torch.cat([streams[tap][0] for tap in self._taps], dim=-1))

    def crop(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        surplus = self.length - length
        assert surplus >= 0, f"target cache holds {self.length} tokens, cannot be cut to {length}"
        if surplus:
            self._cache.crop(-surplus)  # negative: tokens to remove
        self._expect_length(length)

    def _expect_length(self, length: int) -> None:
        assert self.length == length, f"target cache holds {self.length} tokens, expected {length}"
