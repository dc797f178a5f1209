"""From packed rows to training blocks: where blocks start, what stands in their slots, what they are trained on.

The contract with the server, for a block anchored at token a of a document:

    slot 0      the anchor itself, a token already committed; never predicted
    slot k      the mask token at position a + k; predicts the token at a + k          k = 1 .. K = W - 1
    predecessor of slot k is the token at a + k - 1, and so is the row of the teacher that judges it
    supervised  while every label up to k is a completion token of the same document

Supervision stops at the first unsupervised label, because a server never keeps a token behind a rejected one.

Anchors are drawn per document from (seed, epoch, sample id) and nothing else, so that neither batch, rank nor padding
changes what a sample is trained on.

Letters: B rows, S context tokens, A blocks a row, W block size, K = W - 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PackedTensors(Protocol):
    """What blocks are cut from; ``data.PackedBatch`` has these fields."""

    @property
    def input_ids(self) -> Tensor: ...  # [B, S] int64
    @property
    def loss_mask(self) -> Tensor: ...  # [B, S] bool, True on completion tokens
    @property
    def position_ids(self) -> Tensor: ...  # [B, S] int64, restarts per document
    @property
    def document_ids(self) -> Tensor: ...  # [B, S] int64, padding -1
    @property
    def teacher_ids(self) -> Tensor: ...  # [B, S, T] int64; row i is the distribution of token i + 1
    @property
    def teacher_logprobs(self) -> Tensor: ...  # [B, S, T] float32
    @property
    def anchor_positions(self) -> Tensor: ...  # [B, A] int64, index in the row
    @property
    def anchor_valid(self) -> Tensor: ...  # [B, A] bool


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """Blocks of a packed batch. Values of padding blocks and of unsupervised slots are fixed and carry no data."""

    anchor_positions: Tensor  # [B, A] int64, index in the row
    block_valid: Tensor  # [B, A] bool
    block_ids: Tensor  # [B, A, W] int64: anchor, then the mask token
    block_position_ids: Tensor  # [B, A, W] int64: position in the document
    block_document_ids: Tensor  # [B, A] int64, padding -1
    target_ids: Tensor  # [B, A, K] int64: token at a + k; 0 where unsupervised
    predecessor_ids: Tensor  # [B, A, K] int64: token at a + k - 1; 0 where unsupervised
    supervised: Tensor  # [B, A, K] bool
    teacher_ids: Tensor  # [B, A, K, T] int64: row a + k - 1; 0 where unsupervised
    teacher_logprobs: Tensor  # [B, A, K, T] float32: row a + k - 1; -inf where unsupervised


def draw_anchors(loss_mask: Tensor, *, limit: int, seed: int, epoch: int, sample_id: str) -> Tensor:
    """Positions of one document at which blocks start.

    Eligible is a completion token that a completion token follows: the server's first anchor is the first token that
    the target writes, and a block needs at least one label.

    Args:
        loss_mask: [S] bool of one document; trailing False (padding) changes nothing.
        limit: anchors at most.
        seed: of the run.
        epoch: pass over the data, so that anchors differ between passes.
        sample_id: of the document. Seed, epoch, sample id and mask are all that the draw depends on.

    Returns:
        [n] int64, ascending, n <= limit; empty if no position is eligible.

    Raises:
        ValueError: ``loss_mask`` is not one bool document, or ``limit`` is not positive.
    """
    if loss_mask.dim() != 1 or loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask: needs one document, bool [S], got {loss_mask.dtype} {tuple(loss_mask.shape)}.")
    if limit < 1:
        raise ValueError(f"limit={limit}: must be positive. Set train.anchors_per_document to at least 1.")
    eligible = (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(-1)  # [n]
    if len(eligible) <= limit:
        return eligible
    digest = hashlib.sha256(f"{seed}/{epoch}/{sample_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: a signed seed
    chosen = torch.randperm(len(eligible), generator=generator)[:limit].to(eligible.device)
    return eligible[chosen.sort().values]


def build_blocks(batch: PackedTensors, *, block_size: int, mask_token_id: int) -> BlockBatch:
    """Cut the blocks of a packed batch.

    Args:
        batch: packed rows with their anchors.
        block_size: W, the anchor included.
        mask_token_id: id that fills slots 1 .. K.

    Raises:
        ValueError: ``block_size`` leaves nothing to predict.
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: needs the anchor and one drafted token.")
    anchors, valid = batch.anchor_positions, batch.anchor_valid
    slots = torch.arange(block_size, device=anchors.device)  # [W]
    positions = anchors.unsqueeze(-1) + slots  # [B, A, W], may run over the row's end
    inside = positions < batch.input_ids.shape[1]
    positions = positions.clamp_max(batch.input_ids.shape[1] - 1)

    tokens = _gather_rows(batch.input_ids, positions)  # [B, A, W]
    documents = _gather_rows(batch.document_ids, positions).masked_fill(~inside, -1)
    block_documents = documents[..., 0].masked_fill(~valid, -1)  # [B, A]
    label_ok = (documents == block_documents.unsqueeze(-1)) & _gather_rows(batch.loss_mask, positions)
    supervised = label_ok[..., 1:].cumprod(-1).bool() & valid.unsqueeze(-1)  # [B, A, K]

    teacher_rows = positions[..., :-1]  # row a + k - 1 judges slot k
    hidden = ~supervised
    return BlockBatch(
        anchor_positions=anchors,
        block_valid=valid,
        block_ids=torch.where(slots == 0, tokens, mask_token_id),
        block_position_ids=_gather_rows(batch.position_ids, anchors).unsqueeze(-1) + slots,
        block_document_ids=block_documents,
        target_ids=tokens[..., 1:].masked_fill(hidden, 0),
        predecessor_ids=tokens[..., :-1].masked_fill(hidden, 0),
        supervised=supervised,
        teacher_ids=_gather_rows(batch.teacher_ids, teacher_rows).masked_fill(hidden.unsqueeze(-1), 0),
        teacher_logprobs=_gather_rows(batch.teacher_logprobs, teacher_rows).masked_fill(
            hidden.unsqueeze(-1), float("-inf")
        ),
    )


def _gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """``source[b, index[b, ...]]`` for [B, S, ...] and [B, ...]: result [B, ..., (rest of source)]."""
    rows = torch.arange(source.shape[0], device=source.device).view(-1, *[1] * (index.dim() - 1))
    return source[rows, index]
