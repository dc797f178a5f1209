"""The training order is a function of documents and seed alone: whole, repeatable, and the same for every reader."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.row_plan import Document, RowPlan, documents_digest, plan_epoch, trainable
from dflash2_train.config import ConfigError
from tests.ring_cases import ROW_TOKENS, SEED, make_documents


def plan(count: int = 12, *, segment_rows: int = 1, reuse: int = 1) -> RowPlan:
    documents = make_documents(count)
    return RowPlan(documents, row_tokens=ROW_TOKENS, seed=SEED, segment_rows=segment_rows, reuse=reuse)


def names(plan: RowPlan, number: int) -> list[str]:
    return [document.sample_id for document in plan.row(number).documents]


def test_an_epoch_uses_every_document_once_and_no_row_is_too_long() -> None:
    documents = make_documents(40)
    for epoch in range(3):
        rows = plan_epoch(documents, row_tokens=ROW_TOKENS, seed=1, epoch=epoch)
        assert Counter(place for row in rows for place in row) == Counter(range(40))
        assert all(sum(documents[place].num_tokens for place in row) <= ROW_TOKENS for row in rows)


def test_the_order_hangs_on_seed_and_epoch_alone() -> None:
    documents = make_documents(40)
    first = plan_epoch(documents, row_tokens=ROW_TOKENS, seed=1, epoch=0)
    assert first == plan_epoch(documents, row_tokens=ROW_TOKENS, seed=1, epoch=0)
    assert first != plan_epoch(documents, row_tokens=ROW_TOKENS, seed=1, epoch=1)
    assert first != plan_epoch(documents, row_tokens=ROW_TOKENS, seed=2, epoch=0)


def test_the_order_does_not_hang_on_the_order_in_which_documents_are_found() -> None:
    documents = make_documents(12)
    assert trainable(reversed(documents)) == documents
    assert documents_digest(trainable(reversed(documents))) == documents_digest(documents)


def test_documents_without_an_anchor_and_a_label_are_left_out() -> None:
    documents = [Document(sample_id=f"d{n}", num_tokens=9, num_supervised=n) for n in range(4)]
    assert [document.sample_id for document in trainable(documents)] == ["d2", "d3"]


def test_two_documents_of_one_id_are_refused() -> None:
    twins = [Document(sample_id="twin", num_tokens=9, num_supervised=5)] * 2
    with pytest.raises(CacheIntegrityError, match="twin occurs more than once"):
        trainable(twins)


def test_every_document_is_used_before_any_is_used_again() -> None:
    endless = plan()
    rows = 0
    seen: list[str] = []
    while endless.row(rows).epoch == 0:
        seen += names(endless, rows)
        rows += 1
    assert sorted(seen) == [document.sample_id for document in endless.documents]
    assert endless.row(rows).epoch == 1


def test_a_row_far_ahead_is_the_same_whether_it_is_reached_or_jumped_to() -> None:
    walked, jumped = plan(), plan()
    walk = [names(walked, number) for number in range(60)]
    assert names(jumped, 59) == walk[59]
    assert [names(jumped, number) for number in range(60)] == walk, "and going back gives what was there"


def test_threads_that_share_a_plan_get_what_one_would() -> None:
    alone, shared = plan(), plan()
    numbers = [number * 7 % 60 for number in range(240)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: names(shared, number), numbers))
    assert found == [names(alone, number) for number in numbers]


def test_segments_do_not_change_the_order_of_rows() -> None:
    assert [names(plan(segment_rows=4), number) for number in range(30)] == [
        names(plan(), number) for number in range(30)
    ]


@pytest.mark.parametrize("reuse", [1, 2, 3])
def test_a_segment_holds_each_document_of_its_rows_once_and_nothing_else(reuse: int) -> None:
    endless = plan(segment_rows=4, reuse=reuse)
    for segment in range(6):
        first = endless.first_row_of(segment)
        rows = range(first, endless.first_row_of(segment + 1))
        assert {endless.segment_of(number) for number in rows} == {endless.row(number).segment for number in rows}
        used = {name for number in rows for name in names(endless, number)}
        held = [document.sample_id for document in endless.segment_documents(segment)]
        assert len(held) == len(set(held))
        assert set(held) == used


def test_reuse_plays_the_rows_of_a_segment_so_many_times_with_other_anchors_each_time() -> None:
    once, thrice = plan(segment_rows=4), plan(segment_rows=4, reuse=3)
    for segment in range(4):
        expected = Counter(tuple(names(once, segment * 4 + place)) for place in range(4))
        played = [thrice.row(thrice.first_row_of(segment) + place) for place in range(12)]
        for turn in range(3):
            rows = played[4 * turn : 4 * turn + 4]
            assert Counter(tuple(document.sample_id for document in row.documents) for row in rows) == expected
            assert {row.draw - 3 * row.epoch for row in rows} == {turn}


def test_a_document_longer_than_a_row_is_refused_with_the_length_it_needs() -> None:
    documents = [Document(sample_id="long", num_tokens=40, num_supervised=9)]
    with pytest.raises(ConfigError, match="at least 40"):
        RowPlan(documents, row_tokens=16, seed=0)


def test_a_plan_without_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="no document"):
        RowPlan([], row_tokens=16, seed=0)
