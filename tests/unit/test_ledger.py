"""The ledger survives torn lines and any order of its files; one process works on a job."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.jobs import Job, JobBusyError, hold_job
from data_gen.ledger import Ledger

ATTEMPTS = 2


def open_ledger(folder: Path, job: Job | None = None) -> Ledger:
    return Ledger(folder, job or Job(), ATTEMPTS)


def test_states_are_the_same_after_reading_the_file_again(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.fail("a", "lost")
        ledger.fail("b", "lost")
        ledger.fail("b", "lost again")
        ledger.skip("c", "cut")
    again = open_ledger(tmp_path)
    assert {entry.row_id: (entry.reason, entry.attempts) for entry in again.entries("failed")} == {
        "a": ("lost", 1),
        "b": ("lost again", 2),
    }
    assert (again.is_dead("a"), again.is_dead("b"), again.is_skipped("c"), again.is_skipped("a")) == (
        False,
        True,
        True,
        False,
    )


def test_a_torn_last_line_is_forgotten_and_the_next_line_is_whole(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.fail("a", "lost")
    (path,) = tmp_path.glob("ledger-*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"row_id": "b", "sta')
    with open_ledger(tmp_path) as ledger:
        ledger.fail("c", "lost")
    assert [entry.row_id for entry in open_ledger(tmp_path).entries("failed")] == ["a", "c"]


def test_damage_within_the_file_is_named_by_file_and_line(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.fail("a", "lost")
    (path,) = tmp_path.glob("ledger-*.jsonl")
    path.write_bytes(b"\x00\x00\n" + path.read_bytes())
    with pytest.raises(CacheIntegrityError, match=r"ledger-00000-of-00001\.jsonl:1"):
        open_ledger(tmp_path)


@pytest.mark.parametrize("second", [Job(index=1, count=2), Job(index=0, count=9)])
def test_what_was_opened_again_stays_open_in_whatever_order_files_are_read(tmp_path: Path, second: Job) -> None:
    """Files are read by name; the events of the one must not depend on being read after the other's."""
    with open_ledger(tmp_path, second) as ledger:
        ledger.fail("a", "lost")
        ledger.fail("a", "lost")
    with open_ledger(tmp_path) as ledger:
        assert ledger.reopen_dead() == 1
    assert not open_ledger(tmp_path).is_dead("a")
    with open_ledger(tmp_path, second) as ledger:
        ledger.fail("a", "lost a third time")
    assert [entry.attempts for entry in open_ledger(tmp_path).entries("failed")] == [1]


def hold(folder: Path, job: Job, held: Event) -> None:
    with hold_job(folder, job):
        held.set()
        time.sleep(60)


@pytest.mark.parametrize(
    ("other", "busy"),
    [(Job(index=0, count=2), True), (Job(index=1, count=2), False), (Job(index=0, count=1), True)],
)
def test_a_job_is_held_by_one_process_and_falls_free_with_it(tmp_path: Path, other: Job, busy: bool) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold, args=(tmp_path, Job(index=0, count=2), held))
    process.start()
    try:
        assert held.wait(20)
        if busy:
            with pytest.raises(JobBusyError), hold_job(tmp_path, other):
                pass
        else:
            with hold_job(tmp_path, other):
                pass
    finally:
        process.kill()
        process.join()
    with hold_job(tmp_path, other):
        pass


def test_jobs_part_prompts_and_shard_numbers_without_overlap() -> None:
    jobs = [Job(index=index, count=7) for index in range(7)]
    for name in (f"prompt-{number}" for number in range(500)):
        assert sum(job.owns(name) for job in jobs) == 1
    taken = {7, 10}
    numbers = [number for job in jobs for _, number in zip(range(20), job.free_numbers(taken), strict=False)]
    assert len(set(numbers)) == len(numbers)
    assert not taken & set(numbers)
    assert all(
        job.owns_shard(number) for job in jobs for _, number in zip(range(9), job.free_numbers(set()), strict=False)
    )
