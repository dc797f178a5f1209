"""What the surroundings say: ranks that a launcher set up, GPUs that can be seen, and how a module is started again."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dflash2_train.config import ConfigError
from dflash2_train.provenance import NVIDIA_DEVICES

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_launched() -> bool:
    """Whether a launcher (torchrun, accelerate, our own) has made this process a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_bare_srun(command: str) -> None:
    """Refuse to be one of several tasks that srun started without telling them their ranks.

    Raises:
        ConfigError: each of them would take itself for the whole job.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and "SLURM_PROCID" in os.environ:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks}: srun started {command} {tasks} times without RANK and WORLD_SIZE, and each "
            "would be a run of its own. Use launch=slurm, or one task with torchrun."
        )


@contextlib.contextmanager
def without_ranks() -> Iterator[None]:
    """Be a process of its own for a while: what runs inside finds no launcher's variables."""
    kept = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def visible_gpus() -> int:
    """GPUs that this process may use; 0 on a machine without.

    Raises:
        ConfigError: the driver lists GPUs that torch cannot use, so their number is not known.
    """
    import torch

    count = torch.cuda.device_count()
    listed = len(list(NVIDIA_DEVICES.glob("*"))) if NVIDIA_DEVICES.is_dir() else 0
    if count == 0 and listed and VISIBLE not in os.environ:
        raise ConfigError(
            f"launch.ranks=null: the driver lists {listed} GPUs and torch {torch.__version__} can use none of them. "
            f"Install a CUDA build of torch, or hide the GPUs ({VISIBLE}=) to run on the CPU."
        )
    return count


def devices_of(share: int, size: int) -> str:
    """``CUDA_VISIBLE_DEVICES`` of the share-th group of ``size`` GPUs among those visible here."""
    listed = os.environ.get(VISIBLE, "")
    names = listed.split(",") if listed else [str(number) for number in range(visible_gpus())]
    return ",".join(name.strip() for name in names[share * size : (share + 1) * size])


def module_command(module: str, words: Sequence[str]) -> list[str]:
    """This interpreter running ``module``, without the working folder among the places it imports from."""
    return [sys.executable, "-P", "-m", module, *words]


def import_path() -> str:
    """``PYTHONPATH`` under which a started process imports the very packages that this one runs."""
    root = str(Path(__file__).resolve().parents[2])
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return os.pathsep.join([root, *others])


def shell_line(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """A command as one would type it."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    return " ".join([*assignments, shlex.join(command)])
