"""Jobs of an array that share one folder: who owns which prompt and shard number, and one process a job.

Job i of n owns the prompts whose hash is i modulo n and writes the shard numbers that are i modulo n, so jobs never
write the same row or file and need not talk to each other. Two processes with the same job, or jobs of arrays of
different sizes at the same time, would answer prompts twice: locks refuse both. A lock goes with its process, however
that ends. It is an ``flock``, which Linux also carries over NFS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dflash2_train.config import ConfigError, UserError


class JobBusyError(UserError, RuntimeError):
    """Another process works on the same rows."""


def key64(text: str) -> int:
    """A 64-bit hash of a name: the same everywhere and for ever."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    def owns(self, prompt_id: str) -> bool:
        """Whether this job answers the prompt."""
        return key64(prompt_id) % self.count == self.index

    def owns_shard(self, number: int) -> bool:
        """Whether this job writes the shard."""
        return number % self.count == self.index

    def free_numbers(self, taken: set[int]) -> Iterator[int]:
        """Shard numbers of this job that are not in ``taken``, ascending, without end."""
        return (number for number in itertools.count(self.index, self.count) if number not in taken)

    @property
    def name(self) -> str:
        """As in file names."""
        return f"{self.index:05d}-of-{self.count:05d}"


@contextlib.contextmanager
def hold_job(folder: Path, job: Job) -> Iterator[None]:
    """Be the one process that works on ``job`` in ``folder``, which must exist.

    Raises:
        JobBusyError: another process does, or one of an array of another size is at work here.
    """
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(open(folder / f".job-{job.name}.lock", "a"))
        if not _lock(own):
            raise JobBusyError(
                f"{folder}: another process is working on job {job.index} of {job.count}. "
                "Wait for it, end it, or give this one another data.shard_index."
            )
        # Own lock first, then a look at the others': of two that start at once, at least one sees the other.
        for path in sorted(folder.glob(".job-*.lock")):
            if path.name.endswith(f"-of-{job.count:05d}.lock"):
                continue
            with open(path, "a") as other:
                if not _lock(other):
                    raise JobBusyError(
                        f"{folder}: {path.name} is held, so jobs of an array of another size are at work here. "
                        f"Wait for them, or set data.num_shards as they have it (here {job.count})."
                    )
        yield


def _lock(file: IO[str], flags: int = fcntl.LOCK_NB) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise ConfigError(
            f"data.root: the file system of {file.name} has no locks ({error.strerror}), so two processes could answer "
            "the same prompts unseen. Mount it with locks (Lustre: -o flock), or choose another data.root."
        ) from error
    return True


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait for, and be, the only process inside such a block for ``folder``."""
    with open(folder / ".open.lock", "a") as file:
        _lock(file, 0)
        yield
