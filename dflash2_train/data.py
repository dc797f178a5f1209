"""From the capture cache to packed rows: which documents, in which order, in which row.

The order is a function of (seed, epoch) alone and the rows of all epochs form one endless list, so the position
of a run is a single number, the rows consumed. Every document is used once before any is used again. A window is what
one optimizer step takes: ``accumulation`` micro-batches of ``rows`` rows on each of ``world_size`` ranks. The same
global window holds the same rows on any number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import draw_anchors
from dflash2_train.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """B rows of packed documents. S context tokens a row, A anchors a row, T taps, H hidden, k teacher entries."""

    input_ids: Tensor  # [B, S] int64, pad 0
    loss_mask: Tensor  # [B, S] bool, True on completion tokens
    position_ids: Tensor  # [B, S] int64, restarting with each document
    document_ids: Tensor  # [B, S] int64, 0.. within the row, pad -1
    tap_hidden: Tensor  # [B, S, T*H] bf16
    teacher_ids: Tensor  # [B, S, k] int64
    teacher_logprobs: Tensor  # [B, S, k] fp32; row i is the target's distribution of token i + 1
    anchor_positions: Tensor  # [B, A] int64, index in the row, pad 0
    anchor_valid: Tensor  # [B, A] bool
    sample_ids: list[list[str]]  # documents of each row

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedBatch:
        """All tensors on ``device``; the tap states in ``dtype``."""
        moved: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
        moved["tap_hidden"] = moved["tap_hidden"].to(dtype)
        return replace(self, **moved)


class SampleStore(Protocol):
    """What the loader needs of a cache reader."""

    def __len__(self) -> int: ...

    def read(self, sample_index: int) -> CapturedSample: ...


@dataclass(frozen=True, kw_only=True)
class Document:
    """One captured sample as the packer sees it."""

    index: int  # in the reader
    num_tokens: int
    num_supervised: int


def plan_epoch(documents: Sequence[Document], *, row_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of one epoch: lists of reader indices whose token counts fit ``row_tokens``.

    Documents are shuffled by (seed, epoch) and put into the first of a few open rows that has room, so
    that rows are nearly full and their order stays random.
    """
    order = list(documents)
    random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - a data order, not a secret
    open_rows: list[tuple[int, list[int]]] = []
    rows: list[list[int]] = []
    for document in order:
        for slot, (free, members) in enumerate(open_rows):
            if document.num_tokens <= free:
                members.append(document.index)
                open_rows[slot] = (free - document.num_tokens, members)
                break
        else:
            open_rows.append((row_tokens - document.num_tokens, [document.index]))
            if len(open_rows) > 16:
                rows.append(open_rows.pop(0)[1])
    rows.extend(members for _, members in open_rows)
    return rows


def collate(
    rows: Sequence[Sequence[CapturedSample]], *, anchors_per_document: int, seed: int, epochs: Sequence[int]
) -> PackedBatch:
    """Pack rows of samples into one padded batch and draw every document's anchors.

    Args:
        rows: the documents of each row, in order.
        anchors_per_document: at most so many anchors a document.
        seed: with epoch and sample id it fixes the draw.
        epochs: one entry a row.
    """
    length = max(sum(len(sample.input_ids) for sample in row) for row in rows)
    first = rows[0][0]
    width, top_k = first.tap_hidden.shape[1], first.teacher_ids.shape[1]
    shape = (len(rows), length)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    document_ids = torch.full(shape, -1, dtype=torch.int64)
    tap_hidden = torch.zeros((*shape, width), dtype=first.tap_hidden.dtype)
    teacher_ids = torch.zeros((*shape, top_k), dtype=torch.int64)
    teacher_logprobs = torch.full((*shape, top_k), float("-inf"), dtype=torch.float32)
    anchors: list[Tensor] = []
    for b, row in enumerate(rows):
        start = 0
        drawn = []
        for d, sample in enumerate(row):
            size = len(sample.input_ids)
            span = slice(start, start + size)
            input_ids[b, span] = sample.input_ids.to(torch.int64)
            loss_mask[b, span] = sample.loss_mask
            position_ids[b, span] = torch.arange(size)
            document_ids[b, span] = d
            tap_hidden[b, span] = sample.tap_hidden
            teacher_ids[b, span] = sample.teacher_ids.to(torch.int64)
            teacher_logprobs[b, span] = sample.teacher_logprobs.to(torch.float32)
            draw = draw_anchors(
                sample.loss_mask, limit=anchors_per_document, seed=seed, epoch=epochs[b], sample_id=sample.sample_id
            )
            drawn.append(draw + start)
            start += size
        anchors.append(torch.cat(drawn))
    count = max(1, max(len(row_anchors) for row_anchors in anchors))
    anchor_positions = torch.zeros((len(rows), count), dtype=torch.int64)
    anchor_valid = torch.zeros((len(rows), count), dtype=torch.bool)
    for b, row_anchors in enumerate(anchors):
        anchor_positions[b, : len(row_anchors)] = row_anchors
        anchor_valid[b, : len(row_anchors)] = True
    return PackedBatch(
        input_ids=input_ids,
        loss_mask=loss_mask,
        position_ids=position_ids,
        document_ids=document_ids,
        tap_hidden=tap_hidden,
        teacher_ids=teacher_ids,
        teacher_logprobs=teacher_logprobs,
        anchor_positions=anchor_positions,
        anchor_valid=anchor_valid,
        sample_ids=[[sample.sample_id for sample in row] for row in rows],
    )


class WindowLoader:
    """Hands out, window by window, this rank's micro-batches.

    Args:
        store: the capture cache.
        documents: those to train on; documents that hold no anchor are left out by the caller.
        row_tokens, rows, accumulation, anchors_per_document, seed: as in ``train.*``.
        rank, world_size: this process among all.

    Raises:
        ConfigError: a document longer than ``row_tokens``, or no document at all.
    """

    def __init__(
        self,
        store: SampleStore,
        documents: Sequence[Document],
        *,
        row_tokens: int,
        rows: int,
        accumulation: int,
        anchors_per_document: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        longest = max((document.num_tokens for document in documents), default=0)
        if longest == 0:
            raise ConfigError(
                "the cache holds no document with an anchor and a label. Regenerate with longer completions."
            )
        if longest > row_tokens:
            raise ConfigError(
                f"train.row_tokens={row_tokens}: the longest cached document has {longest} tokens and must fit a row. "
                f"Set train.row_tokens to at least {longest}."
            )
        self._store, self._documents = store, list(documents)
        self._row_tokens, self._rows, self._accumulation = row_tokens, rows, accumulation
        self._anchors, self._seed = anchors_per_document, seed
        self._rank, self._world_size = rank, world_size
        self._epoch_rows: list[list[list[int]]] = []

    @property
    def rows_per_window(self) -> int:
        """Rows that one optimizer step takes on all ranks together."""
        return self._rows * self._accumulation * self._world_size

    def _row(self, number: int) -> tuple[int, list[int]]:
        """(epoch, reader indices) of row ``number`` of the endless list."""
        epoch = 0
        while True:
            if epoch == len(self._epoch_rows):
                self._epoch_rows.append(
                    plan_epoch(self._documents, row_tokens=self._row_tokens, seed=self._seed, epoch=epoch)
                )
            if number < len(self._epoch_rows[epoch]):
                return epoch, self._epoch_rows[epoch][number]
            number -= len(self._epoch_rows[epoch])
            epoch += 1

    def epoch_of(self, rows_consumed: int) -> int:
        """Epoch of the next row after ``rows_consumed``."""
        return self._row(rows_consumed)[0]

    def window(self, rows_consumed: int) -> list[PackedBatch]:
        """The micro-batches of the window that starts at row ``rows_consumed``, for this rank."""
        batches = []
        for micro in range(self._accumulation):
            start = rows_consumed + (micro * self._world_size + self._rank) * self._rows
            planned = [self._row(number) for number in range(start, start + self._rows)]
            batches.append(
                collate(
                    [[self._store.read(index) for index in members] for _, members in planned],
                    anchors_per_document=self._anchors,
                    seed=self._seed,
                    epochs=[epoch for epoch, _ in planned],
                )
            )
        return batches
