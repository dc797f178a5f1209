"""From planned rows to packed batches.

Which documents lie in which row is told by :class:`data_gen.cache.row_plan.RowPlan`, an endless list of rows; where
their samples come from, a cache or a ring, by a :class:`RowSource`. A window is what one optimizer step takes:
``accumulation`` micro-batches of ``rows`` rows on each of ``world_size`` ranks. The same global window holds the same
rows on any number of ranks and from any source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample, CaptureManifest, IndexRow
from data_gen.cache.row_plan import PlannedRow, RowPlan
from dflash2_train.blocks import draw_anchors
from dflash2_train.budgets import ANCHORS_MULTIPLE, TOKENS_MULTIPLE
from dflash2_train.shapes import round_up


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

    def pinned(self) -> PackedBatch:
        """All tensors in page-locked memory; those that are there already stay."""
        pinned: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                pinned[name] = value.pin_memory()
        return replace(self, **pinned)

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedBatch:
        """All tensors on ``device``; the tap states in ``dtype``."""
        moved: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
        moved["tap_hidden"] = moved["tap_hidden"].to(dtype)
        return replace(self, **moved)


class RowSource(Protocol):
    """Where the samples of planned rows come from."""

    width: int  # T*H, features of a token's tap states

    def announce(self, rows: Sequence[PlannedRow]) -> None:
        """These rows will be read soon: a chance to fetch them from a slow disk meanwhile."""
        ...

    def read(self, row: PlannedRow, states: Tensor) -> list[CapturedSample]:
        """Samples of a row, in order; may wait for them.

        Args:
            row: which documents.
            states: [N, T*H] bf16 for the row's N tokens; filled, and the samples' ``tap_hidden`` are parts of it. So
                the one large tensor goes from the disk into its batch without a stop.
        """
        ...

    def passed(self, number: int) -> None:
        """This rank will read no row before ``number`` any more."""
        ...


class SampleReader(Protocol):
    """What :class:`CachedRows` needs of a cache reader."""

    manifest: CaptureManifest

    @property
    def index(self) -> Sequence[IndexRow]: ...

    def read(self, sample_index: int, states: Tensor | None = None) -> CapturedSample: ...

    def prefetch(self, sample_indices: Iterable[int]) -> None: ...


class CachedRows:
    """Rows out of a capture cache, which is there as a whole.

    Their order is a uniform shuffle of all documents. Shuffling within a few shards at a time would read no faster: a
    document's states are one range of its shard, hundreds of KiB for the smallest targets and 72 KiB a token for
    GLM-5.3-Flash, and :meth:`announce` has the next window's ranges fetched while this one is trained on.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        content = reader.manifest.content
        self.width = len(content["target_layer_ids"]) * content["hidden_size"]
        self._place = {entry.sample_id: place for place, entry in enumerate(reader.index)}

    def sample(self, sample_id: str) -> CapturedSample:
        """One sample by id."""
        return self._reader.read(self._place[sample_id])

    def read(self, row: PlannedRow, states: Tensor) -> list[CapturedSample]:
        """Samples of a row, in order, their states in ``states``."""
        return [
            self._reader.read(self._place[document.sample_id], part)
            for document, part in zip(row.documents, split_states(row, states), strict=True)
        ]

    def announce(self, rows: Sequence[PlannedRow]) -> None:
        """Have the rows' states brought into the page cache."""
        self._reader.prefetch(self._place[document.sample_id] for row in rows for document in row.documents)

    def passed(self, number: int) -> None:
        """Nothing is released: the cache stays."""


def split_states(row: PlannedRow, states: Tensor) -> tuple[Tensor, ...]:
    """The parts of a row's ``states`` [N, T*H] that belong to its documents."""
    return states.split([document.num_tokens for document in row.documents])


def padded_length(lengths: Sequence[int]) -> int:
    """S of a batch whose rows hold so many tokens."""
    return round_up(max(lengths), TOKENS_MULTIPLE)


def collate(
    rows: Sequence[Sequence[CapturedSample]],
    *,
    anchors_per_document: int,
    seed: int,
    epochs: Sequence[int],
    tap_hidden: Tensor | None = None,
) -> PackedBatch:
    """Pack rows of samples into one padded batch and draw every document's anchors.

    Args:
        rows: the documents of each row, in order.
        anchors_per_document: at most so many anchors a document.
        seed: with epoch and sample id it fixes the draw.
        epochs: one entry a row.
        tap_hidden: [B, S, T*H], if the states are in their places already.
    """
    length = padded_length([sum(len(sample.input_ids) for sample in row) for row in rows])
    first = rows[0][0]
    top_k = first.teacher_ids.shape[1]
    shape = (len(rows), length)
    if tap_hidden is None:
        tap_hidden = torch.zeros((*shape, first.tap_hidden.shape[1]), dtype=first.tap_hidden.dtype)
        for b, row in enumerate(rows):
            states = torch.cat([sample.tap_hidden for sample in row])
            tap_hidden[b, : len(states)] = states
    input_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    document_ids = torch.full(shape, -1, dtype=torch.int64)
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
            teacher_ids[b, span] = sample.teacher_ids.to(torch.int64)
            teacher_logprobs[b, span] = sample.teacher_logprobs.to(torch.float32)
            draw = draw_anchors(
                sample.loss_mask, limit=anchors_per_document, seed=seed, epoch=epochs[b], sample_id=sample.sample_id
            )
            drawn.append(draw + start)
            start += size
        anchors.append(torch.cat(drawn))
    count = round_up(max(1, *(len(row_anchors) for row_anchors in anchors)), ANCHORS_MULTIPLE)
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
        source: samples of planned rows.
        plan: the endless list of rows.
        rows, accumulation, anchors_per_document, seed: as in ``train.*``.
        rank, world_size: this process among all.
        pin: batches in page-locked memory, from where a copy to the GPU runs beside other work.
    """

    def __init__(
        self,
        source: RowSource,
        plan: RowPlan,
        *,
        rows: int,
        accumulation: int,
        anchors_per_document: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        pin: bool = False,
    ) -> None:
        self._source, self._plan, self._pin = source, plan, pin
        self._rows, self._accumulation = rows, accumulation
        self._anchors, self._seed = anchors_per_document, seed
        self._rank, self._world_size = rank, world_size

    @property
    def rows_per_window(self) -> int:
        """Rows that one optimizer step takes on all ranks together."""
        return self._rows * self._accumulation * self._world_size

    def epoch_of(self, rows_consumed: int) -> int:
        """Epoch of the next row after ``rows_consumed``."""
        return self._plan.row(rows_consumed).epoch

    def window(self, rows_consumed: int) -> list[PackedBatch]:
        """The micro-batches of the window that starts at row ``rows_consumed``, for this rank.

        Windows must be read in order: the source is told what will not be read again.
        """
        batches = []
        self._source.announce([row for rows in self._planned(rows_consumed + self.rows_per_window) for row in rows])
        for micro, planned in enumerate(self._planned(rows_consumed)):
            batches.append(self._batch(planned))
            self._source.passed(self._first_row(rows_consumed, micro) + self._rows * self._world_size)
        return batches

    def _first_row(self, rows_consumed: int, micro: int) -> int:
        """Number of this rank's first row in a micro-batch of a window."""
        return rows_consumed + (micro * self._world_size + self._rank) * self._rows

    def _planned(self, rows_consumed: int) -> list[list[PlannedRow]]:
        """This rank's rows of a window, by micro-batch."""
        starts = [self._first_row(rows_consumed, micro) for micro in range(self._accumulation)]
        return [[self._plan.row(number) for number in range(start, start + self._rows)] for start in starts]

    def _batch(self, planned: Sequence[PlannedRow]) -> PackedBatch:
        lengths = [sum(document.num_tokens for document in row.documents) for row in planned]
        shape = (len(planned), padded_length(lengths), self._source.width)
        tap_hidden = torch.empty(shape, dtype=torch.bfloat16, pin_memory=self._pin)
        rows = []
        for row, length, states in zip(planned, lengths, tap_hidden, strict=True):
            rows.append(self._source.read(row, states[:length]))
            states[length:] = 0
        batch = collate(
            rows,
            anchors_per_document=self._anchors,
            seed=self._seed,
            epochs=[row.draw for row in planned],
            tap_hidden=tap_hidden,
        )
        return batch.pinned() if self._pin else batch
