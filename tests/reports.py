"""An evaluation report about the drafter in a folder, made by the real report code from scripted rounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord, PromptRecord
from dflash2_train.evaluate.report import build_report
from dflash2_train.provenance import sha256_file

NUM_DRAFTED = 3
SCRIPT = (0, 3, 2)
MEASURED = ("config.json", "model.safetensors", "mask_embedding.pt")


def decoded(accepted: Sequence[int]) -> DecodeRecord:
    """One prompt's decoding in which each round accepts so many of ``NUM_DRAFTED``."""
    rounds = [[NUM_DRAFTED, count, count + 1] for count in accepted]
    seconds = {"prefill": 1.0, "context": 0.0, "draft": 1.0, "verify": 2.0, "sample": 0.0}
    output = 1 + sum(count + 1 for count in accepted)
    return DecodeRecord(token_ids=list(range(output)), finish_reason="length", rounds=rounds, seconds=seconds)


def write_report(
    path: Path, folder: Path, *, accepted: Sequence[int] = SCRIPT, equal: bool = True, **protocol: Any
) -> Path:
    """``path`` as dflash2-eval would write it after measuring the drafter in ``folder`` on two prompts."""
    baseline = DecodeRecord(token_ids=[1, 2], finish_reason="stop", rounds=[], seconds={"prefill": 1.0, "verify": 0.5})
    records = [
        PromptRecord(
            prompt_id=name,
            num_prompt_tokens=10,
            greedy=decoded(accepted),
            baseline=baseline,
            equality=EqualityRecord(equal=equal, first_difference=None if equal else 3),
            sampled=None,
        )
        for name in ("a", "b")
    ]
    covered = {
        "experiment": "tiny",
        "mode": "runner",
        "dtype": "float32",
        "device": "cpu",
        "num_drafted": NUM_DRAFTED,
        "concurrency": 1,
        "max_new_tokens": 8,
        "prompts": 2,
        "prompts_sha256": "0" * 64,
        "enable_thinking": None,
        "temperature": 0.0,
        "drafter_sha256": {name: sha256_file(folder / name) for name in MEASURED},
        **protocol,
    }
    evaluation = {
        "time_utc": "2026-01-02T00:00:00+00:00",
        "machine": {"cpu": "a processor", "cores": 2, "gpus": []},
        "config": {"run_dir": "/home/somebody/runs/tiny"},
    }
    report = build_report(records, protocol=covered, run={"evaluation": evaluation, "drafter": {"tool": "x"}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_json()))
    return path
