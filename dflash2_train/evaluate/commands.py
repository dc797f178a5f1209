"""Sub-commands of ``dflash2-eval`` that read finished results: compare, report, gate. No experiment is needed.

- ``dflash2-eval compare A.json B.json …``: every further run against the first, with the noise
- ``dflash2-eval report A.json B.json …``: the tables and plots of all of them, side by side
- ``dflash2-eval gate RUN.json --baseline B.json``: exit code 1 if acceptance dropped by more than the noise
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash2_train.app import EXIT_FAULT, open_console, set_up_logging
from dflash2_train.config import GateConfig, UserError

NAMES = ("compare", "report", "gate")


def build_parser() -> argparse.ArgumentParser:
    """The command line of all three."""
    parser = argparse.ArgumentParser(prog="dflash2-eval", description="Reports of finished evaluations.")
    commands = parser.add_subparsers(dest="command", required=True)
    files = "report.json of dflash2-eval, its folder, or a published result"
    for name, summary in (
        ("compare", "every further run against the first, with the noise"),
        ("report", "tables and plots of several runs side by side; nothing is refused, speed-ups come from plain runs"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help=files)
        command.add_argument("--out", type=Path, help="folder for report.md, report.html and plots.png")
        command.add_argument("--title", default="Evaluation", help="heading of the report")
        if name == "compare":
            _add_rules(command)
    gate = commands.add_parser("gate", help="exit code 1 if acceptance dropped by more than the noise")
    gate.add_argument("run", type=Path, metavar="RUN.json", help=files)
    gate.add_argument("--baseline", type=Path, required=True, metavar="BASE.json", help=files)
    gate.add_argument("--tolerance", type=float, default=0.0, help="acceptance length allowed beyond the noise")
    _add_rules(gate)
    return parser


def _add_rules(command: argparse.ArgumentParser) -> None:
    command.add_argument("--allow-unlike", action="store_true", help="compare though conditions differ, and name them")
    command.add_argument("--confidence", type=float, default=0.95, help="of the noise band (0.95)")


def run_command(arguments: Sequence[str]) -> int:
    """Run one sub-command; returns its exit code."""
    parsed = build_parser().parse_args(arguments)
    set_up_logging()
    try:
        return _gate(parsed) if parsed.command == "gate" else _show(parsed)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAULT


def _gate(parsed: argparse.Namespace) -> int:
    from dflash2_train.evaluate.gate import EXIT_DROPPED, judge
    from dflash2_train.evaluate.readers import read_run

    settings = GateConfig(tolerance=parsed.tolerance, confidence=parsed.confidence, allow_unlike=parsed.allow_unlike)
    settings.check()
    verdict = judge(read_run(parsed.run), read_run(parsed.baseline), settings)
    console = open_console()
    for line in verdict.lines():
        console.print(line, highlight=False, markup=False, style=None if verdict.passed else "red")
    return 0 if verdict.passed else EXIT_DROPPED


def _show(parsed: argparse.Namespace) -> int:
    from dflash2_train.evaluate.compare import compare
    from dflash2_train.evaluate.publish import print_tables, write_runs_report
    from dflash2_train.evaluate.readers import read_run
    from dflash2_train.evaluate.tables import comparison_table, tables_of

    runs = [read_run(path) for path in parsed.runs]
    comparisons = []
    if parsed.command == "compare":
        if len(runs) < 2:
            raise UserError("dflash2-eval compare: one run given, at least two are needed. Name a second report.json.")
        comparisons = [
            compare(runs[0], other, allow_unlike=parsed.allow_unlike, confidence=parsed.confidence)
            for other in runs[1:]
        ]
    console = open_console()
    if parsed.out is not None:
        tables = write_runs_report(parsed.out.expanduser().resolve(), parsed.title, runs, comparisons)
    else:
        tables = tables_of(runs, comparisons)
    shown = [comparison_table(one) for one in comparisons] if parsed.command == "compare" else tables
    print_tables(shown, console)
    if parsed.out is not None:
        console.print(f"reports: {parsed.out}", highlight=False)
    return 0
