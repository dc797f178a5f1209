"""A few rounds of the chaos harness; many of them by hand: python -m tests.chaos.ring --runs 200."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def rounds(runs: int, first: int) -> None:
    command = [sys.executable, "-m", "tests.chaos.ring", "--runs", str(runs), "--first", str(first)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300 + 60 * runs)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["killed"].keys() == {"trainer", "producer"}
    assert sum(summary["killed"].values()) >= runs


def test_killed_at_random_moments_a_stream_trains_on_exactly_what_was_planned_within_its_budget() -> None:
    rounds(runs=10, first=1)


@pytest.mark.slow
def test_the_same_a_hundred_times() -> None:
    rounds(runs=100, first=100)
