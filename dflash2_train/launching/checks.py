"""What is looked at before anything starts: devices, the run folder, who else is in it, and ports."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from dflash2_train.config import ConfigError, LaunchConfig, UserError
from dflash2_train.launching.environment import VISIBLE, visible_gpus
from dflash2_train.launching.job import Job

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def ranks_here(launch: LaunchConfig) -> int:
    """Processes to start on this machine.

    Raises:
        ConfigError: more than it has GPUs, or the number of GPUs cannot be told.
    """
    gpus = visible_gpus()
    if launch.ranks is None:
        return max(gpus, 1)
    if gpus and launch.ranks > gpus:
        shown = f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
        raise ConfigError(
            f"launch.ranks={launch.ranks}: this machine has {gpus} GPUs to use{shown}, and each rank needs its own. "
            f"Use launch.ranks={gpus}, or leave it null."
        )
    return launch.ranks


def prepare_folder(folder: Path, key: str = "train.output_dir") -> None:
    """Make ``folder``, and make sure that it can be written to, before hours are spent on what could not be kept.

    Args:
        folder: absolute.
        key: of the configuration that places it.

    Raises:
        UserError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(
            f"{key}={str(folder)!r}: nothing can be written there ({error.strerror}). "
            "Mend its permissions or its mount, or choose another run_dir."
        ) from error


def check_unused(folder: Path, job: Job) -> None:
    """Refuse a training folder that another trainer holds, before ranks are started for it.

    The lock itself is taken by the first rank. It is an ``flock`` and goes with its process, so a file that is left
    over is never in the way.

    Raises:
        UserError: it is held, with who holds it as far as the job files tell; or the file system has no locks.
    """
    if not (folder / ".lock").exists():
        return
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by another {job.command}{holder(job)}. "
                "Wait for it, stop it (SIGTERM saves first), or choose another name=."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UserError(
                f"{folder}: its file system has no locks ({error.strerror}), so two trainers could overwrite each "
                "other unseen. Mount it with locks (Lustre: -o flock), or choose another run_dir."
            ) from error


def holder(job: Job) -> str:
    """Who started the newest other job of this command in the run folder, in words; empty where no file tells."""
    files = [path for path in sorted(job.logs.glob(f"{job.short}-*.json")) if path != job.file]
    if not files:
        return ""
    other = Job.read(files[-1])
    if other.host != socket.gethostname():
        return f", started on {other.host} as process {other.pid}; if that host is gone, its file server may hold on"
    alive = Path(f"/proc/{other.pid}").exists()
    return f", started here as process {other.pid}" + ("" if alive else ", which is gone while its ranks still end")


def check_port(port: int, key: str) -> None:
    """Refuse a port that something on this machine listens on already.

    Raises:
        ConfigError: it is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"{key}={port}: cannot be used on {socket.gethostname()} ({error.strerror}). Choose another port."
            ) from error
