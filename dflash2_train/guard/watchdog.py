"""A thread that looks after one rank while its main thread may stand in a collective, a read or a kernel.

Time counts from the last :meth:`Watchdog.beat`. Time in which the whole process did not run (stopped, suspended) does
not: a rank that wakes up is given as long as any other.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from dflash2_train.config import GuardConfig
from dflash2_train.exit_codes import EXIT_STALLED
from dflash2_train.guard.status import SAVING, RankStatus
from dflash2_train.run_control import rank_folder

STACKS_FILE = "stacks.txt"
LOOK_EVERY_S = 1.0
WRITE_EVERY_S = 5.0  # signs of life; many ranks share a file system
ASLEEP_S = 10.0  # between two looks: then the process was not running
LOST_AFTER_S, LOST_EVERY_S = 15.0, 10.0  # without a step the others' files are read, and so often
LEAVE_S = 30.0  # in which a rank that met an error has to be gone


class Watchdog:
    """Looks after a rank; a context manager.

    Stacks of all threads go to ``logs/rankN/stacks.txt`` when no step has ended for ``stall_seconds``, and on SIGUSR2.

    Args:
        status: of this rank.
        output: run folder.
        guard: ``train.guard``.
        clock: seconds from any fixed point.
        leave: ends the process at once, with an exit code.
    """

    def __init__(
        self,
        status: RankStatus,
        output: Path,
        guard: GuardConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._status, self._guard, self._clock, self._leave = status, guard, clock, leave
        self.stacks = rank_folder(output, status.state.rank) / STACKS_FILE
        self._beaten = self._looked = self._written = clock()
        self._armed = self._dumped = self._suspects = False
        self._lost_look_at = 0.0
        self._must_leave: tuple[float, int] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._stacks_file = open(self.stacks, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the thread
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(signal.SIGUSR2, file=self._stacks_file, all_threads=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._must_leave is not None:  # leaving may hang too, in a library's own clean-up
            return
        self._closing.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks_file.close()

    def beat(self, *, step: int, doing: str) -> None:
        """The main thread has come this far. From the first call on it is expected to come further."""
        self._status.note(step=step, doing=doing)
        self._beaten, self._armed, self._dumped, self._suspects = self._clock(), True, False, False

    def must_leave(self, exit_code: int) -> None:
        """The main thread has met an error. Should it hang on its way out, the process ends with this code."""
        self._must_leave = (self._clock() + LEAVE_S, exit_code)

    def look(self) -> None:
        """One look; the thread does this every ``LOOK_EVERY_S``."""
        now = self._clock()
        if now - self._looked > ASLEEP_S:
            self._beaten += now - self._looked
        self._looked = now
        if now - self._written >= WRITE_EVERY_S:
            self._written = now
            self._status.write()
        if self._must_leave is not None:
            if now >= self._must_leave[0]:
                self._leave(self._must_leave[1])
            return
        if self._armed:
            self._look_for_stall(now - self._beaten)
            self._look_for_lost(now, now - self._beaten)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            self.look()

    def _look_for_stall(self, idle: float) -> None:
        state, guard = self._status.state, self._guard
        if guard.stall_seconds is not None and idle > guard.stall_seconds and not self._dumped:
            self._dumped = True
            self._dump(f"rank {state.rank}: {state.doing} behind step {state.step} for {idle:.0f} s")
        if guard.stall_exit_seconds is not None and idle > guard.stall_exit_seconds:
            text = (
                f"rank {state.rank} stands still, {state.doing} behind step {state.step}, for {idle:.0f} s "
                f"(train.guard.stall_exit_seconds) and ends; stacks are in {self.stacks}"
            )
            self._say(f"error: {text}")
            self._status.end(text, EXIT_STALLED)
            self._leave(EXIT_STALLED)

    def _look_for_lost(self, now: float, idle: float) -> None:
        """End where another rank is lost and the main thread has not noticed: some backends wait for the dead.

        It has until the next look to notice. No other rank is needed to finish a checkpoint's files.
        """
        if self._status.state.doing == SAVING or idle < LOST_AFTER_S or now < self._lost_look_at:
            return
        self._lost_look_at = now + LOST_EVERY_S
        error = self._status.lost()
        if error is not None and self._suspects:
            self._say(f"error: {error}")
            self._status.end(str(error), error.exit_code, blames=True)
            self._leave(error.exit_code)
        self._suspects = error is not None

    def _dump(self, headline: str) -> None:
        self._stacks_file.write(f"\n{datetime.now(UTC).isoformat(timespec='seconds')} {headline}\n")
        self._stacks_file.flush()
        faulthandler.dump_traceback(file=self._stacks_file, all_threads=True)
        self._say(f"warning: {headline}; stacks of its threads are in {self.stacks}")

    def _say(self, text: str) -> None:
        """On the console, past a logging system whose lock the main thread may hold."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
