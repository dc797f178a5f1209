"""A claim has one owner at a time, a dead owner's claim passes to exactly one other, and a slow owner notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_gen.cache import claims as claims_module
from data_gen.cache.claims import Claim, ClaimFolder, ClaimLostError, create_exclusive, process_is_gone, this_host


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(claims_module, "time", clock)
    return clock


def folder(root: Path) -> ClaimFolder:
    return ClaimFolder(root, stale_after_s=30)


def foreign(root: Path, *, segment: int = 4, generation: int = 0) -> Claim:
    """A claim of a process on a host that cannot be looked at from here."""
    claim = Claim(segment=segment, generation=generation, host="far", pid=1, token="t", num_bytes=7)
    (root / f"segment-{segment:08d}.{generation:04d}").write_text(json.dumps(vars(claim)))
    return claim


def test_a_segment_is_claimed_by_one_of_two_and_free_again_after_its_release(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    claim = one.take(4, 100)
    assert claim is not None
    assert two.take(4, 100) is None
    assert two.newest() == {4: claim}
    one.release(claim)
    assert two.newest() == {}
    assert two.take(4, 100) is not None


def test_a_file_made_exclusively_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    assert create_exclusive(tmp_path / "f", b"first")
    assert not create_exclusive(tmp_path / "f", b"second")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]


def test_a_claim_of_a_process_that_ended_on_this_host_is_stale_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_is_gone(this_host(), ended.pid)
    assert not process_is_gone(this_host(), os.getpid())
    assert not process_is_gone("far", ended.pid), "process numbers of other hosts mean nothing here"


def test_a_claim_of_another_host_is_stale_after_silence_by_the_observers_clock(tmp_path: Path, clock: Clock) -> None:
    watcher, claim = folder(tmp_path), foreign(tmp_path)
    os.utime(tmp_path / "segment-00000004.0000", (1, 1))  # a clock far behind ours says nothing
    assert not watcher.is_stale(claim)
    clock.now += 29
    assert not watcher.is_stale(claim)
    os.utime(tmp_path / "segment-00000004.0000", (2, 2))
    clock.now += 29
    assert not watcher.is_stale(claim), "it gave a sign of life meanwhile"
    clock.now += 31
    assert watcher.is_stale(claim)


def test_a_stale_claim_passes_to_exactly_one_of_several_takers_and_its_owner_notices(
    tmp_path: Path, clock: Clock
) -> None:
    owner, takers = folder(tmp_path), [folder(tmp_path) for _ in range(3)]
    old = owner.take(4, 100)
    assert old is not None
    taken = [claim for taker in takers if (claim := taker.take_over(old, 100)) is not None]
    assert len(taken) == 1
    assert takers[1].newest()[4] == taken[0]
    with pytest.raises(ClaimLostError, match="taken over"):
        owner.beat(old, force=True)
    takers[0].beat(taken[0], force=True)


def test_releasing_a_claim_that_was_taken_over_leaves_the_new_owner_its_own(tmp_path: Path) -> None:
    owner, taker = folder(tmp_path), folder(tmp_path)
    old = owner.take(4, 100)
    assert old is not None
    new = taker.take_over(old, 100)
    assert new is not None
    owner.release(old)
    assert taker.newest() == {4: new}
    taker.release(new)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_whose_claim_was_cleared_and_taken_afresh_notices(tmp_path: Path) -> None:
    owner, other = folder(tmp_path), folder(tmp_path)
    old = owner.take(4, 100)
    assert old is not None
    other.release(old)
    with pytest.raises(ClaimLostError, match="cleared"):
        owner.beat(old, force=True)
    assert other.take(4, 100) is not None
    with pytest.raises(ClaimLostError, match="taken over"):
        owner.beat(old, force=True)


def test_a_claim_file_that_a_power_cut_emptied_belongs_to_nobody_and_goes_stale(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "segment-00000009.0002").write_text("")
    watcher = folder(tmp_path)
    claim = watcher.newest()[9]
    assert (claim.generation, watcher.is_stale(claim)) == (2, False)
    clock.now += 31
    assert watcher.is_stale(claim)
    assert watcher.take_over(claim, 50) is not None
