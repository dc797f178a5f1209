"""How a process of a job ended, in its own words, and which of several ends is the cause of a failed job."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.provenance import atomic_write_json

FILE_NAME = "outcome.json"
DONE, FAULT, CRASH, STOPPED_EARLY = "done", "fault", "crash", "stopped"
# Deaths that nothing inside a job explains. SIGABRT is not among them: libraries abort over another rank's death.
SUDDEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
SAME_TIME_S = 2.0  # an end so long after the first one is a consequence of it


class End(NamedTuple):
    """How all processes of a node ended together."""

    good: bool  # all of them came to an end that the command chose, a stop included
    code: int  # for the user


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one process."""

    kind: str  # done: the command returned | fault: one the user can mend | crash | stopped: a signal before it began
    code: int  # exit code of the command
    message: str = ""
    time: float = 0.0  # seconds of the epoch

    def write(self, folder: Path) -> None:
        """Leave it in a member's log folder."""
        atomic_write_json(folder / FILE_NAME, asdict(self))


def read_outcome(folder: Path) -> Outcome | None:
    """What a member left; None where it was killed, or has not ended."""
    path = folder / FILE_NAME
    return Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def ended(kind: str, code: int, message: str = "") -> Outcome:
    """An outcome of this moment."""
    return Outcome(kind=kind, code=code, message=message, time=time.time())


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One member that did not end in good order."""

    member: str  # as "rank 1 of 2"
    exit_code: int  # of the process; negative: minus the signal that killed it
    seen: float  # when it was noticed, in seconds of one clock for all
    outcome: Outcome | None
    log: Path

    def sudden(self) -> bool:
        """Whether it was killed, and by nothing in this job."""
        return self.outcome is None and -self.exit_code in SUDDEN

    def code(self) -> int:
        """Exit code for the whole job. Never that of a stop in good order, which would have the job queued again."""
        if self.outcome is not None:
            return 1 if self.outcome.code in (0, EXIT_STOPPED) else self.outcome.code
        code = 128 - self.exit_code if self.exit_code < 0 else self.exit_code
        return 1 if code in (0, EXIT_STOPPED) else code

    def describe(self) -> str:
        """One line: who, how, and where to look."""
        if self.outcome is not None and self.outcome.kind in (FAULT, CRASH):
            how = f"failed: {self.outcome.message}"
        elif self.exit_code < 0:
            how = f"was killed by {_signal_name(-self.exit_code)}"
            if self.exit_code == -signal.SIGKILL:
                how += ", which this job did not send (a system out of memory does: see dmesg)"
        else:
            how = f"ended with exit code {self.exit_code}"
        return f"{self.member} {how}. Its log: {self.log}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from.

    A process that was killed from outside comes first, then one that named a fault (the lowest rank has the whole
    story), then the earliest error by the members' own clock. What came later than the first end by more than two
    seconds is a consequence.
    """
    first = min(failure.seen for failure in failures)

    def order(place: int) -> tuple[int, float, int]:
        failure = failures[place]
        if failure.seen - first > SAME_TIME_S:
            return 4, failure.seen, place
        if failure.sudden():
            return 0, failure.seen, place
        if failure.outcome is None:
            return 3, failure.seen, place
        return (1, 0.0, place) if failure.outcome.kind == FAULT else (2, failure.outcome.time, place)

    return failures[min(range(len(failures)), key=order)]


def combined_code(outcomes: Sequence[Outcome]) -> int:
    """Exit code of a job whose members all ended in good order: the first that is neither 0 nor a stop, else a stop."""
    codes = [outcome.code for outcome in outcomes]
    decided = [code for code in codes if code not in (0, EXIT_STOPPED)]
    return decided[0] if decided else max(codes, default=0)
