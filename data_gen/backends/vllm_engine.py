"""vLLM as backend of both stages. The only module beside its two neighbours that imports vLLM.

The engine runs in this process (no engine-core process) and is driven step by step, so that a full batch always waits
behind the one that decodes, and finished requests can be stored while others decode.

On a CPU three settings differ. Compilation is off: it takes a C++ compiler and a minute, and gains little there.
Chunked prefill is off while sampling: vLLM 0.32 rewinds the generator of a partly prefilled seeded request, which CPU
generators cannot do, and fails. Top-p is applied by ``vllm_sampling`` instead of by a sort of the whole vocabulary.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: it reads this at import
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about features that are not used here
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from torch import Tensor
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from data_gen.backends.base import (
    CapturedStates,
    CaptureRequest,
    Completion,
    Failure,
    Heartbeat,
    SamplingSettings,
    TakeRequest,
)
from data_gen.backends.head import CHUNK_ROWS, TeacherHead, place_rows
from data_gen.backends.state_files import take_states
from data_gen.backends.vllm_connector import SCRATCH_KEY, STATES_FILE
from data_gen.backends.vllm_sampling import NUCLEUS_KEY
from dflash2_train.config import DataConfig, TargetConfig
from dflash2_train.taps import vllm_layer_id

logger = logging.getLogger(__name__)
CPU_BATCH_TOKENS = 2048  # tokens of a prefill step on a CPU; more gains nothing there
QUEUED_PER_SEQUENCE = 4  # requests handed to the engine for each that it may run: full at every step, bounded memory
MAX_STEPS_WITHOUT_STATES = 64  # engine steps after which states that never come are an error
HELD_ROWS = 4 * CHUNK_ROWS  # teacher rows that finished requests are held for, so that most chunks are full


def _engine_arguments(folder: Path, target: TargetConfig, data: DataConfig, max_model_len: int) -> dict[str, Any]:
    """Arguments that both stages share."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,  # ids go in and come out
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": target.tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": data.max_num_seqs,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "seed": data.sampling.seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int(data.kv_cache_gib * 2**30)}
        # Eager mode leaves norms and activations to chains of plain torch operations, a third of a decoding step;
        # vLLM's own CPU kernels for them have to be asked for.
        arguments["compilation_config"] = {"custom_ops": ["+rms_norm", "+silu_and_mul"]}
        arguments["max_num_batched_tokens"] = max(CPU_BATCH_TOKENS, max_model_len)
    else:
        arguments["gpu_memory_utilization"] = data.gpu_memory_utilization
    return arguments


def _start(arguments: dict[str, Any]) -> LLMEngine:
    logger.info("vLLM is loaded; starting its engine")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    if current_platform.is_cpu():
        # Small models reach vLLM's AMX kernels before anything has asked the system for the permission.
        torch.cpu._init_amx()
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _stop(engine: LLMEngine) -> None:
    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


class VllmGenerator:
    """Answers prompts; see :class:`data_gen.backends.base.GenerateBackend`."""

    def __init__(self, folder: Path, target: TargetConfig, data: DataConfig, sampling: SamplingSettings) -> None:
        arguments = _engine_arguments(folder, target, data, data.max_prompt_tokens + sampling.max_tokens)
        self._own_top_p = current_platform.is_cpu() and sampling.top_p < 1.0 and sampling.temperature > 0
        if current_platform.is_cpu():
            arguments["enable_chunked_prefill"] = False
        if self._own_top_p:
            arguments["logits_processors"] = ["data_gen.backends.vllm_sampling:NucleusProcessor"]
        self.engine = _start(arguments)
        self._sampling = sampling
        self._most = QUEUED_PER_SEQUENCE * data.max_num_seqs

    def parameters(self, seed: int) -> SamplingParams:
        """Every field written out, for one request."""
        sampling = self._sampling
        return SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=1.0 if self._own_top_p else sampling.top_p,
            extra_args={NUCLEUS_KEY: sampling.top_p} if self._own_top_p else None,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed,
            max_tokens=sampling.max_tokens,
            min_tokens=0,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=False,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        """Completions, as they finish."""
        while True:
            while self.engine.get_num_unfinished_requests() < self._most and (request := take()) is not None:
                prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
                try:
                    self.engine.add_request(request.request_id, prompt, self.parameters(request.seed))
                except ValueError as error:  # how vLLM refuses a prompt
                    yield Failure(request_id=request.request_id, reason=f"vLLM: {error}")
            if not self.engine.has_unfinished_requests():
                return
            for output in self.engine.step():
                yield _completion(output)
            heartbeat()

    def close(self) -> None:
        """Free the engine."""
        _stop(self.engine)


def _completion(output: RequestOutput) -> Completion:
    answer = output.outputs[0]
    return Completion(
        request_id=output.request_id,
        completion_ids=[int(token) for token in answer.token_ids],
        finish_reason=str(answer.finish_reason),
    )


@dataclass(frozen=True)
class _Read:
    """A finished request and its states, before the teacher."""

    request: CaptureRequest
    output: RequestOutput
    token_ids: list[int]
    taps: Tensor  # [S, T*H] bf16
    first: int  # teacher rows are wanted from here on
    final: Tensor  # [S - first, H], after the last layer


class VllmCapturer:
    """Reads states through vLLM's ``extract_hidden_states``; see :class:`data_gen.backends.base.CaptureBackend`.

    One more layer than the taps is asked for, the last one, from which the teacher follows. vLLM captures it before the
    final norm, as it does for every layer.
    """

    def __init__(self, folder: Path, target: TargetConfig, data: DataConfig, taps: Sequence[int]) -> None:
        self._slots = sorted({*taps, target.num_layers - 1})
        self._taps = list(taps)
        self._scratch = tempfile.TemporaryDirectory(prefix="dflash2-states-")  # goes with this object, also on an error
        arguments = _engine_arguments(folder, target, data, data.max_prompt_tokens + data.sampling.max_tokens + 1)
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": [vllm_layer_id(tap) for tap in self._slots]}
            },
        }
        arguments["kv_transfer_config"] = {
            "kv_connector": "TapConnector",
            "kv_connector_module_path": "data_gen.backends.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {SCRATCH_KEY: self._scratch.name},
        }
        self.engine = _start(arguments)
        if self.engine.vllm_config.cache_config.enable_prefix_caching:
            raise RuntimeError("vLLM switched prefix caching on; captured states would be short. Use data.backend=hf.")
        dtype = torch.bfloat16 if target.dtype == "bfloat16" else torch.float32
        self._head = TeacherHead(folder, top_k=data.teacher_top_k, dtype=dtype)
        self._max_queued = QUEUED_PER_SEQUENCE * data.max_num_seqs
        self._parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=1,  # of the raw logits: what the teacher is held against
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def capture(self, requests: Iterable[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        """States of all ``requests``, as they finish."""
        known: dict[str, CaptureRequest] = {}  # in the engine
        waiting: dict[str, RequestOutput] = {}  # finished requests whose states are not there yet
        unasked, more, idle = iter(requests), True, 0
        while more or known:
            while more and len(known) < self._max_queued:
                request = next(unasked, None)
                if request is None:
                    more = False
                    break
                known[request.request_id] = request
                prompt = TokensPrompt(prompt_token_ids=request.input_ids)
                self.engine.add_request(request.request_id, prompt, self._parameters.clone())
            if not known:
                break
            for output in self.engine.step():
                waiting[output.request_id] = output
            ready = [name for name, output in waiting.items() if _states_path(output).exists()]
            idle = 0 if ready or self.engine.has_unfinished_requests() else idle + 1
            if idle > MAX_STEPS_WITHOUT_STATES:
                raise RuntimeError(f"vLLM finished {len(waiting)} requests but never handed over their states")
            yield from self._collect([(known.pop(name), waiting.pop(name)) for name in ready])
            heartbeat()

    def _collect(self, finished: Sequence[tuple[CaptureRequest, RequestOutput]]) -> Iterator[CapturedStates]:
        """States of finished requests; those of a few chunks of teacher rows go through the head together."""
        held: list[_Read] = []
        for request, output in finished:
            held.append(self._read(request, output))
            if sum(len(read.final) for read in held) >= HELD_ROWS:
                yield from self._with_teacher(held)
                held = []
        if held:
            yield from self._with_teacher(held)

    def _read(self, request: CaptureRequest, output: RequestOutput) -> _Read:
        states, token_ids = take_states(_states_path(output))  # [S, slots, H]
        length = states.shape[0]
        taps = states[:, [self._slots.index(tap) for tap in self._taps]].reshape(length, -1)  # [S, T*H]
        first = min(request.first_teacher_row, length)  # with rows missing, no teacher is asked for beyond the end
        # A copy of what the teacher is made from, so that all states of the request are not held for it.
        return _Read(request, output, token_ids, taps.to(torch.bfloat16), first, states[first:, -1].clone())

    def _with_teacher(self, held: Sequence[_Read]) -> Iterator[CapturedStates]:
        columns = self._head.rows(torch.cat([read.final for read in held]))
        parts = (column.split([len(read.final) for read in held]) for column in columns)
        for read, *rows in zip(held, *parts, strict=True):
            ids, logprobs, normaliser = place_rows((rows[0], rows[1], rows[2]), read.first, len(read.taps))
            answer = read.output.outputs[0]
            next_id = int(answer.token_ids[0])
            yield CapturedStates(
                request_id=read.request.request_id,
                input_ids=read.token_ids,
                tap_hidden=read.taps,
                teacher_ids=ids,
                teacher_logprobs=logprobs,
                teacher_log_normaliser=normaliser,
                next_id=next_id,
                next_logprob=answer.logprobs[0][next_id].logprob if answer.logprobs else float("nan"),
                cached_tokens=read.output.num_cached_tokens or 0,
            )

    def close(self) -> None:
        """Free the engine and the scratch folder."""
        _stop(self.engine)
        self._scratch.cleanup()


def _states_path(output: RequestOutput) -> Path:
    """File that the connector announced for a finished request."""
    announced = output.kv_transfer_params or {}
    if STATES_FILE not in announced:
        raise RuntimeError(
            f"{output.request_id}: vLLM finished the request without keeping its states. Use data.backend=hf."
        )
    return Path(announced[STATES_FILE])
