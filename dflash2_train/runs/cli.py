"""``dflash2-runs``: look into run folders.

    dflash2-runs list runs                        a line a run: stage, step, loss, acceptance, age
    dflash2-runs show runs/smollm2_cpu            what is known of one run
    dflash2-runs compare runs/a runs/b            settings that differ, and what came out
    dflash2-runs plot runs/a runs/b --output x.png    curves over each other; of one run its own picture
    dflash2-runs sweep runs/a/sweep               jobs of dflash2-train --multirun, the best first, with a picture

Nothing is started, changed or locked, so it may be used on runs that are under way. Exit code 2 for a folder that is
no run or cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import UserError
from dflash2_train.progress import clock

if TYPE_CHECKING:
    from rich.table import Table

    from dflash2_train.runs.folder import RunFolder

EXIT_FAULT = 2
DAY = 86_400.0


def list_runs(options: argparse.Namespace) -> None:
    """A table with a line a run, the newest sign of life first."""
    from dflash2_train.runs.compare import number
    from dflash2_train.runs.folder import find_runs, summarise

    summaries = sorted((summarise(run) for run in find_runs(options.folders)), key=lambda one: one.age_seconds)
    table = _table("run", "stage", "step", "of", "loss", "forecast", "acceptance length", "checkpoints", "age")
    for one in summaries:
        figures = (one.step, one.steps, one.loss, one.forecast, one.acceptance_length, one.checkpoints)
        table.add_row(one.name, one.stage, *(number(value) for value in figures), age(one.age_seconds))
    _print(table)


def show_run(options: argparse.Namespace) -> None:
    """Facts of each run, one under the other."""
    from dflash2_train.runs.folder import find_runs

    for run in find_runs(options.folders):
        table = _table("", run.name)
        for label, text in facts_of(run):
            table.add_row(label, text)
        _print(table)


def facts_of(run: RunFolder) -> list[tuple[str, str]]:
    """Label and text of what is known of a run; what is not known is left out."""
    from dflash2_train.runs.compare import figure_table, final_figures
    from dflash2_train.runs.folder import summarise

    summary, record, checkpoints, best = summarise(run), run.record(), run.checkpoints(), run.best()
    facts = [("folder", str(run.root)), ("stage", summary.stage), ("last sign of life", age(summary.age_seconds))]
    if record:
        target, drafter = record["config"]["target"], record["config"]["drafter"]
        facts += [
            ("target", str(target["name"])),
            ("drafter", f"{drafter['num_layers']} layers, block {drafter['block_size']}"),
            ("steps", f"{summary.step:,} of {summary.steps:,}" if summary.steps else f"{summary.step:,}"),
            ("begun (UTC)", str(run.first_record().get("time_utc", "-"))),
            ("command", " ".join(record["command"])),
            ("code", code_of(record["git"])),
            ("machine", f"{record['machine']['cpu']}, {record['machine']['cores']} cores"),
        ]
    if checkpoints:
        facts.append(("checkpoints", ", ".join(str(step) for step in checkpoints)))
    if best is not None:
        facts.append(("best checkpoint", f"{best['checkpoint']}: {best['metric']} {best['value']:.4g}"))
    facts += [(f"rank {state['rank']}", rank_of(state, time.time())) for state in run.ranks()]
    if record.get("changed"):
        facts.append(("changed since its start", "\n".join(record["changed"])))
    facts += [(name, texts[0]) for name, texts in figure_table([final_figures(run)]) if name not in ("step", "seconds")]
    seconds = final_figures(run).get("seconds")
    return [*facts, ("training time", clock(seconds))] if seconds is not None else facts


def rank_of(state: dict[str, Any], now: float) -> str:
    """What a rank does, or why it ended."""
    seen = age(now - state["time"])
    if state["ended"]:
        return f"ended {seen} ago behind step {state['step']}: {state['ended']}"
    return f"{state['doing']} behind step {state['step']}, last sign of life {seen} ago"


def code_of(git: dict[str, str | None]) -> str:
    """Commit that a run was made with, and whether it had uncommitted changes."""
    return (git["commit"] or "unknown") + (", edited" if git["uncommitted_sha256"] else "")


def compare_runs(options: argparse.Namespace) -> None:
    """Settings that differ and final figures, side by side."""
    from dflash2_train.runs.compare import LAST_ROWS, differing_settings, figure_table, final_figures
    from dflash2_train.runs.folder import find_runs

    runs = find_runs(options.folders)
    if len(runs) < 2:
        raise UserError(f"{runs[0].root}: one run alone has nothing to be compared with. Name two or more folders.")
    names = unlike_names(runs)
    settings = _table("setting", *names)
    for key, texts in differing_settings([run.record().get("config", {}) for run in runs]):
        settings.add_row(key, *texts)
    figures = _table(f"figure (means over the last {LAST_ROWS} log lines)", *names)
    for key, texts in figure_table([final_figures(run) for run in runs]):
        figures.add_row(key, *texts)
    _print(settings, figures)


def plot_runs(options: argparse.Namespace) -> None:
    """Curves of one run as at its end, or of several over each other."""
    from dflash2_train.plots.overlay import write_overlay
    from dflash2_train.plots.training import PLOT_NAME, write_training_plot
    from dflash2_train.runs.folder import METRICS, find_runs

    runs = find_runs(options.folders)
    for run in runs:
        if not run.rows():
            raise UserError(f"{run.training / METRICS}: no logged step yet, so there is nothing to draw. Train first.")
    if len(runs) == 1:
        path = options.output or runs[0].training / PLOT_NAME
        write_training_plot(runs[0].rows(), path, runs[0].name)
    else:
        path = options.output or Path("runs.png")
        names = unlike_names(runs)
        write_overlay({name: run.rows() for name, run in zip(names, runs, strict=True)}, path, " | ".join(names))
    _print(f"curves: {path}")


def show_sweep(options: argparse.Namespace) -> None:
    """Table and picture of a sweep, also while it is under way."""
    from dflash2_train.runs.sweep import report_sweep

    for folder in options.folders:
        report_sweep(folder, by=options.by)


def unlike_names(runs: Sequence[RunFolder]) -> list[str]:
    """Names of runs, with as much of the way to them as it takes to tell them apart."""
    depth = 1
    parts = [run.root.parts for run in runs]
    while len({part[-depth:] for part in parts}) < len({*parts}):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def age(seconds: float) -> str:
    """Time gone by, in the unit that suits it."""
    return f"{seconds / DAY:.1f} days" if seconds >= DAY else clock(max(0.0, seconds))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    description = __doc__ or ""
    top = argparse.ArgumentParser(
        prog="dflash2-runs", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="list | show | compare | plot | sweep")
    for name, run, words in (
        ("list", list_runs, "a line a run"),
        ("show", show_run, "what is known of a run"),
        ("compare", compare_runs, "settings that differ, and what came out"),
        ("plot", plot_runs, "curves as a PNG file"),
        ("sweep", show_sweep, "jobs of a sweep, the best first, as a table and a picture"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        folders = "folders of sweeps" if name == "sweep" else "run folders, or folders of them"
        command.add_argument("folders", nargs="+", type=Path, help=folders)
        command.set_defaults(run=run)
        if name == "plot":
            command.add_argument("--output", type=Path, help="default: metrics.png of the run, or runs.png here")
        if name == "sweep":
            command.add_argument("--by", help="figure that ranks; default: the best measured one that there is")
    return top


def run_command(arguments: Sequence[str]) -> int:
    """Run one sub-command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAULT
    return 0


def _table(*headings: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="left" if place == 0 or len(headings) == 2 else "right")
    return table


def _print(*parts: object) -> None:
    from dflash2_train.app import open_console

    console = open_console()
    for part in parts:
        console.print(part, highlight=False, markup=False)


def main() -> None:
    """Entry of the console script ``dflash2-runs``."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
