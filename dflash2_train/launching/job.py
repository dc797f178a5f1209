"""The job file: what was asked for, composed once and read by every process of the job."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig, UserError, absolute, to_plain
from dflash2_train.provenance import atomic_write_json

LOGS = "logs"
PROGRAM = "dflash2-"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of one command. ``config`` is the whole configuration as plain values."""

    job_id: str  # unique; sorts by time
    command: str  # console command, as dflash2-train
    argv: list[str]  # what the user typed after it
    config: dict[str, Any]
    run_dir: str  # absolute
    cwd: str  # relative paths of the configuration start here
    host: str  # where the command was started, and by which process
    pid: int
    member: str = ""  # log folder of this process; empty = by its rank

    @property
    def short(self) -> str:
        """``train`` of ``dflash2-train``: in file names."""
        return self.command.removeprefix(PROGRAM)

    @property
    def logs(self) -> Path:
        """Folder of the members' logs. The trainer's ranks stand at the top, other commands in a folder of theirs."""
        return logs_folder(Path(self.run_dir), self.command)

    @property
    def file(self) -> Path:
        """Where the job is written."""
        return self.logs / (self.member or ".") / f"{self.short}-{self.job_id}.json"

    @property
    def exit_file(self) -> Path:
        """Where the first node of several leaves the exit code of a job that ended in good order."""
        return self.logs / f"{self.short}-{self.job_id}.exit"

    def write(self) -> Path:
        """Write the job file, whole or not at all, and return its path."""
        atomic_write_json(self.file, asdict(self))
        return self.file

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job of a file.

        Raises:
            UserError: it is not there, or no job file of this version.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}: not a job file that this process can read ({error}). The run folder must lie under the same "
                "path on every node; start the command again."
            ) from error


def logs_folder(run_dir: Path, command: str) -> Path:
    """``RUN/logs``, or a folder under it for the commands beside the trainer."""
    short = command.removeprefix(PROGRAM)
    return run_dir / LOGS if short == "train" else run_dir / LOGS / short


def new_job(command: str, config: RunConfig, *, member: str = "", job_id: str | None = None) -> Job:
    """The job of this process's command line."""
    return Job(
        job_id=job_id or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}",
        command=command,
        argv=sys.argv[1:],
        config=to_plain(config),
        run_dir=str(absolute(config.run_dir)),
        cwd=str(Path.cwd()),
        host=socket.gethostname(),
        pid=os.getpid(),
        member=member,
    )
