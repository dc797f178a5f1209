"""Around all that a rank does between joining the others and leaving them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash2_train.app import exit_code_of
from dflash2_train.config import GuardConfig, UserError
from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.guard.status import LostRankError, RankStatus
from dflash2_train.guard.watchdog import Watchdog
from dflash2_train.ring_rows import WaitStopped

FIND_S = 5.0  # to find out who is lost once a collective has failed; a network file system shows files late
FIND_EVERY_S = 0.5
# torch has an error class for nccl and for the store; gloo's are plain RuntimeErrors that tell where in gloo they are.
_GLOO = re.compile(r"\bgloo[/\\]|\bgloo::", re.IGNORECASE)


@contextmanager
def watched(output: Path, guard: GuardConfig, *, rank: int, world_size: int, job: int) -> Iterator[Watchdog]:
    """Look after this rank, tell the others why it ends, and tell this one whom it has lost.

    Args:
        output: run folder.
        guard: ``train.guard``.
        rank: this one.
        world_size: ranks.
        job: the same number on all ranks of this start.

    Raises:
        LostRankError: in place of a collective's error.
    """
    status = RankStatus(output, rank=rank, world_size=world_size, job=job)
    with Watchdog(status, output, guard) as watchdog:
        try:
            yield watchdog
        except BaseException as error:
            lost = find_lost(status, error) if is_of_a_collective(error) else None
            code = ending_of(lost or error)
            status.end(first_line(lost or error), code, blames=lost is not None)
            if world_size > 1:
                watchdog.must_leave(code)
            if lost is None:
                raise
            raise lost from error
        status.end("done", 0)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether this is how torch says that ranks did not come together."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def find_lost(status: RankStatus, error: BaseException) -> LostRankError:
    """Who is lost, by what the other ranks told; a rank that is stopped or unreachable told nothing."""
    deadline = time.monotonic() + FIND_S
    while time.monotonic() < deadline:
        found = status.lost()
        if found is not None:
            return found
        time.sleep(FIND_EVERY_S)
    return status.silent(first_line(error))


def ending_of(error: BaseException) -> int:
    """The exit code of a training that ends because of ``error``."""
    return EXIT_STOPPED if isinstance(error, WaitStopped) else exit_code_of(error)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
