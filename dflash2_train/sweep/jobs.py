"""One job of a sweep: the ordinary ``dflash2-train`` in a process of its own, and what is kept of it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dflash2_train.app import EXIT_INTERRUPTED
from dflash2_train.config import absolute, to_plain
from dflash2_train.exit_codes import CONTINUED_CODES, LOST_CODES
from dflash2_train.provenance import atomic_write_json, sha256_json
from dflash2_train.sweep.grid import SweepJob

JOB_FILE = "job.json"
CONSOLE_FILE = "console.log"  # what the job printed, every attempt behind the one before
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"  # stopped: before its last step
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # schedulers warn with the last
# Behind these the same command continues: a trainer's own, a second Ctrl-C, those of a job asked to stop before it
# could answer in good order, and 0 where nothing was exported.
STOPPED_CODES = (0, *CONTINUED_CODES, EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)
TAIL_BYTES = 1 << 14  # of the console that are searched for the cause
LONGEST_CAUSE = 400


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """How a job's latest attempt went; ``job.json``."""

    state: str
    config_sha256: str  # of the whole configuration: another one is not what is done already
    exit_code: int | None = None
    cause: str = ""  # of a failure or a lost rank: the last error that the job printed
    seconds: float = 0.0
    begun_utc: str = ""

    @classmethod
    def read(cls, folder: Path) -> JobRecord | None:
        """The record in a job's folder, or None before its first attempt."""
        path = folder / JOB_FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def write(self, folder: Path) -> None:
        """Replace the record in a job's folder."""
        atomic_write_json(folder / JOB_FILE, asdict(self))


class Signals:
    """Passes what asks a run to stop on to the job that runs, and remembers that no further one shall start.

    Jobs run in sessions of their own, so that a terminal's Ctrl-C reaches each of them once, through here.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.process: subprocess.Popen[bytes] | None = None
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> Self:
        self._before = [(number, signal.signal(number, self._note)) for number in STOP_SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def watch(self, process: subprocess.Popen[bytes] | None) -> None:
        """The job that runs from now on, or None; a request that came while it was started reaches it here."""
        self.process = process
        if process is not None and self.stopping:
            process.send_signal(signal.SIGTERM)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def config_hash(job: SweepJob) -> str:
    """Identity of a job's configuration."""
    return sha256_json(to_plain(job.config))


def is_done(job: SweepJob) -> bool:
    """Whether this job, with this configuration, ended well before."""
    record = JobRecord.read(job.folder)
    return record is not None and record.state == DONE and record.config_sha256 == config_hash(job)


def run_job(job: SweepJob, command: Sequence[str], signals: Signals) -> JobRecord:
    """Run ``command`` to its end and record how it went.

    Args:
        job: whose folder takes the console and the record.
        command: program and words.
        signals: told of the process while it runs.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    begun = JobRecord(
        state=RUNNING, config_sha256=config_hash(job), begun_utc=datetime.now(UTC).isoformat(timespec="seconds")
    )
    begun.write(job.folder)
    started = time.monotonic()
    with open(job.folder / CONSOLE_FILE, "ab") as console:
        offset = console.tell()
        process = subprocess.Popen(  # noqa: S603 - this very program, no shell
            list(command), stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
        )
        signals.watch(process)
        code = process.wait()
        signals.watch(None)
    # Only an export is the end: a command may also end well by handing the run to a scheduler, or by planning it.
    exported = (absolute(job.config.export.output_dir) / "config.json").exists()
    state = DONE if code == 0 and exported else STOPPED if code in STOPPED_CODES else FAILED
    record = JobRecord(
        state=state,
        config_sha256=begun.config_sha256,
        exit_code=code,
        cause=last_error(job.folder / CONSOLE_FILE, offset) if state == FAILED or code in LOST_CODES else "",
        seconds=round(time.monotonic() - started, 1),
        begun_utc=begun.begun_utc,
    )
    record.write(job.folder)
    return record


def last_error(console: Path, offset: int) -> str:
    """The last ``error:`` line that an attempt printed, else its last line."""
    with open(console, "rb") as file:
        file.seek(max(offset, console.stat().st_size - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1][:LONGEST_CAUSE]
