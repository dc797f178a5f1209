"""vLLM's taps and teacher against the transformers backend's, for every architecture that this vLLM can run.

Each engine runs in a process of its own, as vLLM binds what it runs in; one that does not start is skipped with the
last line of its error. Prints a table and exits with 1 if an architecture that runs does not agree, or none runs. A few
minutes.

Usage: python -m tests.integration.run_arch_backends [NAME ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from data_gen.backends.base import CaptureRequest, states_fault
from dflash2_train.config import DataConfig, SamplingConfig, TargetConfig
from tests.architectures import LAYERS, OTHERS, SERVED, TARGETS, write_architecture
from tests.toy_target import WORDS

TAPS = [0, 2, 3, 4]  # the last layer too
LENGTHS = (21, 9, 40, 33, 5)
MAX_ERROR = 0.01  # relative, of a state's row: both sides compute in fp32 and store bf16
MIN_SAME_FIRST = 0.97  # of teacher rows
MAX_LOGPROB_ERROR = 0.02
SECONDS = 400
STARTED = "the engine has started"  # a child that ends without this line: vLLM does not run the architecture here


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def requests() -> list[CaptureRequest]:
    """The same made-up text for both."""
    return [
        CaptureRequest(
            request_id=f"r{number}",
            input_ids=[3 + (7 * place * place + 11 * number) % (len(WORDS) - 3) for place in range(length)],
            first_teacher_row=2,
        )
        for number, length in enumerate(LENGTHS)
    ]


def compare(folder: Path) -> dict[str, Any]:
    """Figures of one architecture; raises what the engine raises."""
    import torch

    target = TargetConfig(
        name=str(folder),
        license="mit",
        dtype="float32",
        hidden_size=SERVED.hidden,
        num_layers=LAYERS,
        vocab_size=len(WORDS),
    )
    data = DataConfig(
        root="-",
        train_prompts=[],
        holdout_prompts=[],
        max_prompt_tokens=48,
        max_num_seqs=3,
        kv_cache_gib=0.25,
        teacher_top_k=8,
        sampling=SamplingConfig(max_tokens=16),
    )
    from data_gen.backends.vllm_engine import VllmCapturer

    engine = VllmCapturer(folder, target, data, TAPS)
    say(STARTED)
    from data_gen.capture_rows import check_backend

    check_backend(engine, len(WORDS))
    theirs = {states.request_id: states for states in engine.capture(requests(), lambda: None)}
    engine.close()
    from data_gen.backends.hf import HfCapturer

    reference = HfCapturer(folder, target, data, list(range(LAYERS)))
    errors, neighbours, same, logprobs, rows = [], [], 0, [], 0
    for request, own in zip(requests(), reference.capture(requests(), lambda: None), strict=True):
        states = theirs[request.request_id]
        assert not states_fault(request, states)
        mine = states.tap_hidden.float().unflatten(1, (len(TAPS), -1))
        layers = own.tap_hidden.float().unflatten(1, (LAYERS, -1))
        for slot, tap in enumerate(TAPS):
            for layer in {tap - 1, tap, tap + 1} & set(range(LAYERS)):
                error = float(((mine[:, slot] - layers[:, layer]).norm(dim=-1) / layers[:, layer].norm(dim=-1)).max())
                (errors if layer == tap else neighbours).append(error)
        first = request.first_teacher_row
        same += int((states.teacher_ids[first:, 0] == own.teacher_ids[first:, 0]).sum())
        rows += len(request.input_ids) - first
        logprobs.append((states.teacher_logprobs[first:, 0].float() - own.teacher_logprobs[first:, 0].float()).abs())
    return {
        "error": max(errors),
        "neighbour": min(neighbours),
        "same_first": same / rows,
        "logprob_error": float(torch.cat(logprobs).median()),
    }


def agrees(figures: dict[str, Any]) -> bool:
    """Whether an architecture's figures are those of one and the same tensor."""
    return (
        figures["error"] <= MAX_ERROR < figures["neighbour"]
        and figures["same_first"] >= MIN_SAME_FIRST
        and figures["logprob_error"] <= MAX_LOGPROB_ERROR
    )


def run_child(name: str, root: Path) -> dict[str, Any]:
    """One architecture in a process of its own."""
    write_architecture(root / name, name, SERVED)
    command = [sys.executable, "-m", "tests.integration.run_arch_backends", "--one", str(root / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        figures: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        return figures
    error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:160]
    return {"failed" if STARTED in lines else "skipped": error}


def main() -> int:
    """Compare the architectures named, or all."""
    if sys.argv[1:2] == ["--one"]:
        say(json.dumps(compare(Path(sys.argv[2]))))
        return 0
    bad = ran = 0
    with tempfile.TemporaryDirectory() as root:
        for name in sys.argv[1:] or [*TARGETS, *OTHERS]:
            figures = run_child(name, Path(root))
            if "skipped" in figures:
                say(f"{name:12} skipped: {figures['skipped']}")
                continue
            ran += 1
            fine = "failed" not in figures and agrees(figures)
            bad += not fine
            say(f"{name:12} {'agrees' if fine else 'DIFFERS'}: {figures}")
    return 1 if bad or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
