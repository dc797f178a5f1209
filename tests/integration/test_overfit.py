"""Training and decoding mean the same slot, position and context: a drafter that knows a text by heart is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dflash2_train.blocks import build_blocks
from dflash2_train.data import collate
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.objective import Objective
from dflash2_train.runner import DecodeSettings, GenerationResult, generate, plain_decode
from dflash2_train.target import FrozenHead
from tests.cases import tiny_run_config
from tests.tiny_target import EOS, captured, save_tiny_llama

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NEW_TOKENS, STEPS, MIN_DISTINCT = 36, 220, 12

Trained = tuple["LlamaForCausalLM", Drafter, list[int], DecodeSettings]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A drafter overfitted to the target's own greedy answer to one prompt."""
    root: Path = tmp_path_factory.mktemp("overfit")
    config = tiny_run_config(root)
    config.data.teacher_top_k = 8
    model = save_tiny_llama(root / "target", config)
    settings = DecodeSettings(
        max_new_tokens=NEW_TOKENS, num_drafted=config.drafter.num_drafted, stop_ids=frozenset(EOS)
    )
    prompt, text = next(
        (start, answer)
        for start in ([a, b, 7, 9] for a in range(5, 90) for b in (11, 23))
        if len(set(answer := plain_decode(model, start, settings).token_ids)) >= MIN_DISTINCT
        and len(answer) == NEW_TOKENS
    )
    sample = captured(model, config, "s", [*prompt, *text], prompt=len(prompt))
    embedding = model.get_input_embeddings().weight.detach()
    drafter = Drafter(DrafterShape.from_config(config))
    drafter.reset_mask_embedding(embedding[config.drafter.mask_token_id])
    objective = Objective(drafter, FrozenHead(embedding, embedding), config.loss)
    batch = collate([[sample]], anchors_per_document=NEW_TOKENS, seed=0, epochs=[0])
    batch = batch.to(torch.device("cpu"), torch.float32)
    blocks = build_blocks(batch, block_size=config.drafter.block_size, mask_token_id=config.drafter.mask_token_id)
    total = objective.window_weight(blocks)
    optimizer = torch.optim.Adam(objective.parameters(), lr=4e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        objective(batch, blocks, denominator=total, scale=1.0, selector_ramp=1.0).loss.backward()
        optimizer.step()
    yield model, drafter.eval(), prompt, settings


def acceptance(result: GenerationResult) -> float:
    """Mean acceptance length of the rounds that the text's end did not cut."""
    whole = result.rounds[:-1]
    return sum(one.num_accepted + 1 for one in whole) / len(whole)


def test_a_text_known_by_heart_is_accepted_block_after_block(trained: Trained) -> None:
    model, drafter, prompt, settings = trained
    result = generate(model, drafter, prompt, settings)
    assert result.token_ids == plain_decode(model, prompt, settings).token_ids
    assert acceptance(result) >= 0.9 * drafter.shape.block_size


def test_drafting_one_position_off_is_seen_at_once(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate above would catch a shifted contract: the very same drafter falls when its slots move by one."""
    model, drafter, prompt, settings = trained
    straight = drafter.decode_block

    def shifted(embeddings: Tensor, positions: Tensor, *rest: object) -> Tensor:
        return straight(embeddings, positions + 1, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "decode_block", shifted)
    result = generate(model, drafter, prompt, settings)
    assert result.token_ids == plain_decode(model, prompt, settings).token_ids  # lossless all the same
    assert acceptance(result) < 0.9 * drafter.shape.block_size
