"""A cache that is killed, torn and damaged at random is whole again after the same commands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.store import chaos_run

RUNS = 20


@pytest.mark.slow
def test_nothing_is_lost_twice_or_silent_in_a_cache_broken_at_random(tmp_path: Path) -> None:
    told: Counter[str] = Counter()
    for seed in range(RUNS):
        told += chaos_run(tmp_path, seed)
    for name in ("writer killed", "two writers at once", "shards set aside", "refused by the reader"):
        assert told[name] > 0, f"the runs did not reach: {name}"
    assert any(name.startswith("disk full") for name in told)
