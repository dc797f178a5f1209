"""Who may run in a folder, where its ranks leave what they have to tell, and how a run is asked to stop."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from dflash2_train.config import ConfigError, GuardConfig, UserError
from dflash2_train.launching import prepare_folder

logger = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # schedulers warn with the first or the last
SCHEDULER_END = "SLURM_JOB_END_TIME"  # seconds since the epoch
_LOCK = ".lock"


def rank_folder(output: Path, rank: int) -> Path:
    """Where a rank of the run in ``output`` leaves its status, its stacks and its console output."""
    return output / "logs" / f"rank{rank}"


@contextmanager
def only_run_in(folder: Path, *, command: str = "dflash2-train", key: str = "train.output_dir") -> Iterator[None]:
    """Hold the lock of a run folder: two of one command in one folder would overwrite each other.

    The lock goes with its process, however that ends, so none is ever stale; what stands in the file only tells who
    holds it.

    Args:
        folder: absolute; made where it is missing.
        command: whose folder it is, and the key that places it, for messages.
        key: see ``command``.

    Raises:
        UserError: another process holds it, or the folder cannot be written to or locked.
    """
    prepare_folder(folder, key)
    with open(folder / _LOCK, "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by another {command}{_holder(folder / _LOCK)}. "
                f"Wait for it, stop it, or choose another {key}."
            ) from error
        except OSError as error:
            raise UserError(
                f"{folder} lies on a file system that makes no locks ({error.strerror}), so nothing would keep two "
                f"runs apart. Mount it with flock, or choose another {key}."
            ) from error
        lock.truncate(0)
        told = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        lock.write(json.dumps(told))
        lock.flush()
        yield


def _holder(lock: Path) -> str:
    """Who wrote itself into a lock file, as part of a sentence; empty where nobody did."""
    try:
        told = json.loads(lock.read_text(encoding="utf-8"))
        return f" (process {told['pid']} of {told['host']}, since {told['since']})"
    except (json.JSONDecodeError, KeyError, TypeError):  # it has just locked the file, or is an earlier version
        return ""


class StopRequest:
    """Why a run should save and leave: a signal, or a limit in time that has come. Looked at between steps.

    Signals are :data:`STOP_SIGNALS`; a second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self._signal = ""
        self._limits: list[tuple[float, str]] = []
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    @property
    def reason(self) -> str:
        """What asks for it, or an empty text as long as nothing does."""
        now = time.monotonic()
        return self._signal or next((why for moment, why in self._limits if now >= moment), "")

    def heed(self, guard: GuardConfig, environment: Mapping[str, str]) -> None:
        """Ask to stop ``guard.end_margin_seconds`` before the job must be over, see :func:`ends_of_job`."""
        for end, why in ends_of_job(guard, environment):
            left = end - guard.end_margin_seconds - time.time()
            self.stop_in(left, why)
            moment = datetime.fromtimestamp(time.time() + left).astimezone().isoformat(" ", "seconds")
            logger.info("saves and stops at %s, %g s before %s", moment, guard.end_margin_seconds, why)

    def stop_in(self, seconds: float, why: str) -> None:
        """Ask to stop in ``seconds`` from now."""
        self._limits.append((time.monotonic() + seconds, why))

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


def ends_of_job(guard: GuardConfig, environment: Mapping[str, str]) -> list[tuple[float, str]]:
    """When the job must be over, seconds since the epoch, and who says so.

    Args:
        guard: ``train.guard``.
        environment: of the process; Slurm tells there when the job will be ended.

    Raises:
        ConfigError: what Slurm tells is no time.
    """
    ends = []
    configured = guard.end_timestamp()
    if configured is not None:
        ends.append((configured, f"train.guard.end_time={guard.end_time}"))
    told = environment.get(SCHEDULER_END)
    if guard.scheduler_end and told:
        if not told.isdecimal():
            raise ConfigError(
                f"{SCHEDULER_END}={told!r}: must be seconds since the epoch. Unset it, or set "
                "train.guard.scheduler_end=false and give train.guard.end_time."
            )
        ends.append((float(told), f"the end of the job, {SCHEDULER_END}"))
    return ends
