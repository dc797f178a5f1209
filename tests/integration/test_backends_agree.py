"""The vLLM backend, for real, against plain transformers: same tokens in, same layers and the same teacher out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.toy_target import WORDS, write_model

LAYERS, HIDDEN, MAX_TOKENS = 4, 128, 8
TAPS = [0, 2, 3]
PROMPTS = [[0, 7 + n, 8, 9 + n, *range(20, 20 + 3 * n)] for n in range(7)]  # more than fit a batch of 3

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> dict[str, Tensor]:
    root = tmp_path_factory.mktemp("backends")
    write_model(root / "target", layers=LAYERS)
    shapes = {"dtype": "float32", "hidden_size": HIDDEN, "num_layers": LAYERS, "vocab_size": len(WORDS)}
    settings = {"target": shapes, "taps": TAPS, "max_tokens": MAX_TOKENS, "prompts": PROMPTS}
    command = [sys.executable, "-m", "tests.integration.run_backends", root / "target", root / "out.safetensors"]
    done = subprocess.run(
        [*map(str, command), json.dumps(settings)], cwd=repo_root, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(root / "out.safetensors")


def names(states: dict[str, Tensor]) -> list[str]:
    return sorted({key.split("/")[1] for key in states})


def error(mine: Tensor, other: Tensor) -> float:
    """Largest relative error of a row."""
    return float(((mine - other).norm(dim=-1) / other.norm(dim=-1)).max())


def test_every_request_comes_back_with_its_own_tokens(states: dict[str, Tensor]) -> None:
    assert len(names(states)) == 2 * len(PROMPTS)
    for name in names(states):
        ids = states[f"vllm/{name}/input_ids"].tolist()
        prompt = PROMPTS[int(name[-1])]
        assert ids[: len(prompt)] == prompt
        assert len(prompt) < len(ids) <= len(prompt) + MAX_TOKENS


def test_tap_states_agree_and_neighbouring_layers_do_not(states: dict[str, Tensor]) -> None:
    for name in names(states):
        mine = states[f"vllm/{name}/tap_hidden"].float().unflatten(1, (len(TAPS), HIDDEN))
        layers = states[f"hf/{name}/tap_hidden"].float().unflatten(1, (LAYERS, HIDDEN))
        for slot, tap in enumerate(TAPS):
            assert error(mine[:, slot], layers[:, tap]) < 0.01, f"tap {tap}: beyond bf16 rounding"
            for other in {tap - 1, tap + 1} & set(range(LAYERS)):
                assert error(mine[:, slot], layers[:, other]) > 0.1, f"tap {tap} looks like layer {other}"


def test_teachers_agree(states: dict[str, Tensor]) -> None:
    for name in names(states):
        first = len(PROMPTS[int(name[-1])]) - 1
        mine, other = (states[f"{backend}/{name}/teacher_ids"] for backend in ("vllm", "hf"))
        assert (mine[first:, 0] == other[first:, 0]).float().mean() > 0.97
        for key, atol in (("teacher_logprobs", 0.02), ("normaliser", 0.01)):
            mine, other = (states[f"{backend}/{name}/{key}"][first:].float() for backend in ("vllm", "hf"))
            torch.testing.assert_close(mine, other, atol=atol, rtol=0.01)
        assert int(states[f"vllm/{name}/next_id"]) == int(states[f"vllm/{name}/teacher_ids"][-1, 0])


def test_greedy_answers_are_the_teachers_first_choices(states: dict[str, Tensor]) -> None:
    for name in names(states):
        if name.startswith("greedy"):
            first = len(PROMPTS[int(name[-1])]) - 1
            ids = states[f"vllm/{name}/input_ids"]
            assert ids[first + 1 :].tolist() == states[f"hf/{name}/teacher_ids"][first:-1, 0].tolist()
