"""An exported drafter served by the real vLLM: same answers as without it, and block for block what the runner drafts.

A wrong drafter still gives the right answers, only more slowly, so every proposed block and every counter is compared.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash2_train.config import TargetConfig
from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.export.weight_files import WeightFiles
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner.loop import DecodeSettings, GenerationResult, speculate
from dflash2_train.runner.propose import DraftProposer, Proposal
from dflash2_train.target import open_target_config
from tests.cases import RECORD, tiny_run_config
from tests.overfitted import overfit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
MAX_MODEL_LEN, TIMEOUT = 128, 500
LOADED = "Loaded DFlash mask embedding for mask_token_id {}"
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}  # left to the target's own


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drafter, its target, and prompts as token ids."""

    target: Path
    drafter: Path
    prompts: list[list[int]]
    max_tokens: int
    num_proposals: int


@dataclass(frozen=True, kw_only=True)
class Served:
    """What vLLM did, with and without the drafter, and what the runner does."""

    case: Case
    plain: dict[str, Any]
    drafted: dict[str, Any]
    log: str
    model: Any
    drafter: Drafter
    runner: list[tuple[GenerationResult, dict[int, tuple[int, list[int]]]]]  # a prompt: result, position -> block


class Recording(DraftProposer):
    """The runner's proposer, keeping every block under its anchor's position."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.blocks: dict[int, tuple[int, list[int]]] = {}

    def propose(self, anchor_id: int, anchor_position: int) -> Proposal:
        proposal = super().propose(anchor_id, anchor_position)
        self.blocks[anchor_position] = (anchor_id, proposal.draft_ids.tolist())
        return proposal


def tiny_case(root: Path) -> Case:
    """A drafter that knows one of two answers by heart; a sliding and a full layer, heads as vLLM's CPU has them."""
    config = tiny_run_config(root)
    config.target.hidden_size = 128
    config.drafter.head_dim = 32
    pair = overfit(config, root / "target")
    config.target.name = str(root / "target")
    info = open_target_config(config.target)
    folder = export_hf(pair.drafter, config, info, root / "drafter", run_record=RECORD, dtype="float32")
    prompts = [pair.prompt, [5, 6, 7, 8, 40, 41]]
    return Case(target=root / "target", drafter=folder, prompts=prompts, max_tokens=24, num_proposals=3)


def real_case(root: Path) -> Case:
    """The newcomer's drafter, where it was trained."""
    target, drafter = root / "targets/SmolLM2-135M-Instruct", root / "runs/smollm2_cpu/export"
    if not (drafter / "config.json").exists() or not (target / "config.json").exists():
        pytest.skip("runs/smollm2_cpu is not there: launch/quickstart.sh makes it")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    questions = ("Name three fruits.", "Why is the sky blue?")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    return Case(target=target, drafter=drafter, prompts=prompts, max_tokens=16, num_proposals=7)


def vllm(case: Case, out: Path, *, drafter: Path | None) -> tuple[dict[str, Any], str]:
    """Run vLLM in a process of its own; its result and what it logged."""
    settings = {
        "target": str(case.target),
        "drafter": None if drafter is None else str(drafter),
        "num_proposals": case.num_proposals,
        "prompts": case.prompts,
        "max_tokens": case.max_tokens,
        "max_model_len": MAX_MODEL_LEN,
    }
    command = [sys.executable, "-m", "tests.integration.run_vllm_serve", json.dumps(settings), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stdout + done.stderr


def run_here(case: Case, drafter: Drafter, model: Any, prompt: list[int]) -> tuple[GenerationResult, Any]:
    """The runner's answer to one prompt and its blocks."""
    settings = DecodeSettings(max_new_tokens=case.max_tokens, num_drafted=case.num_proposals, stop_ids=frozenset())
    proposer = Recording(
        drafter,
        embedding_weight=model.get_input_embeddings().weight,
        head_weight=model.get_output_embeddings().weight,
        num_drafted=case.num_proposals,
        capacity=len(prompt) + case.max_tokens,
    )
    result = speculate(model, proposer, drafter.shape.target_layer_ids, prompt, settings)
    return result, proposer.blocks


@pytest.fixture(scope="module", params=["tiny", "real"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Served:
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("serve")
    case = tiny_case(root) if request.param == "tiny" else real_case(repo_root)
    plain, _ = vllm(case, root / "plain.json", drafter=None)
    drafted, log = vllm(case, root / "drafted.json", drafter=case.drafter)
    model = AutoModelForCausalLM.from_pretrained(case.target, dtype=torch.float32).eval()
    drafter = load_drafter(case.drafter, torch.float32).eval()
    runner = [run_here(case, drafter, model, prompt) for prompt in case.prompts]
    return Served(
        case=case, plain=plain, drafted=drafted, log=log, model=model, drafter=drafter, runner=runner
    )


def test_every_tensor_of_the_export_is_loaded_and_nothing_is_left_unset(served: Served) -> None:
    assert sorted(served.drafted["tensors"]) == sorted(WeightFiles(served.case.drafter).header)
    assert set(served.drafted["unset"]) <= SHARED


def test_the_mask_vector_is_in_use_and_the_log_says_so(served: Served) -> None:
    assert LOADED.format(served.drafter.shape.mask_token_id) in served.log
    assert torch.equal(torch.tensor(served.drafted["mask"]), served.drafter.mask_embedding.detach())


def test_greedy_answers_are_those_without_a_drafter(served: Served) -> None:
    assert served.drafted["answers"] == served.plain["answers"]
    assert served.drafted["answers"] == [result.token_ids for result, _ in served.runner]
    assert all(len(answer) == served.case.max_tokens for answer in served.drafted["answers"])


def vllm_blocks(served: Served, number: int) -> dict[int, tuple[int, list[int]]]:
    """Position -> anchor and block of one request; the engine may add a suffix to the id that the caller sees."""
    name = served.drafted["requests"][number]
    drafts = [draft for draft in served.drafted["drafts"] if draft[0] == name or draft[0].startswith(f"{name}-")]
    return {position: (anchor, block) for _, position, anchor, block in drafts}


def test_every_proposed_block_is_the_runners(served: Served) -> None:
    for number, (result, blocks) in enumerate(served.runner):
        theirs = vllm_blocks(served, number)
        assert len(blocks) == len(result.rounds) > 0
        assert {position: theirs.get(position) for position in blocks} == blocks
        end = len(served.case.prompts[number]) + served.case.max_tokens - 1
        assert all(position >= end for position in theirs.keys() - blocks.keys()), "drafts after the last token alone"


@torch.no_grad()
def test_drafts_without_the_mask_vector_would_be_noticed(served: Served) -> None:
    """The comparison above can fail: with the target's own row in its place, as servers without the file have it."""
    drafter = copy.deepcopy(served.drafter)
    drafter.mask_embedding.copy_(served.model.get_input_embeddings().weight[drafter.shape.mask_token_id])
    runs = [run_here(served.case, drafter, served.model, prompt) for prompt in served.case.prompts]
    assert [blocks for _, blocks in runs] != [blocks for _, blocks in served.runner]
    assert [result.token_ids for result, _ in runs] == served.plain["answers"], "the answers stay"


def test_acceptance_counters_are_the_runners(served: Served) -> None:
    rounds = [one for result, _ in served.runner for one in result.rounds]
    counters = served.drafted["counters"]
    assert counters["num_drafts"] == len(rounds)
    assert counters["num_draft_tokens"] == sum(one.num_proposed for one in rounds)
    assert counters["num_accepted_tokens"] == sum(one.num_accepted for one in rounds) > 0
    slots = range(served.case.num_proposals)
    by_slot = [sum(one.num_accepted > slot for one in rounds) for slot in slots]
    assert list(counters["num_accepted_tokens_per_pos"])[: len(by_slot)] == by_slot
