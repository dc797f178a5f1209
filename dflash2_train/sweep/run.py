"""Going through the jobs of a sweep: what is done is left alone, what fails is recorded, the rest goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError, absolute
from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.progress import clock
from dflash2_train.provenance import atomic_write_json, run_record
from dflash2_train.run_control import only_run_in
from dflash2_train.runs.sweep import SWEEP_FILE, report_sweep
from dflash2_train.sweep.grid import Sweep, SweepJob, open_sweep
from dflash2_train.sweep.jobs import CONSOLE_FILE, DONE, FAILED, STOPPED, JobRecord, Signals, is_done, run_job

logger = logging.getLogger(__name__)
EXIT_FAILED = 1


def train_command(job: SweepJob) -> list[str]:
    """What runs one job: the same interpreter and the same sources as this process."""
    return [sys.executable, "-m", "dflash2_train.train", *job.words]


def run_sweep(words: Sequence[str], *, command: Callable[[SweepJob], list[str]] = train_command) -> int:
    """Run the sweep that ``words`` describe and report it.

    Args:
        words: the command line behind ``dflash2-train``.
        command: what runs a job.

    Returns:
        0 when every job is done, 1 when one failed, EXIT_STOPPED when one was stopped and none failed.

    Raises:
        ConfigError: see :func:`dflash2_train.sweep.grid.open_sweep`.
        UserError: there is no data, or another sweep works in the folder.
    """
    if "RANK" in os.environ:
        raise UserError(
            "dflash2-train --multirun was started as one rank of several (RANK is set), and a sweep starts each of its "
            "jobs itself. Start it plainly, without torchrun."
        )
    sweep = open_sweep(words)
    check_data(sweep)
    with only_run_in(sweep.folder, key="hydra.sweep.dir"), Signals() as signals:
        note_sweep(sweep, words)
        states = run_jobs(sweep, command, signals)
        report_sweep(sweep.folder)
    if FAILED in states:
        return EXIT_FAILED
    return EXIT_STOPPED if STOPPED in states or len(states) < len(sweep.jobs) else 0


def check_data(sweep: Sweep) -> None:
    """Refuse a sweep without captures before its first job starts."""
    from data_gen.cache.format import MANIFEST_FILE

    for root in dict.fromkeys(job.config.data.root for job in sweep.jobs):
        if not (absolute(root) / "capture" / MANIFEST_FILE).exists():
            raise UserError(
                f"data.root={root}: no captured samples there, and all jobs of a sweep read the same ones. Run "
                "dflash2-gen-data with the same experiment first, or name the root of a run that has them."
            )


def note_sweep(sweep: Sweep, words: Sequence[str]) -> None:
    """Write ``sweep.json``; jobs of an earlier start with other values stay in it."""
    path = sweep.folder / SWEEP_FILE
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    jobs = {job["name"]: job for job in earlier.get("jobs", [])}
    jobs.update({job.name: {"name": job.name, "changes": job.changes} for job in sweep.jobs})
    record = run_record({}, ["dflash2-train", *words])
    del record["config"]
    atomic_write_json(path, {**record, "jobs": list(jobs.values())})


def run_jobs(sweep: Sweep, command: Callable[[SweepJob], list[str]], signals: Signals) -> list[str]:
    """States of the jobs, in order; fewer of them when the sweep was asked to stop."""
    states = []
    for number, job in enumerate(sweep.jobs, start=1):
        head = f"[{number}/{len(sweep.jobs)}] {job.name}"
        if is_done(job):
            logger.info("%s: done already", head)
            states.append(DONE)
            continue
        if signals.stopping:
            break
        logger.info("%s: started, see %s", head, _shown(job.folder / CONSOLE_FILE))
        record = run_job(job, command(job), signals)
        states.append(record.state)
        logger.log(logging.WARNING if record.state == FAILED else logging.INFO, "%s: %s", head, told(record))
    if signals.stopping or STOPPED in states:
        logger.info("not all jobs are at their end; the same command continues")
    return states


def told(record: JobRecord) -> str:
    """How a job went, in one line."""
    end = f"{record.state} after {clock(record.seconds)}"
    return f"{end} (exit code {record.exit_code}): {record.cause}" if record.cause else end


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
