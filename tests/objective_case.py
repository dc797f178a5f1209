"""A tiny objective and its batches, shared by test modules."""

from __future__ import annotations

from pathlib import Path

import torch

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import BlockBatch, build_blocks
from dflash2_train.config import RunConfig
from dflash2_train.data import PackedBatch, collate
from dflash2_train.objective import Objective
from dflash2_train.target import FrozenHead
from tests.cases import make_drafter, tiny_run_config
from tests.tiny_target import captured, save_tiny_llama

LENGTHS = (17, 9, 13)
MASK_ID = 95
BLOCK_SIZE = 4
TEACHER_TOP_K = 8


def make_objective(root: Path) -> tuple[RunConfig, Objective, list[CapturedSample]]:
    """A random drafter of a random target, with three captured documents whose first three tokens are a prompt."""
    config = tiny_run_config(root)
    config.data.teacher_top_k = TEACHER_TOP_K
    model = save_tiny_llama(root / "target", config)
    generator = torch.Generator().manual_seed(3)
    samples = [
        captured(model, config, f"s{n}", torch.randint(3, 90, (length,), generator=generator).tolist(), prompt=3)
        for n, length in enumerate(LENGTHS)
    ]
    embedding = model.get_input_embeddings().weight.detach()
    return config, Objective(make_drafter(config), FrozenHead(embedding, embedding), config.loss), samples


def pack(rows: list[list[CapturedSample]], anchors: int = 5) -> PackedBatch:
    """Rows of documents on the CPU in fp32."""
    batch = collate(rows, anchors_per_document=anchors, seed=0, epochs=[0] * len(rows))
    return batch.to(torch.device("cpu"), torch.float32)


def batch_of(rows: list[list[CapturedSample]]) -> tuple[PackedBatch, BlockBatch]:
    """Rows of documents and their blocks."""
    batch = pack(rows)
    return batch, build_blocks(batch, block_size=BLOCK_SIZE, mask_token_id=MASK_ID)
