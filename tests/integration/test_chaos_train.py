"""Two ranks, disturbed and continued to the same curve (``tests.chaos.train``): a few here, all of them when slow."""

from __future__ import annotations

import pytest

from tests.integration.forked import finish, fork_ranks_of


def disturb(*names: str, timeout: int) -> None:
    output = finish(fork_ranks_of("tests.chaos.train", names, 1), timeout=timeout)
    assert all(f"{name}: as it should" in output for name in names)


def test_a_killed_rank_and_a_full_disk_end_the_job_by_name_and_it_continues_to_the_same_curve() -> None:
    disturb("one_rank_killed", "disk_full_while_saving", timeout=240)


@pytest.mark.slow
def test_whatever_is_killed_stopped_or_out_of_time_or_disk_it_continues_to_the_same_curve() -> None:
    disturb(timeout=1200)
