"""Rows, order and windows are functions of the seed alone, and packing moves documents without changing them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from data_gen.cache.format import CapturedSample
from dflash2_train.config import ConfigError
from dflash2_train.data import Document, WindowLoader, collate, plan_epoch

WIDTH, TOP_K = 6, 3


def sample(number: int, length: int, prompt: int = 2) -> CapturedSample:
    generator = torch.Generator().manual_seed(number)
    return CapturedSample(
        sample_id=f"s{number}",
        input_ids=torch.arange(length, dtype=torch.int32) + 100 * number,
        loss_mask=torch.arange(length) >= prompt,
        tap_hidden=torch.randn(length, WIDTH, generator=generator).to(torch.bfloat16),
        teacher_ids=torch.randint(0, 50, (length, TOP_K), generator=generator, dtype=torch.int32),
        teacher_logprobs=torch.full((length, TOP_K), -1.0, dtype=torch.float16),
        teacher_log_normaliser=torch.zeros(length),
    )


class Store:
    def __init__(self, lengths: list[int]) -> None:
        self.samples = [sample(number, length) for number, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, sample_index: int) -> CapturedSample:
        return self.samples[sample_index]

    def documents(self) -> list[Document]:
        return [
            Document(index=i, num_tokens=len(s.input_ids), num_supervised=int(s.loss_mask.sum()))
            for i, s in enumerate(self.samples)
        ]


LENGTHS = [5, 9, 7, 12, 4, 8, 6, 10, 11, 5, 7, 9]


def loader(store: Store, *, rank: int = 0, world_size: int = 1, rows: int = 2, accumulation: int = 1) -> WindowLoader:
    return WindowLoader(
        store,
        store.documents(),
        row_tokens=16,
        rows=rows,
        accumulation=accumulation,
        anchors_per_document=3,
        seed=5,
        rank=rank,
        world_size=world_size,
    )


def test_an_epoch_uses_every_document_once_and_no_row_is_too_long() -> None:
    store = Store(LENGTHS)
    for epoch in range(3):
        rows = plan_epoch(store.documents(), row_tokens=16, seed=1, epoch=epoch)
        assert Counter(index for row in rows for index in row) == Counter(range(len(LENGTHS)))
        assert all(sum(LENGTHS[index] for index in row) <= 16 for row in rows)


def test_the_order_hangs_on_seed_and_epoch_alone() -> None:
    documents = Store(LENGTHS).documents()
    first = plan_epoch(documents, row_tokens=16, seed=1, epoch=0)
    assert first == plan_epoch(documents, row_tokens=16, seed=1, epoch=0)
    assert first != plan_epoch(documents, row_tokens=16, seed=1, epoch=1)
    assert first != plan_epoch(documents, row_tokens=16, seed=2, epoch=0)


def test_every_document_is_used_before_any_is_used_again() -> None:
    store = Store(LENGTHS)
    window = loader(store, rows=1)
    seen: list[str] = []
    rows = len(plan_epoch(store.documents(), row_tokens=16, seed=5, epoch=0))
    for position in range(rows):
        assert window.epoch_of(position) == 0
        seen += window.window(position)[0].sample_ids[0]
    assert sorted(seen) == sorted(f"s{i}" for i in range(len(LENGTHS)))
    assert window.epoch_of(rows) == 1


def test_a_packed_row_holds_each_document_unchanged_with_positions_restarting() -> None:
    store = Store([5, 7])
    batch = collate([[store.read(0), store.read(1)]], anchors_per_document=10, seed=0, epochs=[0])
    assert batch.position_ids[0].tolist() == [*range(5), *range(7)]
    assert batch.document_ids[0].tolist() == [0] * 5 + [1] * 7
    assert torch.equal(batch.tap_hidden[0, 5:], store.read(1).tap_hidden)
    assert torch.equal(batch.input_ids[0, :5], store.read(0).input_ids.long())
    # anchors: completion tokens followed by one; prompt is 2 tokens long
    assert batch.anchor_positions[0].tolist() == [2, 3, 7, 8, 9, 10]
    assert bool(batch.anchor_valid.all())


def test_padding_belongs_to_no_document_and_padding_anchors_are_invalid() -> None:
    store = Store([4, 9])
    batch = collate([[store.read(0)], [store.read(1)]], anchors_per_document=10, seed=0, epochs=[0, 0])
    assert batch.document_ids[0].tolist() == [0] * 4 + [-1] * 5
    assert batch.anchor_valid.sum(-1).tolist() == [1, 6]
    assert not bool(batch.loss_mask[0, 4:].any())


def test_two_ranks_share_the_window_that_one_rank_would_take() -> None:
    store = Store(LENGTHS)
    whole = loader(store, rows=2, accumulation=2)
    halves = [loader(store, rank=rank, world_size=2, rows=1, accumulation=2) for rank in range(2)]
    assert whole.rows_per_window == halves[0].rows_per_window == 4
    together = [row for batch in whole.window(4) for row in batch.sample_ids]
    spread = [row for half in halves for batch in half.window(4) for row in batch.sample_ids]
    assert sorted(map(tuple, together)) == sorted(map(tuple, spread))


def test_anchors_of_a_sample_do_not_change_with_its_row() -> None:
    store = Store([12, 6])
    alone = collate([[store.read(0)]], anchors_per_document=3, seed=0, epochs=[0])
    packed = collate([[store.read(1), store.read(0)]], anchors_per_document=3, seed=0, epochs=[0])
    assert alone.anchor_positions[0].tolist() == [a - 6 for a in packed.anchor_positions[0].tolist()[-3:]]


def test_a_document_longer_than_a_row_is_refused_with_the_length_it_needs() -> None:
    with pytest.raises(ConfigError, match="at least 40"):
        loader(Store([5, 40]))


def test_a_cache_without_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="no document"):
        loader(Store([]))
