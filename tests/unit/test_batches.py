"""Batches hold every sequence once, in bounds, and no padding where none is allowed."""

from __future__ import annotations

import random

import pytest

from data_gen.backends.batches import length_batches


@pytest.mark.parametrize("equal", [False, True])
def test_every_sequence_is_in_one_batch_within_rows_and_tokens(equal: bool) -> None:
    lengths = [random.Random(7).randint(1, 40) for _ in range(3)] + [12, 90, 12, 12, 40, 1, 1]
    batches = length_batches(lengths, max_rows=3, max_tokens=80, equal=equal)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        widest = max(lengths[place] for place in batch)
        assert len(batch) <= 3
        assert len(batch) == 1 or widest * len(batch) <= 80
        assert not equal or {lengths[place] for place in batch} == {widest}


def test_like_lengths_come_together_longest_first() -> None:
    assert length_batches([5, 40, 6, 39], max_rows=2, max_tokens=1000, equal=False) == [[1, 3], [2, 0]]


def test_nothing_gives_no_batch() -> None:
    assert length_batches([], max_rows=2, max_tokens=8, equal=True) == []
