"""A command as a console script starts it, on a configuration in a JSON file: it may start ranks, shards and nodes.

``NAME`` chooses what a process does: the real trainer, or something short that ends in one particular way.

    python -m tests.integration.run_launched NAME CONFIG.json
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from dflash2_train.app import run_guarded
from dflash2_train.config import RunConfig, UserError
from dflash2_train.launching import Command, run_launched
from dflash2_train.launching.command import AS_MEMBER, AS_NODE, start

MODULE = "tests.integration.run_launched"
LONG_S = 120.0


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def note(config: RunConfig, text: str) -> None:
    """Leave a line per process in the run folder."""
    with open(Path(config.run_dir) / f"note-{os.environ.get('RANK', 'x')}-{config.data.shard_index}", "a") as file:
        file.write(f"{text}\n")


def says(config: RunConfig) -> int:
    """Tell where it is, and end with the first rank's own no."""
    sys.stdout.write(f"rank {rank()} of {os.environ['WORLD_SIZE']} says {config.name} {sys.argv[1:]}\n")
    return 7 if rank() == 0 else 0


def dies(config: RunConfig) -> int:
    """The second rank is killed; the first would wait for ever."""
    if rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)
    return 0


def refuses(config: RunConfig) -> int:
    """The second rank meets a fault that the user can mend."""
    if rank() == 1:
        raise UserError("data.root=x: is empty. Fill it.")
    time.sleep(LONG_S)
    return 0


def breaks(config: RunConfig) -> int:
    """The second rank meets a bug."""
    if rank() == 1:
        raise ZeroDivisionError("in rank 1")
    time.sleep(LONG_S)
    return 0


def waits(config: RunConfig) -> int:
    """Stops in good order when told, each rank after its own time."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    note(config, "ready")
    until = time.monotonic() + LONG_S
    while not told and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5 if rank() == 0 else 0.0)
    note(config, "saved")
    return 143


def divides(config: RunConfig) -> int:
    """What a shard of data generation is told; its last shard fails."""
    note(config, f"{config.stage} {config.data.shard_index} of {config.data.num_shards}")
    if config.stage == "regenerate" and config.data.shard_index == 1 and config.data.sampling.seed == 1:
        raise UserError("shard 1 has no prompts.")
    return 0


def train(config: RunConfig) -> int:
    from dflash2_train.train import train

    return train(config)


MAINS: dict[str, Callable[[RunConfig], int]] = {
    main.__name__: main for main in (says, dies, refuses, breaks, waits, divides, train)
}


def command(name: str) -> Command:
    """The command ``dflash2-NAME``; a member reads the name from its environment."""
    os.environ["LAUNCHED_TEST"] = name
    folder = {"train": lambda config: Path(config.train.output_dir)}.get(name)
    return Command(name=f"dflash2-{name}", module=MODULE, main=MAINS[name], shards=name == "divides", folder=folder)


if __name__ == "__main__":
    if sys.argv[1] in (AS_MEMBER, AS_NODE):
        run_launched(command(os.environ["LAUNCHED_TEST"]))
    name, path = sys.argv[1:3]
    sys.exit(run_guarded(lambda config: start(command(name), config), OmegaConf.create(Path(path).read_text())))
