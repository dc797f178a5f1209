"""Windows follow from the plan alone; packing does not change a document, and reading ahead changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from data_gen.cache.format import CapturedSample
from data_gen.cache.row_plan import PlannedRow, RowPlan
from dflash2_train.data import ANCHORS_MULTIPLE, TOKENS_MULTIPLE, PackedBatch, WindowLoader, collate
from dflash2_train.prefetch import Prefetcher
from tests.ring_cases import PROMPT, ROW_TOKENS, SEED, PlainRows, make_documents, sample_of

DOCUMENTS = make_documents(30)
SHORT, LONG = sorted(DOCUMENTS, key=lambda document: document.num_tokens)[:: len(DOCUMENTS) - 1]


def loader(
    source: PlainRows | None = None, *, rank: int = 0, world_size: int = 1, rows: int = 2, accumulation: int = 1
) -> WindowLoader:
    return WindowLoader(
        PlainRows() if source is None else source,
        RowPlan(DOCUMENTS, row_tokens=ROW_TOKENS, seed=SEED),
        rows=rows,
        accumulation=accumulation,
        anchors_per_document=3,
        seed=SEED,
        rank=rank,
        world_size=world_size,
    )


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    tensors = [name for name, value in vars(one).items() if isinstance(value, torch.Tensor)]
    same = all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
    return same and one.sample_ids == other.sample_ids


def valid_anchors(batch: PackedBatch) -> list[int]:
    return batch.anchor_positions[0][batch.anchor_valid[0]].tolist()  # type: ignore[no-any-return]


def test_a_packed_row_holds_each_document_unchanged_with_positions_restarting() -> None:
    one, two = sample_of(SHORT), sample_of(LONG)
    batch = collate([[one, two]], anchors_per_document=100, seed=0, epochs=[0])
    size = len(one) + len(two)
    assert batch.position_ids[0, :size].tolist() == [*range(len(one)), *range(len(two))]
    assert batch.document_ids[0, :size].tolist() == [0] * len(one) + [1] * len(two)
    assert torch.equal(batch.tap_hidden[0, len(one) : size], two.tap_hidden)
    assert torch.equal(batch.input_ids[0, : len(one)], one.input_ids.long())
    # anchors: completion tokens followed by one
    second = [len(one) + place for place in range(PROMPT, len(two) - 1)]
    assert valid_anchors(batch) == [*range(PROMPT, len(one) - 1), *second]


def test_padding_belongs_to_no_document_and_padding_anchors_are_invalid() -> None:
    one, two = sample_of(SHORT), sample_of(LONG)
    batch = collate([[one], [two]], anchors_per_document=100, seed=0, epochs=[0, 0])
    assert batch.document_ids[0].tolist() == [0] * len(one) + [-1] * (batch.input_ids.shape[1] - len(one))
    assert batch.anchor_valid.sum(-1).tolist() == [len(one) - PROMPT - 1, len(two) - PROMPT - 1]
    assert not bool(batch.loss_mask[0, len(one) :].any())


def test_anchors_of_a_sample_do_not_change_with_its_row() -> None:
    one, two = sample_of(SHORT), sample_of(LONG)
    alone = collate([[two]], anchors_per_document=3, seed=0, epochs=[0])
    packed = collate([[one, two]], anchors_per_document=3, seed=0, epochs=[0])
    assert valid_anchors(alone) == [anchor - len(one) for anchor in valid_anchors(packed)[-3:]]


def test_batches_of_many_sizes_have_few_shapes() -> None:
    windows = loader(rows=1)
    shapes = {
        (*batch.input_ids.shape, batch.anchor_positions.shape[1])
        for start in range(40)
        for batch in windows.window(start)
    }
    assert all(length % TOKENS_MULTIPLE == 0 and anchors % ANCHORS_MULTIPLE == 0 for _, length, anchors in shapes)
    assert len(shapes) < 4


def test_two_ranks_share_the_window_that_one_rank_would_take() -> None:
    whole = loader(rows=2, accumulation=2)
    halves = [loader(rank=rank, world_size=2, rows=1, accumulation=2) for rank in range(2)]
    assert whole.rows_per_window == halves[0].rows_per_window == 4
    together = [row for batch in whole.window(4) for row in batch.sample_ids]
    spread = [row for half in halves for batch in half.window(4) for row in batch.sample_ids]
    assert sorted(map(tuple, together)) == sorted(map(tuple, spread))


def test_a_source_is_told_a_row_is_behind_only_when_this_rank_reads_none_before_it_any_more() -> None:
    class Told(PlainRows):
        def __init__(self) -> None:
            self.behind = 0

        def passed(self, number: int) -> None:
            assert number > self.behind
            self.behind = number

    sources = [Told(), Told()]
    plan = RowPlan(DOCUMENTS, row_tokens=ROW_TOKENS, seed=SEED)
    numbers = {tuple(document.sample_id for document in plan.row(n).documents): n for n in range(12)}
    for rank, source in enumerate(sources):
        ahead = loader(source, rank=rank, world_size=2, rows=1, accumulation=2)
        for start in range(0, 12, ahead.rows_per_window):
            before = source.behind
            read = [numbers[tuple(row)] for batch in ahead.window(start) for row in batch.sample_ids]
            assert min(read) >= before
            assert source.behind > max(read)


def test_a_window_announces_to_the_source_exactly_the_rows_that_the_next_one_reads() -> None:
    class Listening(PlainRows):
        def __init__(self) -> None:
            self.announced: list[PlannedRow] = []
            self.taken: list[PlannedRow] = []

        def announce(self, rows: Sequence[PlannedRow]) -> None:
            self.announced = list(rows)

        def read(self, row: PlannedRow, states: torch.Tensor) -> list[CapturedSample]:
            self.taken.append(row)
            return super().read(row, states)

    source = Listening()
    windows = loader(source, rank=1, world_size=2, rows=2, accumulation=2)
    windows.window(0)
    announced, source.taken = source.announced, []
    windows.window(windows.rows_per_window)
    assert announced == source.taken and len(announced) == 4


def test_windows_read_ahead_are_those_that_would_be_read_when_needed() -> None:
    plain = loader(accumulation=2)
    with Prefetcher(loader(accumulation=2), start=4, windows=5, depth=3, closing=threading.Event()) as ahead:
        for start in range(4, 4 + 5 * plain.rows_per_window, plain.rows_per_window):
            for one, other in zip(plain.window(start), ahead.next(), strict=True):
                assert equal(one, other)


class Counting(PlainRows):
    """Counts rows and fails at one of them."""

    def __init__(self, fail_at: int = -1) -> None:
        self.rows, self.fail_at = 0, fail_at

    def read(self, row: PlannedRow, states: torch.Tensor) -> list[CapturedSample]:
        if self.rows == self.fail_at:
            raise OSError("the disk is gone")
        self.rows += 1
        return super().read(row, states)


def test_no_more_windows_are_read_ahead_than_allowed_and_none_beyond_the_last() -> None:
    source = Counting()
    ahead = Prefetcher(loader(source), start=0, windows=4, depth=2, closing=threading.Event())
    for taken in range(1, 5):
        ahead.next()
        assert source.rows <= 2 * (taken + 2)
    ahead.close()
    assert source.rows == 2 * 4


def test_a_fault_while_reading_ahead_is_raised_where_its_window_would_have_come() -> None:
    with Prefetcher(loader(Counting(fail_at=2)), start=0, windows=9, depth=3, closing=threading.Event()) as ahead:
        ahead.next()
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.next()


def test_closing_asks_a_waiting_source_to_give_up_and_leaves_no_thread() -> None:
    closing = threading.Event()

    class Waiting(PlainRows):
        def read(self, row: PlannedRow, states: torch.Tensor) -> list[CapturedSample]:
            assert closing.wait(30)
            raise InterruptedError

    before = threading.active_count()
    ahead = Prefetcher(loader(Waiting()), start=0, windows=9, depth=2, closing=closing)
    ahead.close()
    assert closing.is_set()
    assert threading.active_count() == before


def test_the_time_spent_waiting_is_counted() -> None:
    release = threading.Event()

    class Slow(PlainRows):
        def read(self, row: PlannedRow, states: torch.Tensor) -> list[CapturedSample]:
            release.wait(0.02)
            return super().read(row, states)

    with Prefetcher(loader(Slow()), start=0, windows=2, depth=1, closing=threading.Event()) as ahead:
        ahead.next()
        assert ahead.wait_seconds > 0.01
