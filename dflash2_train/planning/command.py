"""``dflash2-train plan=true``: make, show and keep the plan of a training step."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from dflash2_train.app import open_console
from dflash2_train.config import RunConfig, absolute
from dflash2_train.planning.fit import TIGHT
from dflash2_train.planning.report import TrainingPlan, assumptions, failures, make_training_plan, tables
from dflash2_train.provenance import atomic_write_json

logger = logging.getLogger(__name__)
PLAN_FILE = "train_plan.json"
EXIT_DOES_NOT_FIT = 1  # a command's own "no"


def plan_training(config: RunConfig) -> int:
    """Show the plan on standard output and write it to ``run_dir/train_plan.json``; 1 where something does not fit."""
    plan = make_training_plan(config)
    show(plan, open_console())
    folder = absolute(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / PLAN_FILE, plan.to_dict())
    for line in failures(plan):
        logger.warning("%s", line)
    for verdict in plan.verdicts:
        if verdict.word == TIGHT:
            logger.warning(
                "%s: rows of short documents can need %.1f GB; lower train.anchors_per_document if there are many",
                verdict.place,
                verdict.needed_fullest / 1e9,
            )
    logger.info("written to %s", Path(config.run_dir) / PLAN_FILE)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def show(plan: TrainingPlan, console: Console) -> None:
    """All tables, then what they assume."""
    for title, table in tables(plan):
        console.print(title, style="italic", highlight=False)
        console.print(table)
    for line in assumptions(plan):
        console.print(f"assumed: {line}", highlight=False)
