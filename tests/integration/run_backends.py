"""Both backends over the same tokens, in a process of its own: vLLM binds threads and memory of the process it runs in.

Usage: python -m tests.integration.run_backends TARGET_FOLDER RESULT.safetensors SETTINGS_JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from data_gen.backends.base import CaptureRequest, GenerationRequest, SamplingSettings, take_from
from dflash2_train.config import DataConfig, SamplingConfig, TargetConfig


def nothing() -> None:
    """No display."""


def capture_with(capturer: Any, requests: list[CaptureRequest], name: str, result: dict[str, Any]) -> None:
    """Put a backend's states into ``result`` under ``name``."""
    import torch

    for states in capturer.capture(requests, nothing):
        key = f"{name}/{states.request_id}"
        result[f"{key}/input_ids"] = torch.tensor(states.input_ids)
        result[f"{key}/tap_hidden"] = states.tap_hidden
        result[f"{key}/teacher_ids"] = states.teacher_ids
        result[f"{key}/teacher_logprobs"] = states.teacher_logprobs
        result[f"{key}/normaliser"] = states.teacher_log_normaliser
        result[f"{key}/next_id"] = torch.tensor(states.next_id)
    capturer.close()


def main() -> None:
    """Generate with vLLM, capture with vLLM and with transformers, write everything down."""
    folder, out, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    target = TargetConfig(name=str(folder), license="mit", **settings["target"])
    data = DataConfig(
        root="unused",
        train_prompts=[],
        holdout_prompts=[],
        sampling=SamplingConfig(max_tokens=settings["max_tokens"]),
        max_prompt_tokens=64,
        max_num_seqs=3,
        kv_cache_gib=0.25,
    )
    from safetensors.torch import save_file

    from data_gen.backends.vllm_engine import VllmCapturer, VllmGenerator

    result: dict[str, Any] = {}
    requests = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        sampling = SamplingSettings(
            temperature=temperature, top_p=0.95, top_k=0, max_tokens=settings["max_tokens"], stop_ids=[1]
        )
        generator = VllmGenerator(folder, target, data, sampling)
        asked = [
            GenerationRequest(request_id=f"{name}{number}", prompt_ids=ids, seed=number)
            for number, ids in enumerate(settings["prompts"])
        ]
        runs = [
            sorted(generator.generate(take_from(asked), nothing), key=lambda done: done.request_id) for _ in range(2)
        ]
        assert runs[0] == runs[1], "the same seeds give the same answers"
        for request, done in zip(asked, runs[0], strict=True):
            ids = [*request.prompt_ids, *done.completion_ids]
            first = len(request.prompt_ids) - 1
            requests.append(CaptureRequest(request_id=request.request_id, input_ids=ids, first_teacher_row=first))
        generator.close()
    capture_with(VllmCapturer(folder, target, data, settings["taps"]), requests, "vllm", result)
    from data_gen.backends.hf import HfCapturer

    every_layer = list(range(target.num_layers))
    capture_with(HfCapturer(folder, target, data, every_layer), requests, "hf", result)
    save_file(result, out)


if __name__ == "__main__":
    main()
