"""Plain transformers as backend of both stages: slow, small, and the reference that the vLLM backend is held against.

Chosen only by ``data.backend=hf``. Sampling follows the same rule as the vLLM backend (temperature, then top-k, then
top-p) with a generator of its own for every row, so that but for rounding a row does not depend on its batch.

B rows, S tokens, T taps, H hidden size, V vocabulary, k = teacher_top_k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from data_gen.backends.base import (
    CapturedStates,
    CaptureRequest,
    Completion,
    Failure,
    GenerationRequest,
    Heartbeat,
    SamplingSettings,
    TakeRequest,
)
from data_gen.backends.batches import length_batches
from data_gen.backends.head import CHUNK_ROWS, place_rows, top_rows
from data_gen.backends.nucleus import keep_nucleus_
from dflash2_train.config import ConfigError, DataConfig, TargetConfig
from dflash2_train.pretrained import load_pretrained
from dflash2_train.streams import TapRecorder

MAX_ROWS = 16  # sequences of a batch; data.max_num_seqs where that is less
MAX_BATCH_TOKENS = 4096  # of a batch to capture, padding included: its logits exist as a whole


def _load(folder: Path, target: TargetConfig) -> PreTrainedModel:
    dtype = torch.bfloat16 if target.dtype == "bfloat16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_pretrained(folder, dtype, device=device, trust_remote_code=target.trust_remote_code)


def choose_tokens(logits: Tensor, sampling: SamplingSettings, generators: Sequence[torch.Generator]) -> Tensor:
    """Next tokens [B] from logits [B, V], one generator a row; temperature 0 is argmax."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.to("cpu", torch.float32) / sampling.temperature
    if sampling.top_k:
        lowest = scaled.topk(min(sampling.top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled.masked_fill_(scaled < lowest, -torch.inf)
    keep_nucleus_(scaled, torch.full((scaled.shape[0],), sampling.top_p))
    shares = scaled.softmax(dim=-1)
    drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(shares, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def check_supported(sampling: SamplingSettings) -> None:
    """Refuse sampling fields that :func:`choose_tokens` does not apply.

    Raises:
        ConfigError: one of them is not at its neutral value.
    """
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        if vars(sampling)[name] != value:
            raise ConfigError(
                f"data.sampling.{name}={vars(sampling)[name]}: data.backend=hf does not apply it. "
                f"Set it to {value}, or use data.backend=vllm."
            )


class HfGenerator:
    """Answers prompts in left-padded batches; see :class:`data_gen.backends.base.GenerateBackend`."""

    def __init__(self, folder: Path, target: TargetConfig, data: DataConfig, sampling: SamplingSettings) -> None:
        check_supported(sampling)
        self._model = _load(folder, target)
        self._sampling = sampling
        self._rows = min(data.max_num_seqs, MAX_ROWS)

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        """Completions, batch by batch."""
        while True:
            batch = [request for _ in range(self._rows) if (request := take()) is not None]
            if not batch:
                return
            yield from self._batch(batch, heartbeat)

    @torch.inference_mode()
    def _batch(self, requests: Sequence[GenerationRequest], heartbeat: Heartbeat) -> list[Completion]:
        device = self._model.device
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64, device=device)  # [B, S], padded left
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        answers: list[list[int]] = [[] for _ in requests]
        reasons = [""] * len(requests)
        cache: Any = None
        positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
        while not all(reasons):
            step = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = step.past_key_values
            chosen = choose_tokens(step.logits[:, -1], self._sampling, generators)
            self._record(chosen.tolist(), answers, reasons)
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
            heartbeat()
        return [
            Completion(request_id=request.request_id, completion_ids=answer, finish_reason=reason)
            for request, answer, reason in zip(requests, answers, reasons, strict=True)
        ]

    def _record(self, chosen: list[int], answers: list[list[int]], reasons: list[str]) -> None:
        for row, token in enumerate(chosen):
            if reasons[row]:
                continue
            answers[row].append(token)
            if token in self._sampling.stop_ids:
                reasons[row] = "stop"
            elif len(answers[row]) == self._sampling.max_tokens:
                reasons[row] = "length"

    def close(self) -> None:
        """Free the model."""
        del self._model


def pads_safely(model: PreTrainedModel) -> bool:
    """Whether padding on the right leaves the states of the tokens before it alone, rounding apart.

    It does under full and sliding attention. A sparse-attention indexer ranks positions, padded ones among them, and
    breaks ties by their number; recurrent layers compute in chunks counted over the padded length. Those get batches
    of equal lengths, which hold no padding.
    """
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class HfCapturer:
    """Reads states by plain forwards of batches of like length; see :class:`data_gen.backends.base.CaptureBackend`.

    Requests are taken a shard's worth at a time, batched by length and given back in their order. Taps are what the
    layers hand on (:class:`dflash2_train.streams.TapRecorder`); the teacher comes from the model's own logits.
    """

    def __init__(self, folder: Path, target: TargetConfig, data: DataConfig, taps: Sequence[int]) -> None:
        self._model = _load(folder, target)
        self._taps, self._top_k = list(taps), data.teacher_top_k
        self._recorder = TapRecorder(self._model, self._taps)
        self._window = data.conversations_per_shard
        self._max_rows = min(data.max_num_seqs, MAX_ROWS)
        self._equal_lengths = not pads_safely(self._model)

    def capture(self, requests: Iterable[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        """States of all ``requests``, in order."""
        waiting = iter(requests)
        while window := list(itertools.islice(waiting, self._window)):
            batches = length_batches(
                [len(request.input_ids) for request in window],
                max_rows=self._max_rows,
                max_tokens=MAX_BATCH_TOKENS,
                equal=self._equal_lengths,
            )
            found: dict[int, CapturedStates] = {}
            for batch in batches:
                found.update(zip(batch, self._batch([window[place] for place in batch]), strict=True))
                heartbeat()
            for place in range(len(window)):
                yield found.pop(place)

    @torch.inference_mode()
    def _batch(self, requests: list[CaptureRequest]) -> list[CapturedStates]:
        longest = max(len(request.input_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)  # [B, S], padded right
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, : len(request.input_ids)] = torch.tensor(request.input_ids)
            mask[row, : len(request.input_ids)] = 1
        device = self._model.device
        with self._recorder:
            output = self._model(
                input_ids=ids.to(device),
                # Without padding a mask says nothing, and attention without one takes the route of a single sequence.
                attention_mask=None if bool(mask.all()) else mask.to(device),
                use_cache=False,
            )
            streams = self._recorder.take()
        taps = torch.cat([streams[tap] for tap in self._taps], dim=-1)  # [B, S, T*H]
        return [self._states(request, taps[row], output.logits[row]) for row, request in enumerate(requests)]

    def _states(self, request: CaptureRequest, taps: Tensor, logits: Tensor) -> CapturedStates:
        """One row's part of a batch: ``taps`` [S, T*H] and ``logits`` [S, V], padding behind."""
        first, length = request.first_teacher_row, len(request.input_ids)
        parts = [top_rows(chunk, self._top_k) for chunk in logits[first:length].split(CHUNK_ROWS)]
        ids, logprobs, normaliser = (torch.cat(column) for column in zip(*parts, strict=True))
        rows = place_rows((ids, logprobs, normaliser), first, length)
        last = logits[length - 1].float()
        next_id = int(last.argmax())
        return CapturedStates(
            request_id=request.request_id,
            input_ids=list(request.input_ids),
            tap_hidden=taps[:length].to("cpu", torch.bfloat16),
            teacher_ids=rows[0],
            teacher_logprobs=rows[1],
            teacher_log_normaliser=rows[2],
            next_id=next_id,
            next_logprob=float(last[next_id] - last.logsumexp(dim=-1)),
        )

    def close(self) -> None:
        """Free the model."""
        del self._model, self._recorder
