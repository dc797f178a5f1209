"""Ranks tell of each other who is lost and why, and one that stands still is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.cache.claims import process_is_gone, this_host
from dflash2_train.config import GuardConfig, UserError
from dflash2_train.exit_codes import EXIT_LOST_RANK, EXIT_STALLED, EXIT_STOPPED
from dflash2_train.guard.status import FILE_BYTES, SAVING, STATUS_FILE, STEPPING, RankStatus
from dflash2_train.guard.watch import ending_of, first_line, is_of_a_collective
from dflash2_train.guard.watchdog import ASLEEP_S, LEAVE_S, LOOK_EVERY_S, LOST_AFTER_S, LOST_EVERY_S, Watchdog
from dflash2_train.ring_rows import WaitStopped
from dflash2_train.run_control import rank_folder

JOB = 42


def status(output: Path, rank: int, *, job: int = JOB, pid: int | None = None) -> RankStatus:
    made = RankStatus(output, rank=rank, world_size=3, job=job)
    if pid is not None:
        made.state = replace(made.state, pid=pid)
        made.write()
    return made


@pytest.fixture(scope="module")
def dead() -> int:
    """Process number of one that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_nobody_is_lost_as_long_as_all_run_or_are_done(tmp_path: Path) -> None:
    ranks = [status(tmp_path, rank) for rank in range(3)]
    ranks[2].end("done", 0)
    assert ranks[0].lost() is None


def test_a_rank_that_told_why_it_ends_is_named_with_its_cause_and_exit_code(tmp_path: Path) -> None:
    ranks = [status(tmp_path, rank) for rank in range(3)]
    ranks[1].note(step=7, doing=SAVING)
    ranks[1].end("the disk is full.", 2)
    lost = ranks[0].lost()
    assert lost is not None
    assert lost.exit_code == 2
    assert "rank 1 (process " in str(lost)
    assert "saving behind step 7) ended: the disk is full. Rank 0 ends for it" in str(lost)


def test_a_rank_whose_process_is_gone_is_named_with_its_last_step(tmp_path: Path, dead: int) -> None:
    one, two = status(tmp_path, 0), status(tmp_path, 2, pid=dead)
    two.note(step=4, doing=STEPPING)
    two.write()
    lost = one.lost()
    assert lost is not None
    assert lost.exit_code == EXIT_LOST_RANK
    assert f"rank 2 (process {dead} of {this_host().split()[0]}, stepping behind step 4) is gone" in str(lost)


def test_the_rank_to_blame_is_named_and_not_the_one_that_fell_with_it(tmp_path: Path, dead: int) -> None:
    ranks = [status(tmp_path, rank) for rank in range(3)]
    ranks[1].end("rank 2 is gone without a word.", EXIT_LOST_RANK, blames=True)
    lost = ranks[0].lost()
    assert lost is not None
    assert str(lost).startswith("rank 2 is gone without a word."), "passed on where that rank is out of sight"
    status(tmp_path, 2, pid=dead)
    lost = ranks[0].lost()
    assert lost is not None
    assert str(lost).startswith(f"rank 2 (process {dead}")


def test_what_an_earlier_start_left_does_not_count(tmp_path: Path, dead: int) -> None:
    status(tmp_path, 1, job=JOB - 1, pid=dead).end("of old", 2)
    (rank_folder(tmp_path, 2)).mkdir(parents=True)
    (rank_folder(tmp_path, 2) / STATUS_FILE).write_text('{"torn')
    assert status(tmp_path, 0).lost() is None


def test_the_one_that_was_silent_longest_is_named_where_nobody_is_known_to_be_gone(tmp_path: Path) -> None:
    ranks = [status(tmp_path, rank) for rank in range(3)]
    for rank, step in ((1, 9), (2, 8)):
        ranks[rank].note(step=step, doing=STEPPING)
        ranks[rank].write()
    text = str(ranks[0].silent("timed out"))
    assert "rank 2 (" in text
    assert "is furthest behind, last sign of life 0 s ago; timed out" in text


def test_a_status_never_grows_so_that_a_full_disk_takes_it(tmp_path: Path) -> None:
    one = status(tmp_path, 0)
    path = rank_folder(tmp_path, 0) / STATUS_FILE
    place = path.stat().st_ino
    one.end("\N{SNOWMAN}" * 5000, 2)
    assert path.stat().st_size == FILE_BYTES
    assert path.stat().st_ino == place
    assert json.loads(path.read_bytes())["exit_code"] == 2


def test_a_status_that_cannot_be_written_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = status(tmp_path, 0)
    (rank_folder(tmp_path, 0) / STATUS_FILE).unlink()
    one.write()
    one.end("x", 1)
    assert caplog.text.count("cannot be written") == 1


def test_a_process_that_is_dead_and_not_yet_reaped_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # it ends, and nobody has waited for it
    for _ in range(1000):
        if process_is_gone(this_host(), process.pid):
            break
    else:
        pytest.fail("a zombie counts as alive")
    process.wait()
    process.stdout.close()


class Clock:
    """Seconds that a test moves, in looks of the watchdog as its thread would have them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def run(self, watchdog: Watchdog, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.now += LOOK_EVERY_S
            watchdog.look()


class Case:
    """A watchdog without its thread, and the exit codes that it would have ended the process with."""

    def __init__(self, output: Path) -> None:
        self.clock, self.left = Clock(), list[int]()
        self.status = status(output, 0)
        guard = GuardConfig(stall_seconds=30, stall_exit_seconds=90)
        self.watchdog = Watchdog(self.status, output, guard, clock=self.clock, leave=self.left.append)
        self.stacks = self.watchdog.stacks

    def run(self, seconds: float) -> None:
        self.clock.run(self.watchdog, seconds)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(tmp_path)
    monkeypatch.setattr(made.watchdog._thread, "start", lambda: None)
    monkeypatch.setattr(made.watchdog._thread, "join", lambda: None)
    with made.watchdog:
        yield made


def test_before_the_first_sign_of_life_nothing_is_expected(case: Case) -> None:
    case.run(1000)
    assert case.stacks.read_text() == ""
    assert case.left == []


def test_a_rank_that_stands_still_writes_its_stacks_once_and_later_ends_itself(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.watchdog.beat(step=5, doing=STEPPING)
    case.run(30)
    assert case.stacks.read_text() == ""
    case.run(50)
    text = case.stacks.read_text()
    assert text.count("rank 0: stepping behind step 5 for 31 s") == 1
    assert "test_guard.py" in text
    assert case.left == []
    case.run(11)
    assert case.left == [EXIT_STALLED]
    assert "error: rank 0 stands still, stepping behind step 5, for 91 s" in capsys.readouterr().err
    told = json.loads((case.stacks.parent / STATUS_FILE).read_bytes())
    assert told["exit_code"] == EXIT_STALLED


def test_a_rank_that_comes_further_is_left_alone_and_looked_after_again(case: Case) -> None:
    for step in range(10):
        case.watchdog.beat(step=step, doing=STEPPING)
        case.run(25)
    assert case.stacks.read_text() == ""
    case.run(31)
    case.watchdog.beat(step=10, doing=STEPPING)
    case.run(31)
    assert case.stacks.read_text().count("rank 0: ") == 2


def test_time_in_which_the_process_did_not_run_does_not_count(case: Case) -> None:
    case.watchdog.beat(step=1, doing=STEPPING)
    case.run(5)
    case.clock.now += 10 * ASLEEP_S
    case.run(20)
    assert case.stacks.read_text() == ""


def test_a_lost_rank_that_the_main_thread_does_not_notice_ends_this_one_after_a_while(
    case: Case, tmp_path: Path, dead: int
) -> None:
    status(tmp_path, 1, pid=dead)
    case.watchdog.beat(step=1, doing=STEPPING)
    case.run(LOST_AFTER_S + LOST_EVERY_S - 1)
    assert case.left == []
    case.run(1)
    assert case.left == [EXIT_LOST_RANK]


def test_a_rank_that_makes_its_steps_reads_no_file_of_the_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.status, "others", lambda: pytest.fail("read"))
    for step in range(5):
        case.watchdog.beat(step=step, doing=STEPPING)
        case.run(LOST_AFTER_S - 1)


def test_a_checkpoint_is_written_to_its_end_though_another_rank_is_lost(case: Case, tmp_path: Path, dead: int) -> None:
    status(tmp_path, 1, pid=dead)
    case.watchdog.beat(step=1, doing=SAVING)
    case.run(29)
    assert case.left == []


def test_a_rank_that_hangs_on_its_way_out_is_ended_with_the_code_of_its_error(case: Case) -> None:
    case.watchdog.must_leave(2)
    case.run(LEAVE_S - 1)
    assert case.left == []
    case.run(1)
    assert case.left == [2]
    case.watchdog._must_leave = None


def test_errors_of_collectives_are_told_from_others() -> None:
    gloo = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert is_of_a_collective(gloo)
    assert is_of_a_collective(torch.distributed.DistBackendError("NCCL error"))
    assert not is_of_a_collective(RuntimeError("CUDA out of memory"))
    assert not is_of_a_collective(UserError("gloo/x"))


def test_what_ends_a_rank_is_told_in_one_line_with_its_exit_code() -> None:
    assert (first_line(UserError("a\nb")), ending_of(UserError("a"))) == ("a", 2)
    assert (first_line(ValueError("x\ny")), ending_of(ValueError("x"))) == ("ValueError: x", 1)
    assert ending_of(OSError(28, "No space left on device")) == 2
    assert ending_of(WaitStopped("stopped")) == EXIT_STOPPED
    assert ending_of(KeyboardInterrupt()) == 130
