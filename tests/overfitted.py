"""A drafter that knows one greedy answer of a tiny target by heart, so that whole blocks are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash2_train.blocks import build_blocks
from dflash2_train.config import RunConfig
from dflash2_train.data import collate
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.objective import Objective
from dflash2_train.runner.loop import DecodeSettings, plain_decode
from dflash2_train.target import FrozenHead
from tests.tiny_target import EOS, captured, save_tiny_llama

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NEW_TOKENS, STEPS, MIN_DISTINCT, LEARNING_RATE = 36, 220, 12, 4e-3


@dataclass(frozen=True, kw_only=True)
class Overfitted:
    """The pair and the text."""

    model: LlamaForCausalLM
    drafter: Drafter
    prompt: list[int]
    settings: DecodeSettings  # greedy, all slots, the length of the text


def overfit(config: RunConfig, folder: Path) -> Overfitted:
    """Write a tiny target of the configured shapes to ``folder`` and train a drafter on its answer to one prompt."""
    config.data.teacher_top_k = 8
    model = save_tiny_llama(folder, config)
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
    optimizer = torch.optim.Adam(objective.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        objective(batch, blocks, denominator=total, scale=1.0, selector_ramp=1.0).loss.backward()
        optimizer.step()
    return Overfitted(model=model, drafter=drafter.eval(), prompt=prompt, settings=settings)
