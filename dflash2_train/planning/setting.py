"""What decides the memory of a training step: shapes, batch, options, device."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from dflash2_train.budgets import ANCHORS_MULTIPLE, TOKENS_MULTIPLE, round_up
from dflash2_train.config import LossConfig, RunConfig, TrainConfig, absolute
from dflash2_train.model.drafter_config import DrafterShape

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The sizes of one micro-batch on one rank, padding included."""

    rows: int  # B
    tokens: int  # S, of a row
    anchors: int  # A, blocks of a row
    block_size: int  # W
    document_tokens: float  # mean, for the keys that a block sees

    @property
    def slots(self) -> int:
        """N = B A W."""
        return self.rows * self.anchors * self.block_size

    @property
    def labels(self) -> int:
        """N at most: all slots but the anchors."""
        return self.rows * self.anchors * (self.block_size - 1)

    @property
    def context(self) -> int:
        """Context tokens of all rows, B S."""
        return self.rows * self.tokens


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One rank's step."""

    shape: DrafterShape
    batch: MicroBatch
    train: TrainConfig
    loss: LossConfig
    ranks: int
    device: str  # cpu | cuda
    teacher_top_k: int  # k
    tied: bool  # the target's head is its embedding

    @property
    def itemsize(self) -> int:
        """e, bytes of an element in the training dtype."""
        return ITEM_BYTES[self.train.dtype]

    @property
    def path(self) -> str:
        """The attention path that ``auto`` stands for."""
        if self.train.attention != "auto":
            return self.train.attention
        return "flex" if self.device == "cuda" else "chunked"

    def with_batch(self, batch: MicroBatch) -> Setting:
        """The same step on another batch."""
        return replace(self, batch=batch)


def document_lengths(config: RunConfig) -> tuple[float, float]:
    """Mean tokens of a prompt and of an answer, as the plan assumes them."""
    answer = config.plan.answer_tokens
    return config.plan.prompt_tokens, float(config.data.sampling.max_tokens if answer is None else answer)


def usual_batch(config: RunConfig) -> MicroBatch:
    """Rows filled with documents of the assumed mean length, each with all anchors that it can have."""
    train, (prompt, answer) = config.train, document_lengths(config)
    document = min(prompt + answer, float(train.row_tokens))
    anchors = min(float(train.anchors_per_document), max(1.0, answer - 1)) * train.row_tokens / document
    return _batch(config, anchors=int(anchors), document=document)


def fullest_batch(config: RunConfig) -> MicroBatch:
    """No row can hold more: a block at every token, as answers shorter than ``train.anchors_per_document`` would."""
    document = min(float(config.train.anchors_per_document), float(config.train.row_tokens))
    return _batch(config, anchors=config.train.row_tokens, document=document)


def _batch(config: RunConfig, *, anchors: int, document: float) -> MicroBatch:
    train = config.train
    return MicroBatch(
        rows=train.rows,
        tokens=round_up(train.row_tokens, TOKENS_MULTIPLE),
        anchors=round_up(max(1, min(anchors, train.row_tokens)), ANCHORS_MULTIPLE),
        block_size=config.drafter.block_size,
        document_tokens=document,
    )


def make_setting(config: RunConfig, batch: MicroBatch | None = None) -> Setting:
    """The step of an experiment on the machine of its plan; ``batch`` in place of the usual one."""
    return Setting(
        shape=DrafterShape.from_config(config),
        batch=usual_batch(config) if batch is None else batch,
        train=config.train,
        loss=config.loss,
        ranks=config.plan.hardware.devices,
        device=config.plan.hardware.kind,
        teacher_top_k=config.data.teacher_top_k,
        tied=target_is_tied(config),
    )


def target_is_tied(config: RunConfig) -> bool:
    """Whether the target's folder is here and says that head and embedding are one; two tables otherwise, the more."""
    path = absolute(config.target.name) / "config.json"
    if not path.is_file():
        return False
    stated = json.loads(path.read_text(encoding="utf-8")).get("tie_word_embeddings", False)
    return stated is True
