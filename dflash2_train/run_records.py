"""What a run leaves beside its checkpoints: one record for every start, and the picture of its curves."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from data_gen.cache.format import list_differences
from dflash2_train.attest import Attestation
from dflash2_train.config import RunConfig, to_plain
from dflash2_train.lineage import warm_start_chain
from dflash2_train.plots.training import PLOT_NAME, write_training_plot
from dflash2_train.provenance import atomic_write_json, run_record
from dflash2_train.run_state import Progress
from dflash2_train.tracker import read_metrics
from dflash2_train.training_data import TrainingData

logger = logging.getLogger(__name__)
FIRST_RECORD = "run.json"
COMPARED = ("config", "world_size", "git", "packages", "python", "machine")  # of a later start with the first one


def write_run_record(
    config: RunConfig,
    output: Path,
    data: TrainingData,
    progress: Progress,
    *,
    attested: Attestation | None,
    deepspeed: dict[str, Any],
    world_size: int,
) -> None:
    """Write ``run.json`` at the first start and ``run.attemptN.json`` at every later one. Called by the first rank.

    A later record holds under ``changed`` a line for all that is no more as it was at the first start.

    Args:
        config: as composed.
        output: run folder.
        data: what is trained on.
        progress: at this start.
        attested: verdicts of the gates; None where they were not asked again.
        deepspeed: the engine's own configuration.
        world_size: ranks.
    """
    record = run_record(to_plain(config))
    record["world_size"] = world_size
    record["attestation"] = None if attested is None else attested.to_dict()
    record["run_id"] = progress.run_id
    if progress.attempt == 1:
        record["warm_start"] = warm_start_chain(config.train.warm_start)
    record["cache"] = data.manifest.content
    record["deepspeed"] = deepspeed
    if progress.attempt > 1:
        record["changed"] = changes_since_first(output, record)
    name = FIRST_RECORD if progress.attempt == 1 else f"run.attempt{progress.attempt}.json"
    atomic_write_json(output / name, record)


def changes_since_first(output: Path, record: dict[str, Any]) -> list[str]:
    """``key: at the first start -> now`` for all that differs, also told on the console; empty without a first record.

    Args:
        output: run folder.
        record: of this start.
    """
    path = output / FIRST_RECORD
    if not path.exists():
        return []
    first = json.loads(path.read_text(encoding="utf-8"))
    parts = [{key: one[key] for key in COMPARED if key in one} for one in (first, record)]
    lines = list_differences(parts[0], {key: parts[1][key] for key in parts[0]})
    for line in lines:
        logger.info("changed since the first start: %s", line)
    return lines


def last_attempt(output: Path) -> int:
    """The highest number of a start that left a record, 0 without one; those that saved nothing count too."""
    numbers = [re.fullmatch(r"run\.attempt(\d+)\.json", path.name) for path in output.glob("run.attempt*.json")]
    return max([int(found[1]) for found in numbers if found], default=int((output / FIRST_RECORD).exists()))


def plot_run(output: Path, *, title: str) -> None:
    """Draw ``metrics.png`` from the ``metrics.jsonl`` of a training folder."""
    write_training_plot(read_metrics(output / "metrics.jsonl"), output / PLOT_NAME, title)
    logger.info("curves: %s", output / PLOT_NAME)
