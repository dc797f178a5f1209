"""``dflash2-eval``: measure an exported drafter with the built-in runner, or a server that runs it.

``eval.mode=runner`` measures the hold-out and writes into eval.output_dir: ``results-<fingerprint>.jsonl`` (a line a
prompt; a rerun continues it), ``report.json``, ``report.md``, ``report.html`` and plots. A rerun with nothing left to
measure loads no model and writes the reports again. With eval.tasks or eval.sweep it measures those, see
``grid/run.py``. ``eval.mode=server`` measures a running server, see ``server/run.py``. All hold the result against
``eval.gate.baseline`` if one is named. ``dflash2-eval compare|report|gate`` read finished results, see
``commands.py``. Exit code 1: the speculative greedy output is not the target's own, too many requests failed, or the
gate failed. Under torchrun or ``accelerate launch`` every process decodes its share of the prompts and the first
writes the reports.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.app import open_console
from dflash2_train.config import RunConfig, absolute, to_plain
from dflash2_train.evaluate.commands import NAMES, run_command
from dflash2_train.evaluate.subject import (
    decode_settings,
    describe_protocol,
    drafter_folder,
    drafter_record,
    open_models,
)
from dflash2_train.launching import Command, run_launched
from dflash2_train.provenance import atomic_write_json, atomic_write_text, run_record
from dflash2_train.run_control import only_run_in

if TYPE_CHECKING:
    import torch

    from dflash2_train.evaluate.holdout import HoldoutPrompt
    from dflash2_train.evaluate.records import ResultsFile
    from dflash2_train.evaluate.report import EvalReport
    from dflash2_train.evaluate.runs import EvalRun

logger = logging.getLogger(__name__)
PLOT_NAME = "acceptance.png"
EXIT_NOT_EQUAL = 1
EXIT_REQUESTS_FAILED = 1


def run_measurement(
    config: RunConfig,
    folder: Path,
    prompts: Sequence[HoldoutPrompt],
    protocol: dict[str, Any],
    results: ResultsFile,
    device: torch.device,
) -> None:
    """Load both models and fill ``results``."""
    from contextlib import nullcontext

    from dflash2_train.evaluate.measure import Measurement, measure_prompts
    from dflash2_train.runner import packed_linears

    drafted = int(protocol["num_drafted"])
    sampled = None
    if config.eval.temperature > 0:
        sampled = decode_settings(config, protocol, drafted=drafted, temperature=config.eval.temperature)
    target_model, drafter = open_models(config, folder, device)
    measurement = Measurement(
        target_model=target_model,
        drafter=drafter,
        greedy=decode_settings(config, protocol, drafted=drafted, temperature=0.0),
        sampled=sampled,
        baseline=config.eval.baseline,
        seed=config.eval.seed,
    )
    with packed_linears(target_model, drafter) if protocol["packed_weights"] else nullcontext():
        measure_prompts(measurement, prompts, results)


def write_report(report: EvalReport, output_dir: Path) -> EvalRun:
    """report.json, report.md, report.html and the plots, each whole or not at all; returns what the JSON holds."""
    from dflash2_train.evaluate.plots import write_acceptance_plot
    from dflash2_train.evaluate.publish import write_runs_report
    from dflash2_train.evaluate.render import to_markdown
    from dflash2_train.evaluate.runs import run_of_report

    run = run_of_report(report)
    atomic_write_json(output_dir / "report.json", {**report.to_json(), **run.to_json()})
    write_acceptance_plot(report, output_dir / PLOT_NAME)
    atomic_write_text(output_dir / "report.md", to_markdown(report, plot_name=PLOT_NAME))
    write_runs_report(output_dir, f"Evaluation of {report.protocol['experiment']}", [run], markdown=False)
    return run


def evaluate(config: RunConfig) -> int:
    """Measure, report, hold against the gate, and return the exit code."""
    if config.eval.mode == "server":
        return evaluate_server(config)
    measure = evaluate_grid if config.eval.tasks or config.eval.sweep.is_set else evaluate_runner
    if os.environ.get("RANK", "0") != "0":
        return measure(config)
    with only_run_in(absolute(config.eval.output_dir), command="dflash2-eval", key="eval.output_dir"):
        return measure(config)


def gate_code(run: EvalRun, config: RunConfig) -> int:
    """The exit code that the gate gives: 0 if it passed or none is configured."""
    from dflash2_train.evaluate.gate import EXIT_DROPPED, check_gate

    verdict = check_gate(run, config.eval.gate)
    return 0 if verdict is None or verdict.passed else EXIT_DROPPED


def evaluate_server(config: RunConfig) -> int:
    """Measure the configured server, write its run and the report of all labels, and return the exit code."""
    from dflash2_train.evaluate.publish import print_tables, write_runs_report
    from dflash2_train.evaluate.readers import read_run
    from dflash2_train.evaluate.server.run import measure_server, over_limit, run_folder
    from dflash2_train.evaluate.server.store import REPORT_NAME

    run = measure_server(config)
    folder = run_folder(config).parent
    others = sorted(path for path in folder.glob(f"*/{REPORT_NAME}") if path.parent != run_folder(config))
    runs = [run, *(read_run(path) for path in others)]
    tables = write_runs_report(folder, f"Server evaluation of {config.name}", runs)
    console = open_console()
    print_tables(tables, console)
    console.print(f"reports: {folder}", highlight=False)
    failures = over_limit(run, config.eval)
    for line in failures:
        logger.error("%s", line)
    return max(EXIT_REQUESTS_FAILED if failures else 0, gate_code(run, config))


def evaluate_grid(config: RunConfig) -> int:
    """Measure eval.tasks or eval.sweep with the built-in runner, write the reports, and return the exit code."""
    from dflash2_train.evaluate.grid.run import measure_grid, runner_folder
    from dflash2_train.evaluate.publish import print_tables, write_runs_report

    measured = measure_grid(config)
    if measured is None:
        return 0
    run, equality = measured
    folder = runner_folder(config)
    tables = write_runs_report(folder, f"Evaluation of {config.name} with the built-in runner", [run])
    console = open_console()
    print_tables(tables, console)
    console.print(f"reports: {folder}", highlight=False)
    failed = equality is not None and bool(equality.failures)
    return max(EXIT_NOT_EQUAL if failed else 0, gate_code(run, config))


def evaluate_runner(config: RunConfig) -> int:
    """Measure with the built-in runner, write its reports, and return the exit code."""
    from dflash2_train.evaluate.holdout import load_holdout
    from dflash2_train.evaluate.ranks import open_ranks
    from dflash2_train.evaluate.records import ResultsFile
    from dflash2_train.evaluate.report import build_report
    from dflash2_train.evaluate.room import open_room
    from dflash2_train.evaluate.runs import HOLDOUT_TASK
    from dflash2_train.export.evaluations import thinking_notes

    prompts = load_holdout(absolute(config.data.root), max_prompts=config.eval.max_prompts)
    folder = drafter_folder(config)
    protocol = describe_protocol(config, folder, prompts)
    room = open_room(config, folder, protocol["num_drafted"])
    room.check(HOLDOUT_TASK, [len(prompt.prompt_ids) for prompt in prompts])
    fitting = [prompt for prompt in prompts if room.fits(len(prompt.prompt_ids))]
    ranks = open_ranks(spread_target=config.eval.spread_target)
    results = ResultsFile(absolute(config.eval.output_dir), protocol, rank=ranks.rank)
    mine = ranks.share(fitting)
    ranks.wait()  # all have read before anyone appends
    if any(prompt.prompt_id not in results.records for prompt in mine):
        run_measurement(config, folder, mine, protocol, results, ranks.device)
    ranks.wait()
    if not ranks.is_first:
        return 0
    results.reload()
    drafter, too_long = drafter_record(folder), len(prompts) - len(fitting)
    report = build_report(
        [results.records[prompt.prompt_id] for prompt in fitting],
        protocol=protocol,
        run={"evaluation": run_record(to_plain(config)), "drafter": drafter},
        too_long=too_long,
        labels=[*room.labels(too_long), *thinking_notes(drafter, config.data.enable_thinking)],
    )
    return publish_holdout(report, config)


def publish_holdout(report: EvalReport, config: RunConfig) -> int:
    """Write and show the hold-out's report, and return the exit code."""
    from dflash2_train.evaluate.render import print_report

    output_dir, console = absolute(config.eval.output_dir), open_console()
    run = write_report(report, output_dir)
    print_report(report, console)
    console.print(f"reports: {output_dir}", highlight=False)
    failed = report.equality is not None and bool(report.equality.failures)
    return max(EXIT_NOT_EQUAL if failed else 0, gate_code(run, config))


def main() -> None:
    """Entry of the console script."""
    if sys.argv[1:2] and sys.argv[1] in NAMES:
        sys.exit(run_command(sys.argv[1:]))
    launched = Command(
        name="dflash2-eval",
        module="dflash2_train.evaluate.cli",
        main=evaluate,
        single=lambda config: config.eval.mode == "server" or config.eval.spread_target,
    )
    run_launched(launched)


if __name__ == "__main__":
    main()
