"""Ranks that wait for a stream do so together, and leave together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dflash2_train.config import UserError
from dflash2_train.guard.status import WAITING
from dflash2_train.prefetch import Prefetcher
from dflash2_train.ring_rows import WaitStopped
from dflash2_train.training_run import TrainingRun

WINDOW = ["window"]


class Windows:
    """A prefetcher that answers ``ready`` from a list; an exception in it is raised."""

    def __init__(self, *answers: bool | Exception) -> None:
        self._answers = list(answers)

    def ready(self, _seconds: float) -> bool:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next(self) -> list[str]:
        return WINDOW


class Ranks:
    """An engine whose other rank has flags of its own for each question; the last ones hold on."""

    def __init__(self, *others: tuple[bool, bool]) -> None:
        self._others, self.asked = list(others), list[tuple[bool, ...]]()

    def any_rank_each(self, flags: Sequence[bool]) -> list[bool]:
        self.asked.append(tuple(flags))
        other = self._others.pop(0) if len(self._others) > 1 else self._others[0]
        return [one or two for one, two in zip(flags, other, strict=True)]


def wait(windows: Windows, ranks: Ranks, *, reason: str = "", mode: str = "stream") -> tuple[Any, list[str]]:
    """What a rank gets, and its signs of life meanwhile."""
    run, beats = TrainingRun.__new__(TrainingRun), list[str]()
    made: Any = run
    made.config = SimpleNamespace(data=SimpleNamespace(mode=mode))
    made.engine, made.progress = ranks, SimpleNamespace(step=3)
    made.watchdog = SimpleNamespace(beat=lambda step, doing: beats.append(doing))
    stop: Any = SimpleNamespace(reason=reason)
    source: Any = windows
    return run.next_window(source, stop), beats


def test_a_rank_whose_window_is_there_waits_for_the_others_without_standing_in_a_collective() -> None:
    ranks = Ranks((True, False), (True, False), (False, False))
    found, beats = wait(Windows(True, True, True), ranks)
    assert found == WINDOW
    assert beats == [WAITING] * 2
    assert len(ranks.asked) == 3


def test_all_ranks_leave_when_any_of_them_was_asked_to() -> None:
    assert wait(Windows(True), Ranks((False, True)))[0] is None
    assert wait(Windows(True), Ranks((False, False)), reason="SIGTERM")[0] is None
    ranks = Ranks((False, False))
    assert wait(Windows(WaitStopped("stopped")), ranks)[0] is None
    assert ranks.asked == [(True, True)], "the others hear of it"


def test_what_keeps_a_window_from_coming_is_raised_where_it_was_met() -> None:
    with pytest.raises(UserError, match="no sign of life"):
        wait(Windows(UserError("no sign of life")), Ranks((False, False)))


def test_a_cache_keeps_nobody_waiting_and_costs_no_agreement() -> None:
    ranks = Ranks((True, True))
    assert wait(Windows(), ranks, mode="cache")[0] == WINDOW
    assert ranks.asked == []


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def test_a_window_that_is_being_read_is_not_ready_and_a_failed_one_says_why(gate: threading.Event) -> None:
    def window(row: int) -> list[Any]:
        gate.wait(60)
        if row > 0:
            raise UserError("damaged")
        return []

    loader: Any = SimpleNamespace(window=window, rows_per_window=2)
    with Prefetcher(loader, start=0, windows=2, depth=2, closing=threading.Event()) as windows:
        assert not windows.ready(0.01)
        gate.set()
        assert windows.ready(60)
        assert windows.next() == []
        with pytest.raises(UserError, match="damaged"):
            windows.ready(60)
        assert windows.wait_seconds >= 0.01
