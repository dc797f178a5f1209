"""The one door to Hydra: compose ``conf/``, type it, run a command, turn known faults into one clear line.

Exit codes: 0 done, 1 a command's own "no" (say, output not equal), 2 a fault the user can mend (config, cache,
files), 130 interrupted by Ctrl-C; those of a training that is to be started again stand in
:mod:`dflash2_train.exit_codes`. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from rich.console import Console
from rich.logging import RichHandler

from dflash2_train.config import RunConfig, UserError, load_config

EXIT_BUG, EXIT_FAULT = 1, UserError.exit_code
EXIT_INTERRUPTED = 130
MENDABLE = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT)  # of the file system
LINE_WIDTH = 160  # off a terminal rich would take 80 columns and break most lines


def config_root() -> str:
    """Where Hydra finds ``conf/``: inside the installed package, or beside it in a bare checkout."""
    if importlib.util.find_spec("dflash2_train.conf") is not None:
        return "pkg://dflash2_train.conf"
    return str(Path(__file__).resolve().parent.parent / "conf")


@cache
def register_schema() -> None:
    """Make the typed schema known to Hydra under the name that ``conf/config.yaml`` lists first."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def open_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for our lines and tables where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=LINE_WIDTH)


def set_up_logging() -> None:
    """Log to the console through rich: this project's INFO, everyone else's WARNING. Rank 0 only, others errors."""
    first = os.environ.get("RANK", "0") == "0"
    handler = RichHandler(console=open_console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(message)s", handlers=[handler])
    for name in ("dflash2_train", "data_gen"):
        logging.getLogger(name).setLevel(logging.INFO if first else logging.ERROR)


def guarded(action: Callable[[], int]) -> int:
    """Run ``action`` with logging set up, and return its exit code or that of the fault it met."""
    set_up_logging()
    try:
        return action()
    except (UserError, OSError) as fault:
        if isinstance(fault, OSError) and fault.errno not in MENDABLE:
            raise
        sys.stderr.write(f"error: {fault}\n")
        return exit_code_of(fault)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "[yellow]interrupted[/]; finished work is kept, the same command continues", highlight=False
        )
        return EXIT_INTERRUPTED


def exit_code_of(error: BaseException) -> int:
    """What a command ends with because of ``error``."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in MENDABLE:
        return EXIT_FAULT
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_BUG


def run_guarded(main: Callable[[RunConfig], int], composed: DictConfig) -> int:
    """Type and check ``composed`` and run ``main`` with it, see :func:`guarded`."""
    return guarded(lambda: main(load_config(composed)))


def wants_sweep(words: Sequence[str]) -> bool:
    """Whether a command line asks for several runs."""
    return any(word in ("-m", "--multirun") for word in words)


def run_app(job_name: str, main: Callable[[RunConfig], int]) -> None:
    """Entry of a console script: ``main`` gets the checked configuration and returns the exit code."""
    if wants_sweep(sys.argv[1:]):
        sys.stderr.write(f"error: {job_name} takes no --multirun; dflash2-train does, and ends with a table.\n")
        sys.exit(EXIT_FAULT)
    register_schema()
    composed_well = False

    def task(composed: DictConfig) -> None:
        nonlocal composed_well
        composed_well = True
        sys.exit(run_guarded(main, composed))

    sys.argv[0] = job_name  # what users typed, in Hydra's own messages
    try:
        hydra.main(version_base="1.3", config_path=config_root(), config_name="config")(task)()
    except SystemExit as end:  # Hydra leaves with 1 where it cannot compose, which is a fault to mend like our own
        sys.exit(end.code if composed_well or not end.code else EXIT_FAULT)
