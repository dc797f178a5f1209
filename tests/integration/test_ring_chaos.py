"""A few rounds of the chaos harness; many of them by hand: python -m tests.chaos.ring --runs 200."""

from __future__ import annotations

import json

import pytest

from tests.integration.forked import finish, fork_ranks_of


def rounds(runs: int, first: int) -> None:
    words = ["--runs", str(runs), "--first", str(first)]
    output = finish(fork_ranks_of("tests.chaos.ring", words, 1), timeout=300 + 60 * runs)
    summary = json.loads(output.splitlines()[-1])
    assert summary["killed"].keys() == {"trainer", "producer"}
    assert sum(summary["killed"].values()) >= runs


def test_killed_at_random_moments_a_stream_trains_on_exactly_what_was_planned_within_its_budget() -> None:
    rounds(runs=10, first=1)


@pytest.mark.slow
def test_the_same_a_hundred_times() -> None:
    rounds(runs=100, first=100)
