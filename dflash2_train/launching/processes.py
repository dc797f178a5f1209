"""Processes that are watched together: shards of this machine, or one ssh session a host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from dflash2_train.launching.follow import Follow, keep_older
from dflash2_train.launching.outcome import FILE_NAME

POLL_S = 0.1
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process to start."""

    name: str  # as "shard 0 of 8"
    command: list[str]
    folder: Path  # of stdout.log, stderr.log and what it says of its end
    variables: Mapping[str, str] = field(default_factory=dict)  # beside those of this process
    remote: bool = False  # it stops when its input closes; a signal would reach the local end only


@dataclass(kw_only=True)
class Ends:
    """How all of them ended."""

    codes: dict[str, int] = field(default_factory=dict)  # by name; negative: minus the signal
    seen: dict[str, float] = field(default_factory=dict)  # when each end was noticed, in seconds of one clock
    stopped_by: int = 0  # the last signal that this process got meanwhile
    signals: int = 0  # how many it got
    killed: list[str] = field(default_factory=list)  # those that did not stop in time

    def failed(self) -> list[str]:
        """Names of those that ended with a fault, the earliest first."""
        return sorted((name for name, code in self.codes.items() if code != 0), key=self.seen.__getitem__)


def run_together(members: Sequence[Member], *, stop_timeout_s: float, end_together: bool) -> Ends:
    """Start all, show the first one's output, wait for all.

    Args:
        members: what to start.
        stop_timeout_s: those that were asked to stop are killed after so long.
        end_together: one that fails ends the others; else they finish their own work.
    """
    for member in members:
        for name in ("stdout.log", "stderr.log"):
            keep_older(member.folder / name)
    ends = Ends()
    started: dict[str, subprocess.Popen[bytes]] = {}
    with _signals_noted(ends), _shown(members[0]):
        try:
            for member in members:
                started[member.name] = _start(member)
            _wait(members, started, ends, stop_timeout_s=stop_timeout_s, end_together=end_together)
        finally:
            for process in started.values():
                if process.poll() is None:
                    process.kill()
    return ends


def _start(member: Member) -> subprocess.Popen[bytes]:
    """Start one in a session of its own, so that a Ctrl-C reaches it through us, once."""
    member.folder.mkdir(parents=True, exist_ok=True)
    (member.folder / FILE_NAME).unlink(missing_ok=True)
    with open(member.folder / "stdout.log", "wb") as output, open(member.folder / "stderr.log", "wb") as errors:
        return subprocess.Popen(  # noqa: S603 - a list of words, no shell
            member.command,
            env=os.environ | dict(member.variables),
            stdin=subprocess.PIPE if member.remote else subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def _wait(
    members: Sequence[Member],
    started: Mapping[str, subprocess.Popen[bytes]],
    ends: Ends,
    *,
    stop_timeout_s: float,
    end_together: bool,
) -> None:
    deadline: float | None = None
    passed_on = 0
    while len(ends.codes) < len(members):
        time.sleep(POLL_S)
        for name, process in started.items():
            code = process.poll()
            if code is not None and name not in ends.codes:
                ends.codes[name], ends.seen[name] = code, time.time()
        stopping = ends.stopped_by if ends.signals > passed_on else 0
        if end_together and ends.failed() and deadline is None:
            stopping = stopping or signal.SIGTERM
        if stopping:
            passed_on = ends.signals
            deadline = time.monotonic() + stop_timeout_s if deadline is None else deadline
            _ask_to_stop(members, started, ends, stopping)
        if deadline is not None and time.monotonic() > deadline:
            _kill(started, ends)


def _ask_to_stop(
    members: Sequence[Member], started: Mapping[str, subprocess.Popen[bytes]], ends: Ends, number: int
) -> None:
    for member in members:
        process = started[member.name]
        if member.name in ends.codes or process.poll() is not None:
            continue
        if member.remote:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended meanwhile
                process.stdin.close()
        else:
            os.killpg(process.pid, signal.SIGTERM if number == signal.SIGHUP else number)


def _kill(started: Mapping[str, subprocess.Popen[bytes]], ends: Ends) -> None:
    for name, process in started.items():
        if name not in ends.killed and process.poll() is None:
            ends.killed.append(name)
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals_noted(ends: Ends) -> Iterator[None]:
    """Note SIGTERM, SIGINT and SIGHUP instead of dying of them."""

    def note(number: int, _frame: FrameType | None) -> None:
        ends.stopped_by = number
        ends.signals += 1

    before = {number: signal.signal(number, note) for number in CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown(first: Member) -> Iterator[None]:
    """Show the first member's streams on ours."""
    with Follow(first.folder / "stdout.log", sys.stdout), Follow(first.folder / "stderr.log", sys.stderr):
        yield
