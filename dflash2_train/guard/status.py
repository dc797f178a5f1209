"""What each rank tells of itself, in a file that the others and a person can read, and who is lost by that.

``logs/rankN/status.json`` holds host, process, finished steps, what is being done, the time of writing and, once the
rank has ended, the cause and its exit code. The file has one size and is written in place: a rank that ends because the
disk is full can still say so. Files of an earlier start carry another job number and do not count.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data_gen.cache.claims import process_is_gone, this_host
from dflash2_train.config import UserError
from dflash2_train.exit_codes import EXIT_LOST_RANK
from dflash2_train.run_control import rank_folder

logger = logging.getLogger(__name__)
STATUS_FILE = "status.json"
FILE_BYTES, CAUSE_LENGTH = 8192, 1000  # JSON writes a character in 6 bytes at most
STARTING, STEPPING, WAITING, VALIDATING, SAVING = "starting", "stepping", "waiting for data", "validating", "saving"


class LostRankError(UserError):
    """Another rank is lost, so this one ends; the text says which, where it stood, and why if that is known."""

    def __init__(self, text: str, exit_code: int = EXIT_LOST_RANK) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank tells."""

    rank: int
    job: int  # the same number on all ranks of one start
    host: str
    pid: int
    step: int = 0  # finished
    doing: str = STARTING
    time: float = 0.0  # of writing, seconds since the epoch by the rank's own clock
    ended: str = ""  # why; empty while it runs
    exit_code: int = 0  # that it ended with
    blames: bool = False  # it ended because another rank was lost, which ``ended`` names

    def where(self) -> str:
        """Which rank this is and how far it came."""
        host = self.host.split()[0]
        return f"rank {self.rank} (process {self.pid} of {host}, {self.doing} behind step {self.step})"


class RankStatus:
    """This rank's file, and the others'.

    Args:
        output: run folder, which all ranks see.
        rank: this one.
        world_size: ranks.
        job: the same number on all ranks of one start.
        clock: seconds since the epoch.
    """

    def __init__(
        self, output: Path, *, rank: int, world_size: int, job: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._output, self._world_size, self._clock = output, world_size, clock
        self.state = RankState(rank=rank, job=job, host=this_host(), pid=os.getpid())
        self._path = rank_folder(output, rank) / STATUS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b" " * FILE_BYTES)
        self._writable, self._lock = True, threading.Lock()
        self.write()

    def note(self, *, step: int, doing: str) -> None:
        """Where this rank stands now; the next :meth:`write` tells."""
        self.state = replace(self.state, step=step, doing=doing)

    def write(self) -> None:
        """Tell where this rank stands; of any thread.

        A disk that does not take it is reported once and keeps nothing from going on.
        """
        try:
            with self._lock, open(self._path, "r+b") as file:
                text = json.dumps(asdict(replace(self.state, time=self._clock()))).encode()
                file.write(text.ljust(FILE_BYTES - 1) + b"\n")
        except OSError as error:
            if self._writable:
                logger.error("%s cannot be written (%s): the other ranks cannot see this one", self._path, error)
            self._writable = False

    def end(self, cause: str, exit_code: int, *, blames: bool = False) -> None:
        """Tell why this rank ends. Call it before connections to the others close: they look for it then.

        Args:
            cause: in one line.
            exit_code: of this process.
            blames: the cause is another rank.
        """
        self.state = replace(self.state, ended=cause[:CAUSE_LENGTH], exit_code=exit_code, blames=blames)
        self.write()

    def others(self) -> list[RankState]:
        """What the other ranks of this start have told, as far as it can be seen from here."""
        states = [self._read(rank) for rank in range(self._world_size) if rank != self.state.rank]
        return [state for state in states if state is not None]

    def lost(self) -> LostRankError | None:
        """The error that tells who is lost: a rank that told why it ended, or one whose process is gone; else None."""
        others = self.others()
        for state in others:
            if state.exit_code != 0 and not state.blames:
                return self._error(f"{state.where()} ended: {state.ended}", state.exit_code)
        for state in others:
            if not state.ended and process_is_gone(state.host, state.pid):
                return self._error(f"{state.where()} is gone without a word", EXIT_LOST_RANK)
        # Last those that only pass on what happened to them: it may have been out of this rank's sight.
        return next((self._error(s.ended, s.exit_code) for s in others if s.exit_code != 0), None)

    def silent(self, cause: str) -> LostRankError:
        """The error for a failed collective behind which no rank is known to be lost: it names who was silent longest.

        Args:
            cause: what the collective said.
        """
        now = self._clock()
        told = sorted(self.others(), key=lambda state: (state.step, state.time))
        if not told:
            return self._error(f"another rank is lost ({cause})", EXIT_LOST_RANK)
        behind = told[0]
        silence = f"last sign of life {max(now - behind.time, 0):.0f} s ago"
        return self._error(f"{behind.where()} is furthest behind, {silence}; {cause}", EXIT_LOST_RANK)

    def _error(self, what: str, exit_code: int) -> LostRankError:
        ending = f" Rank {self.state.rank} ends for it, {self.state.doing} behind step {self.state.step}."
        return LostRankError(what.rstrip(".") + "." + ending, exit_code)

    def _read(self, rank: int) -> RankState | None:
        """What a rank told, or None: not begun, of another start, out of sight, or being written at this moment."""
        path = rank_folder(self._output, rank) / STATUS_FILE
        try:
            state = RankState(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return state if state.job == self.state.job else None
