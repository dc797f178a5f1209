"""What a started process runs: the command with the configuration of the job file, and a word about how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from omegaconf import OmegaConf

from dflash2_train.app import EXIT_FAULT, run_guarded
from dflash2_train.config import RunConfig, UserError
from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.launching.job import Job
from dflash2_train.launching.outcome import CRASH, DONE, FAULT, STOPPED_EARLY, ended

PARENT_POLL_S = 1.0


def run_member(main: Callable[[RunConfig], int], path: Path) -> int:
    """Run ``main`` as one process of the job in ``path``.

    Returns:
        0 for every end in good order, so that a launcher does not end the others while they still save; the command's
        own code stands in the outcome file. Another code for a fault.
    """
    job = Job.read(path)
    folder = job.logs / (job.member or f"rank{os.environ['RANK']}")
    sys.argv = [job.command, *job.argv]  # run records show what the user typed
    os.chdir(job.cwd)
    watch_parent()
    signal.signal(signal.SIGTERM, _leave)  # until the command asks for signals itself

    def recorded(config: RunConfig) -> int:
        try:
            code = main(config)
        except UserError as error:
            ended(FAULT, error.exit_code, str(error)).write(folder)
            raise
        except KeyboardInterrupt:
            ended(STOPPED_EARLY, 128 + signal.SIGINT, "interrupted").write(folder)
            raise
        except SystemExit as error:
            ended(STOPPED_EARLY, EXIT_STOPPED, str(error)).write(folder)
            raise
        except BaseException as error:
            kind, code = (FAULT, EXIT_FAULT) if isinstance(error, OSError) else (CRASH, 1)
            ended(kind, code, f"{type(error).__name__}: {error}").write(folder)
            raise
        ended(DONE, code).write(folder)
        return 0

    return run_guarded(recorded, OmegaConf.create(job.config))


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(EXIT_STOPPED)


def watch_parent() -> None:
    """Ask this process to stop when the one that started it is gone, however that ended: nobody else would."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


def watch_input() -> None:
    """Ask this process to stop when its standard input ends, as it does when an ssh session is closed or lost."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="input watch", daemon=True).start()
