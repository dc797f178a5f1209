"""Two ranks, disturbed and continued to the same curve (``tests.chaos.train``): a few here, all of them when slow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def disturb(*names: str, timeout: int) -> None:
    command = [sys.executable, "-m", "tests.chaos.train", *names]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: as it should" in done.stdout for name in names)


def test_a_killed_rank_and_a_full_disk_end_the_job_by_name_and_it_continues_to_the_same_curve() -> None:
    disturb("one_rank_killed", "disk_full_while_saving", timeout=240)


@pytest.mark.slow
def test_whatever_is_killed_stopped_or_out_of_time_or_disk_it_continues_to_the_same_curve() -> None:
    disturb(timeout=1200)
