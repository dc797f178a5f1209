"""Greedy answers of vLLM with or without a drafter, in a process of its own.

Usage: python -m tests.integration.run_vllm_serve SETTINGS_JSON RESULT.json

Without a drafter nothing of vLLM is changed, and its first model runner decodes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration import triton_on_cpu
from tests.integration.vllm_witness import Witness

COUNTERS = "vllm:spec_decode_"


def decode(settings: dict[str, Any], speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Answers to ``prompts`` (token ids), and vLLM's own counters."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=settings["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=settings["max_model_len"],
        max_num_batched_tokens=settings["max_model_len"],
        max_num_seqs=len(settings["prompts"]),
        kv_cache_memory_bytes=int(0.25 * 2**30),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    parameters = SamplingParams(temperature=0.0, max_tokens=settings["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in settings["prompts"]]
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    answers = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    counters = {
        metric.name.removeprefix(COUNTERS): getattr(metric, "values", getattr(metric, "value", None))
        for metric in engine.get_metrics()
        if metric.name.startswith(COUNTERS)
    }
    return {"requests": list(answers), "answers": list(answers.values()), "counters": counters}


def main() -> None:
    """Decode as the settings say and write everything down."""
    settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if settings["drafter"] is None:
        os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        result = decode(settings, None)
    else:
        triton_on_cpu.install()
        witness = Witness()
        witness.watch()
        triton_on_cpu.norm_keys_by_layer()
        result = decode(
            settings,
            {
                "method": "dflash",
                "model": settings["drafter"],
                "num_speculative_tokens": settings["num_proposals"],
            },
        )
        result |= witness.to_json()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
