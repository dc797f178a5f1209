"""``dflash2-eval``: measure an exported drafter with the built-in runner, or a server that runs it.

``eval.mode=runner`` writes into eval.output_dir: ``results-<fingerprint>.jsonl`` (a line a prompt; a rerun continues
it), ``report.json``, ``report.md``, ``report.html`` and plots. A rerun with nothing left to measure loads no model and
writes the reports again. ``eval.mode=server`` measures a running server, see ``server/run.py``. Both hold the result
against ``eval.gate.baseline`` if one is named. ``dflash2-eval compare|report|gate`` read finished results, see
``commands.py``. Exit code 1: the speculative greedy output is not the target's own, too many requests failed, or the
gate failed. Under torchrun or ``accelerate launch`` every process decodes its share of the prompts and the first
writes the reports.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.app import open_console
from dflash2_train.config import ConfigError, RunConfig, absolute, to_plain
from dflash2_train.evaluate.commands import NAMES, run_command
from dflash2_train.launching import Command, run_launched
from dflash2_train.provenance import atomic_write_json, atomic_write_text, run_record, sha256_file

if TYPE_CHECKING:
    import torch

    from dflash2_train.evaluate.holdout import HoldoutPrompt
    from dflash2_train.evaluate.records import ResultsFile
    from dflash2_train.evaluate.report import EvalReport
    from dflash2_train.evaluate.runs import EvalRun
    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.drafter_config import DrafterShape

logger = logging.getLogger(__name__)

DRAFTER_FILES = ("config.json", "model.safetensors", "mask_embedding.pt")
PLOT_NAME = "acceptance.png"
EXIT_NOT_EQUAL = 1
EXIT_REQUESTS_FAILED = 1


def drafter_folder(config: RunConfig) -> Path:
    """The exported folder to measure.

    Raises:
        ConfigError: it lacks a file of an export.
    """
    key = "export.output_dir" if config.eval.drafter is None else "eval.drafter"
    folder = absolute(config.export.output_dir if config.eval.drafter is None else config.eval.drafter)
    for name in DRAFTER_FILES:
        if not (folder / name).is_file():
            raise ConfigError(
                f"{key}={str(folder)!r}: not an exported drafter, {name} is missing. "
                "Run dflash2-export with the same experiment, or name a folder with eval.drafter."
            )
    return folder


def published_shape(folder: Path) -> DrafterShape:
    """The shape in an export's config.json.

    Raises:
        ConfigError: it is not the configuration of a drafter that can be run here.
    """
    from dflash2_train.model.drafter_config import DrafterShape

    try:
        return DrafterShape.from_published(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error} Export the drafter again.") from error


def num_drafted(config: RunConfig, block_size: int) -> int:
    """K of this measurement, at most what the drafter was trained for."""
    trained = block_size - 1
    chosen = trained if config.eval.num_drafted is None else config.eval.num_drafted
    if chosen > trained:
        raise ConfigError(
            f"eval.num_drafted={chosen}: the drafter's block_size {block_size} allows {trained} at most. Lower it."
        )
    if chosen < trained:
        logger.info("drafting %d tokens a round; the drafter was trained for %d", chosen, trained)
    return chosen


def describe_protocol(config: RunConfig, folder: Path, prompts: Sequence[HoldoutPrompt]) -> dict[str, Any]:
    """All that shapes the measured numbers, as JSON values. It is what the results' fingerprint covers."""
    import torch

    from dflash2_train.evaluate.holdout import prompts_hash
    from dflash2_train.target import open_target_config

    target = open_target_config(config.target)
    shape = published_shape(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampled = config.eval.temperature > 0
    return {
        "experiment": config.name,
        "mode": config.eval.mode,
        "target": config.target.name,
        "target_hash": target.target_hash,
        "drafter_sha256": {name: sha256_file(folder / name) for name in DRAFTER_FILES},
        "dtype": config.eval.dtype,
        "device": device,
        "packed_weights": config.eval.pack_weights and device == "cpu" and torch.backends.mkldnn.is_available(),
        "spread_target": config.eval.spread_target,
        "block_size": shape.block_size,
        "num_drafted": num_drafted(config, shape.block_size),
        "concurrency": 1,
        "max_new_tokens": config.eval.max_new_tokens,
        "stop_ids": sorted(target.eos_token_ids),
        "prompts": len(prompts),
        "prompts_sha256": prompts_hash(prompts),
        "enable_thinking": config.data.enable_thinking,
        "baseline": config.eval.baseline,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p if sampled else None,
        "top_k": config.eval.top_k if sampled else None,
        "min_p": config.eval.min_p if sampled else None,
        "draft_sampling": config.eval.draft_sampling if sampled else None,
        "seed": config.eval.seed if sampled else None,
    }


def open_drafter(folder: Path, dtype: str) -> Drafter:
    """The exported drafter, ready to run.

    Raises:
        ConfigError: the folder's files are not what an export writes.
    """
    from dflash2_train.export.hf import load_drafter

    try:
        return load_drafter(folder, dtype).eval()
    except ValueError as error:
        raise ConfigError(f"{error} Export the drafter again.") from error


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
    from dflash2_train.runner import DecodeSettings, packed_linears
    from dflash2_train.target import load_target_model

    greedy = DecodeSettings(
        max_new_tokens=config.eval.max_new_tokens,
        num_drafted=protocol["num_drafted"],
        stop_ids=frozenset(protocol["stop_ids"]),
    )
    sampled = None
    if config.eval.temperature > 0:
        sampled = DecodeSettings(
            max_new_tokens=greedy.max_new_tokens,
            num_drafted=greedy.num_drafted,
            stop_ids=greedy.stop_ids,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            min_p=config.eval.min_p,
            draft_sampling=config.eval.draft_sampling,
        )
    where = "auto" if config.eval.spread_target else device
    target_model = load_target_model(config.target, config.eval.dtype, device=where)
    head = target_model.get_output_embeddings()
    drafter = open_drafter(folder, config.eval.dtype).to(next(head.parameters()).device)
    measurement = Measurement(
        target_model=target_model,
        drafter=drafter,
        greedy=greedy,
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


def drafter_record(folder: Path) -> Any:
    """The run record that the export carries, or None."""
    path = folder / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def evaluate(config: RunConfig) -> int:
    """Measure, report, hold against the gate, and return the exit code."""
    return evaluate_server(config) if config.eval.mode == "server" else evaluate_runner(config)


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


def evaluate_runner(config: RunConfig) -> int:
    """Measure with the built-in runner, write its reports, and return the exit code."""
    from dflash2_train.evaluate.holdout import load_holdout
    from dflash2_train.evaluate.ranks import open_ranks
    from dflash2_train.evaluate.records import ResultsFile
    from dflash2_train.evaluate.render import print_report
    from dflash2_train.evaluate.report import build_report

    console = open_console()
    prompts = load_holdout(absolute(config.data.root), max_prompts=config.eval.max_prompts)
    folder = drafter_folder(config)
    protocol = describe_protocol(config, folder, prompts)
    output_dir = absolute(config.eval.output_dir)
    ranks = open_ranks()
    if config.eval.spread_target and ranks.count > 1:
        raise ConfigError(
            f"eval.spread_target=true: {ranks.count} processes would each spread a target over the same GPUs. "
            "Start one process."
        )
    results = ResultsFile(output_dir, protocol, rank=ranks.rank)
    mine = ranks.share(prompts)
    ranks.wait()  # all have read before anyone appends
    if any(prompt.prompt_id not in results.records for prompt in mine):
        run_measurement(config, folder, mine, protocol, results, ranks.device)
    ranks.wait()
    if not ranks.is_first:
        return 0
    results.reload()
    report = build_report(
        [results.records[prompt.prompt_id] for prompt in prompts],
        protocol=protocol,
        run={"evaluation": run_record(to_plain(config)), "drafter": drafter_record(folder)},
    )
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
