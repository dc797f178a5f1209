"""Who may run in a folder, and how a run is asked to stop."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dflash2_train.config import UserError


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder: two trainers in one folder would overwrite each other.

    Raises:
        UserError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by another dflash2-train. "
                "Wait for it, stop it, or choose another train.output_dir."
            ) from error
        yield


class StopRequest:
    """Set by SIGTERM or SIGINT, looked at between steps; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.reason = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
