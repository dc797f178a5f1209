"""vLLM's drafter class on an export of every experiment's family: loaded whole, and equal to ours piece by piece."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash2_train.export import hf
from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.export.weight_files import WeightFiles
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.target import FrozenHead
from tests.cases import RECORD, make_target_info
from tests.families import EXPERIMENTS, HIDDEN, POSITIONS, VOCAB, WINDOW, family, randomised

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
REQUESTS, CONTEXT = 2, WINDOW + 5  # the window hides some of the context
OWN_TABLES = "own_tables"  # the newcomer's family with tables of its own, the mask folded
CASES = [*EXPERIMENTS, OWN_TABLES]
TOLERANCE = 1e-5
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}


def write_target(folder: Path, num_layers: int) -> None:
    """As much of a target as vLLM reads to size a drafter: its configuration."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
    ).save_pretrained(folder)


def write_case(folder: Path, name: str, tables: FrozenHead) -> dict[str, Any]:
    """Export a random drafter of a family and its inputs."""
    config = family("smollm2_cpu" if name == OWN_TABLES else name, folder)
    if name == OWN_TABLES:
        config.export.tables, config.export.fold_mask = ["embed_tokens", "lm_head"], True
    write_target(folder / "target", config.target.num_layers)
    drafter = randomised(Drafter(DrafterShape.from_config(config)), seed=6)
    info = make_target_info(config)
    export_hf(drafter, config, info, folder / "drafter", run_record=RECORD, dtype="float32")
    generator = torch.Generator().manual_seed(4)
    num_proposals = config.export.resolved_num_proposals(config.drafter)
    ids = torch.full((REQUESTS, num_proposals + 1), drafter.shape.mask_token_id)
    ids[:, 0] = torch.tensor([7, 40])
    taps = torch.randn(REQUESTS, CONTEXT, drafter.shape.num_taps * HIDDEN, generator=generator)
    inputs = {"taps": taps, "ids": ids, "embedding": tables.embedding, "head": tables.head}
    save_file(inputs, folder / "inputs.safetensors")
    return {"folder": str(folder), "num_proposals": num_proposals}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run through vLLM in one process."""
    root = tmp_path_factory.mktemp("class")
    generator = torch.Generator().manual_seed(9)
    tables = FrozenHead(*(torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.FrozenHead, "load", lambda _target, *, dtype: tables)
        cases = [write_case(root / name, name, tables) for name in CASES]
    command = [sys.executable, "-m", "tests.integration.run_vllm_class", json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


def facts(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / name / "facts.json").read_text())
    return found


def opened(root: Path, name: str) -> tuple[Drafter, dict[str, Tensor], dict[str, Tensor]]:
    """The drafter as this project loads it, what went in, and what vLLM made of it."""
    drafter = load_drafter(root / name / "drafter", torch.float32).eval()
    return drafter, load_file(root / name / "inputs.safetensors"), load_file(root / name / "outputs.safetensors")


def error(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference of a row, relative to the row's largest value."""
    return float(((theirs - ours).abs().amax(-1) / ours.abs().amax(-1)).max())


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_loaded_and_no_parameter_is_left_unset(root: Path, name: str) -> None:
    seen = facts(root, name)
    assert sorted(seen["tensors"]) == sorted(WeightFiles(root / name / "drafter").header)
    assert set(seen["unset"]) == (set() if name == OWN_TABLES else SHARED)
    assert seen["mask"] == load_drafter(root / name / "drafter", torch.float32).mask_embedding.tolist()


@pytest.mark.parametrize("name", CASES)
def test_windows_and_direction_are_read_as_trained(root: Path, name: str) -> None:
    seen, (drafter, _, _) = facts(root, name), opened(root, name)
    assert seen["causal"] == [False] * drafter.shape.num_layers
    sliding = [kind == "sliding_attention" for kind in drafter.shape.layer_types]
    assert seen["windows"] == [drafter.shape.sliding_window if slides else None for slides in sliding]


@pytest.mark.parametrize("name", CASES)
def test_tables_are_the_targets_unless_the_folder_has_others(root: Path, name: str) -> None:
    seen = facts(root, name)
    assert seen["embedding_is_targets"] == (name != OWN_TABLES), "a folded mask makes the embedding another one"
    assert seen["head_is_targets"], "an equal head is shared"


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_inputs_and_context_keys_and_values_are_equal(root: Path, name: str) -> None:
    drafter, inputs, outputs = opened(root, name)
    assert torch.equal(outputs["embedded"], drafter.embed_blocks(inputs["ids"], inputs["embedding"]))
    positions = torch.arange(CONTEXT).expand(REQUESTS, -1)
    context = drafter.project_context(drafter.encode_context(inputs["taps"]), positions)
    for layer, (keys, values) in enumerate(context):  # [R, M, S, D]
        assert error(outputs["keys"][layer], keys.transpose(1, 2)) < TOLERANCE
        assert error(outputs["values"][layer], values.transpose(1, 2)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_block_states_are_equal_though_requests_stand_side_by_side(root: Path, name: str) -> None:
    """Both requests are one batch of rows there: convolutions must start anew at the second, whatever the length."""
    drafter, inputs, outputs = opened(root, name)
    assert error(outputs["hidden"], our_hidden(drafter, inputs)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_candidates_and_transition_scores_are_equal(root: Path, name: str) -> None:
    drafter, inputs, outputs = opened(root, name)
    hidden = our_hidden(drafter, inputs)[:, 1:]
    unary, ids = (hidden @ inputs["head"].T).topk(drafter.shape.selector_top_k, -1)
    order = outputs["candidate_ids"].argsort(-1), ids.argsort(-1)
    assert torch.equal(outputs["candidate_ids"].gather(-1, order[0]), ids.gather(-1, order[1]))
    assert error(outputs["unary"].gather(-1, order[0]), unary.gather(-1, order[1])) < TOLERANCE
    theirs, anchors = outputs["candidate_ids"], inputs["ids"][:, 0]
    first = anchors[:, None, None].expand(-1, 1, theirs.shape[-1])  # [R, 1, C]: one anchor, C times
    previous = torch.cat([first, theirs[:, :-1]], 1)  # [R, K, C]: after which candidate of the slot before
    scores = [drafter.candidate_selector.scores(hidden, outputs["unary"], theirs, one) for one in previous.unbind(-1)]
    assert error(outputs["scores"], torch.stack(scores, 2)) < TOLERANCE  # [R, K, C, C]


def our_hidden(drafter: Drafter, inputs: dict[str, Tensor]) -> Tensor:
    """States [R, W, H] of the blocks, as the runner makes them."""
    shape, width = drafter.shape, inputs["ids"].shape[1]
    positions = torch.arange(CONTEXT).expand(REQUESTS, -1)
    anchors = torch.full((REQUESTS, 1), CONTEXT)
    visible = context_masks(
        shape.layer_types,
        shape.sliding_window,
        anchor_positions_local=anchors,
        block_document_ids=torch.zeros_like(anchors),
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        block_size=width,
    )
    embedded = drafter.embed_blocks(inputs["ids"], inputs["embedding"])
    context = drafter.project_context(drafter.encode_context(inputs["taps"]), positions)
    return drafter.decode_block(embedded, anchors + torch.arange(width), context, visible)
