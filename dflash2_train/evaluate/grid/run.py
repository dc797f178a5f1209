"""``eval.mode=runner`` with eval.tasks or eval.sweep: measure what is missing, then report all of it.

Into ``eval.output_dir/runner``: ``answers-<fingerprint>.jsonl``, a line a conversation and temperature, which a rerun
continues; ``report.json`` in the form that all runs share; ``report.md``, ``report.html`` and ``plots.png``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig, absolute, to_plain
from dflash2_train.evaluate.grid.cells import cells_of, equality_checks
from dflash2_train.evaluate.grid.measure import Grid, measure_units
from dflash2_train.evaluate.grid.plan import (
    PLAIN,
    ScriptedTask,
    Unit,
    describe_grid,
    draft_lengths,
    load_scripts,
    units_of,
)
from dflash2_train.evaluate.grid.records import UnitRecord
from dflash2_train.evaluate.measure import WARM_UP_TOKENS
from dflash2_train.evaluate.ranks import Ranks, open_ranks
from dflash2_train.evaluate.records import RecordsFile
from dflash2_train.evaluate.render import lines_of_equality
from dflash2_train.evaluate.report import EqualityReport, judge_checks
from dflash2_train.evaluate.room import Room, open_room
from dflash2_train.evaluate.runs import RUNNER, EvalRun, runner_hardware
from dflash2_train.evaluate.subject import (
    decode_settings,
    describe_models,
    drafter_folder,
    drafter_record,
    open_models,
)
from dflash2_train.evaluate.trained_on import check_tasks
from dflash2_train.export.evaluations import thinking_notes
from dflash2_train.provenance import atomic_write_json, run_record

logger = logging.getLogger(__name__)
REPORT_NAME = "report.json"


def measure_grid(config: RunConfig) -> tuple[EvalRun, EqualityReport | None] | None:
    """Measure and write ``report.json``; None on every rank but the first.

    Raises:
        ConfigError: prompts, drafter or K that cannot be measured, or a task of which no prompt fits the context.
    """
    folder = drafter_folder(config)
    models = describe_models(config, folder)
    room = open_room(config, folder, max(draft_lengths(config, models["block_size"])))
    scripted = load_scripts(config)
    overlap = check_tasks(config, [one.task for one in scripted])
    protocol = describe_grid(config, models, scripted, room.context)
    for one in scripted:
        room.check(one.name, [len(script.prompt_ids) for script in one.scripts])
    ranks = open_ranks(spread_target=config.eval.spread_target)
    output_dir = runner_folder(config)
    results = RecordsFile(output_dir, protocol, UnitRecord.from_json, stem="answers", rank=ranks.rank)
    units = units_of(scripted, protocol["temperatures"])
    mine = ranks.share(units)
    ranks.wait()  # all have read before anyone appends
    if any(unit.key not in results.records for unit in mine):
        _measure(config, folder, protocol, room, mine, results, ranks)
    ranks.wait()
    if not ranks.is_first:
        return None
    results.reload()
    records = [results.records[unit.key] for unit in units]
    run, equality = build_run(config, folder, protocol, room, scripted, records, overlap)
    value = {**run.to_json(), "equality": asdict(equality) if equality else None}
    atomic_write_json(output_dir / REPORT_NAME, value)
    return run, equality


def runner_folder(config: RunConfig) -> Path:
    """Where the files go."""
    return absolute(config.eval.output_dir) / "runner"


def _measure(
    config: RunConfig,
    folder: Path,
    protocol: dict[str, Any],
    room: Room,
    units: Sequence[Unit],
    results: RecordsFile[UnitRecord],
    ranks: Ranks,
) -> None:
    """Load both models and fill ``results``."""
    from dflash2_train.runner import packed_linears

    target_model, drafter = open_models(config, folder, ranks.device)
    grid = Grid(
        target_model=target_model,
        drafter=drafter,
        settings=lambda drafted, temperature: decode_settings(
            config, protocol, drafted=max(1, drafted), temperature=temperature
        ),
        drafted=protocol["draft_lengths"],
        baseline=config.eval.baseline,
        room=room,
        seed=config.eval.seed,
    )
    with packed_linears(target_model, drafter) if protocol["packed_weights"] else nullcontext():
        measure_units(grid, units, results)


def build_run(
    config: RunConfig,
    folder: Path,
    protocol: dict[str, Any],
    room: Room,
    scripted: Sequence[ScriptedTask],
    records: Sequence[UnitRecord],
    overlap: Sequence[str],
) -> tuple[EvalRun, EqualityReport | None]:
    """All records as a run, with what is known of an overlap with training; and the verdict on greedy equality.

    The latter is None where nothing was checked.
    """
    drafted = protocol["draft_lengths"]
    cells = cells_of(
        scripted,
        {record.key: record for record in records},
        temperatures=protocol["temperatures"],
        decoders=[PLAIN, *drafted] if config.eval.baseline else drafted,
        room=room,
    )
    equality = judge_checks(equality_checks(records), config.eval.dtype)
    record, drafter = run_record(to_plain(config)), drafter_record(folder)
    hardware = runner_hardware(record.get("machine"), protocol["device"])
    run = EvalRun(
        kind=RUNNER,
        label="runner",
        protocol={"engine": "built-in runner", "hardware": hardware, "ignore_eos": False, **protocol},
        cells=cells,
        labels=[
            *run_labels(protocol, scripted, equality),
            *overlap,
            *thinking_notes(drafter, config.data.enable_thinking),
        ],
        run={"evaluation": record, "drafter": drafter},
    )
    return run, equality


def run_labels(
    protocol: dict[str, Any], scripted: Sequence[ScriptedTask], equality: EqualityReport | None
) -> list[str]:
    """What a reader must know about all figures."""
    labels = [
        f"warm-up: at each start every decoder first answers one prompt with up to {WARM_UP_TOKENS} tokens at each "
        "temperature; those answers are in no figure"
    ]
    if protocol["baseline"]:
        labels.append("plain decoding and every K take turns, conversation by conversation, in one process")
    if 0.0 in protocol["temperatures"]:
        labels += [f"greedy equality: {line}" for line in lines_of_equality(equality, what="answers")]
    sampled = [f"{temperature:g}" for temperature in protocol["temperatures"] if temperature > 0]
    if sampled:
        labels.append(
            f"temperature {', '.join(sampled)}: equality does not apply to sampled answers, which differ from plain "
            "ones and have their distribution"
        )
    if any(script.follow_ups for one in scripted for script in one.scripts):
        labels.append("further turns are asked with the decoder's own answers before them, all their tokens kept")
    return labels
