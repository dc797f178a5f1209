"""The ranks of a job, and the one door to DeepSpeed: who meets where, how long anyone waits, what the first one says.

Two facts shape the start. ``deepspeed.initialize`` looks for five environment variables and falls to MPI when one is
missing, so a plain start sets them. On a CPU it compiles a shared-memory operator that training never uses, so
its table of compatible operators is emptied first.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch

from dflash2_train.config import GuardConfig, UserError
from dflash2_train.exit_codes import EXIT_LOST_RANK

_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # where a launcher tells who meets where


def ensure_rank_environment() -> None:
    """Make a plain start a one-rank job: set the five variables unless a launcher did."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


class RanksApartError(UserError):
    """The ranks of a job did not find each other; trying again may help."""

    exit_code = EXIT_LOST_RANK


def start_ranks(guard: GuardConfig) -> tuple[int, int]:
    """Join the process group; returns (rank, world size).

    Args:
        guard: whose time limit holds here and in every collective.

    Raises:
        RanksApartError: not all ranks came, or the address cannot be used.
    """
    ensure_rank_environment()
    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    backend, seconds = get_accelerator().communication_backend_name(), guard.collective_timeout_seconds
    try:
        if not torch.distributed.is_initialized():
            deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timedelta(seconds=seconds))
    except torch.distributed.DistError as error:
        rank, size, address, port = (os.environ[name] for name in _MEETING)
        raise RanksApartError(
            f"rank {rank} of {size} did not find the others at {address}:{port} within "
            f"train.guard.collective_timeout_seconds={seconds:g} ({str(error).splitlines()[0]}). See why the others "
            "did not start, and that the port is free and can be reached."
        ) from error
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def limit_waits(guard: GuardConfig) -> None:
    """Give every group the time limit of ``guard``: DeepSpeed makes some with the default of the backend."""
    # torch has no public call for either; trainers of its own set limits by the same two.
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(seconds=guard.collective_timeout_seconds), group)


def first_rank_says(flag: bool) -> bool:
    """The first rank's ``flag``, on every rank; the others wait for it here."""
    return first_rank_number(int(flag)) > 0


def first_rank_number(number: int) -> int:
    """The first rank's ``number``, on every rank; the others wait for it here."""
    if torch.distributed.get_world_size() == 1:
        return number
    from deepspeed.accelerator import get_accelerator

    value = torch.tensor([number], dtype=torch.int64, device=get_accelerator().current_device_name())
    torch.distributed.broadcast(value, src=0)
    return int(value.item())


def stop_ranks() -> None:
    """Leave the process group in good order."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def import_deepspeed() -> Any:
    """Import DeepSpeed, quiet, and on a CPU without the operator that it would compile."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    import deepspeed.ops as operators
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger as deepspeed_logger

    deepspeed_logger.setLevel(logging.WARNING)
    if get_accelerator().device_name() == "cpu":
        operators.__dict__["__compatible_ops__"] = {}
    return deepspeed
