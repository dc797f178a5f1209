"""The sub-commands of ``dflash2-export``: what works on a drafter folder and needs no experiment.

    dflash2-export doctor FOLDER          a sub-command of the table below, with options of its own
    dflash2-export +experiment=NAME …     no sub-command: export a checkpoint, configured by Hydra

A command is a function ``(argv) -> exit code`` in a module that is imported when it is asked for, so that neither
``--help`` nor one command loads what another needs. It parses its own options (argparse), writes what was asked for to
stdout, and raises ``UserError`` for what the user can mend, which ends as one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash2_train.app import EXIT_FAULT, guarded

PROGRAM = "dflash2-export"
CONFIG_MARKS = ("-", "+", "~")  # what an option of Hydra or an override without "=" starts with


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a sub-command lives: ``module`` has ``function(argv) -> exit code``."""

    module: str
    summary: str
    function: str = "main"

    def load(self) -> Callable[[Sequence[str]], int]:
        """Import the module and return the function."""
        function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(self.module), self.function)
        return function


COMMANDS: dict[str, Command] = {
    "card": Command(
        module="dflash2_train.export.card_command",
        summary="add evaluations to an exported drafter and render its model card again",
    ),
    "convert": Command(
        module="dflash2_train.export.convert.command",
        summary="a drafter of another tool as one of this, and back; what is lost is said",
    ),
    "doctor": Command(
        module="dflash2_train.export.doctor_command",
        summary="check any DFlash drafter, folder, Hub id or GGUF, for what servers get wrong silently",
    ),
    "pull": Command(
        module="dflash2_train.export.hub.pull_command",
        summary="fetch a drafter from the Hub at a pinned commit, every hash checked",
    ),
    "push": Command(
        module="dflash2_train.export.hub.push_command",
        summary="put an exported drafter on the Hub, private unless told otherwise",
    ),
    "verify-provenance": Command(
        module="dflash2_train.export.verify_command",
        summary="compute every recorded hash of an exported drafter anew",
    ),
}


def command_list() -> str:
    """The sub-commands, one a line, as ``--help`` shows them."""
    width = max(map(len, COMMANDS))
    lines = [f"  {PROGRAM} {name:<{width}}  {command.summary}" for name, command in sorted(COMMANDS.items())]
    return "\n".join(["Sub-commands (each has its own --help):", "", *lines])


def dispatch(argv: Sequence[str]) -> int | None:
    """Run the sub-command that ``argv`` names and return its exit code; None if ``argv`` names none.

    Everything that Hydra takes starts with one of ``CONFIG_MARKS`` or holds an ``=``; any other first word is meant as
    a sub-command, and an unknown one is answered here rather than by a parser of overrides.

    Args:
        argv: the words after the program's name.
    """
    if not argv:
        return None
    name = argv[0]
    if name in COMMANDS:
        return guarded(lambda: COMMANDS[name].load()(argv[1:]))
    if name in ("-h", "--help"):
        sys.stdout.write(f"{command_list()}\n\n")  # Hydra's own help follows
    if name.startswith(CONFIG_MARKS) or "=" in name:
        return None
    sys.stderr.write(f"error: {PROGRAM}: there is no sub-command {name!r}. {command_list()}\n")
    return EXIT_FAULT
