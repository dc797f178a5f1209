"""Plain transformers as backend of both stages: slow, small, and the reference that the vLLM backend is held against.

Chosen only by ``data.backend=hf``. Sampling follows the same rule as the vLLM backend (temperature, then top-k, then
top-p) with a generator of its own for every row, so that but for rounding a row does not depend on its batch.

B rows, S tokens, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

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
from data_gen.backends.head import place_rows, top_rows
from data_gen.backends.nucleus import keep_nucleus_
from dflash2_train.config import ConfigError, DataConfig, TargetConfig
from dflash2_train.taps import hf_hidden_state_index

MAX_ROWS = 16  # sequences of a batch; data.max_num_seqs where that is less


def _load(folder: Path, target: TargetConfig) -> PreTrainedModel:
    dtype = torch.bfloat16 if target.dtype == "bfloat16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, trust_remote_code=target.trust_remote_code
    )
    return model.to(device).eval().requires_grad_(False)


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


class HfCapturer:
    """Reads states by plain forwards, one sequence each; see :class:`data_gen.backends.base.CaptureBackend`.

    The teacher comes from the model's own logits. transformers' last hidden state has the final norm applied, so the
    last layer's stream is taken from the layer itself.
    """

    def __init__(self, folder: Path, target: TargetConfig, data: DataConfig, taps: Sequence[int]) -> None:
        self._model = _load(folder, target)
        self._taps, self._top_k = list(taps), data.teacher_top_k
        self._last_layer = target.num_layers - 1
        self._last_output: Tensor | None = None
        if self._last_layer in self._taps:
            self._model.get_decoder().layers[-1].register_forward_hook(self._keep)

    def _keep(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._last_output = output[0] if isinstance(output, tuple) else output

    def _tap(self, states: Sequence[Tensor], tap: int) -> Tensor:
        if tap == self._last_layer:
            assert self._last_output is not None
            return self._last_output[0]
        return states[hf_hidden_state_index(tap)][0]

    @torch.inference_mode()
    def capture(self, requests: Sequence[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        """States of all ``requests``, in order."""
        for request in requests:
            ids = torch.tensor(request.input_ids, device=self._model.device)[None]  # [1, S]
            output = self._model(input_ids=ids, output_hidden_states=True)
            taps = torch.cat([self._tap(output.hidden_states, tap) for tap in self._taps], dim=-1)  # [S, T*H]
            first, length = request.first_teacher_row, len(request.input_ids)
            rows = place_rows(top_rows(output.logits[0, first:], self._top_k), first, length)
            yield CapturedStates(
                request_id=request.request_id,
                input_ids=list(request.input_ids),
                tap_hidden=taps.to("cpu", torch.bfloat16),
                teacher_ids=rows[0],
                teacher_logprobs=rows[1],
                teacher_log_normaliser=rows[2],
                next_id=int(output.logits[0, -1].argmax()),
            )
            heartbeat()

    def close(self) -> None:
        """Free the model."""
        del self._model
