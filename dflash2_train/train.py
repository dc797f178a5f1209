"""``dflash2-train``: from captured samples, in a cache or out of a ring, to a trained, exported drafter.

Started again with the same command it continues from the newest whole checkpoint, bit for bit, or on another number of
ranks with the same windows; finished already, it says so and does nothing. Signals and limits in time finish the step,
save and leave; see :mod:`dflash2_train.exit_codes`. The file is in the order of a run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.app import guarded, wants_sweep
from dflash2_train.config import RunConfig, absolute
from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.launching import Command, prepare_folder, run_launched, without_ranks
from dflash2_train.run_control import StopRequest, only_run_in, rank_folder
from dflash2_train.run_state import fingerprint

if TYPE_CHECKING:
    from dflash2_train.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> int:
    """Run or continue the training of ``config`` and export its result; or only plan it."""
    if config.train.plan:
        from dflash2_train.planning.command import plan_training

        return plan_training(config)
    from dflash2_train.admission import check_captures
    from dflash2_train.checkpoint import check_resumable, newest_checkpoint
    from dflash2_train.export.run import check_exportable
    from dflash2_train.training_data import open_training_data, ring_is_gone

    output = absolute(config.train.output_dir)
    rank = int(os.environ.get("RANK", "0"))
    first = rank == 0
    with only_run_in(output) if first else contextlib.nullcontext():
        prepare_folder(rank_folder(output, rank))
        if first:
            prepare_folder(absolute(config.export.output_dir).parent, "export.output_dir")
        check_exportable(config)
        done = newest_checkpoint(output)
        if done is not None and done.step >= config.train.steps and ring_is_gone(config):
            logger.info("training is complete at step %d; its ring is gone, so settings are not compared", done.step)
            return export_result(config) if first else 0
        # The checksums of a cache are verified by the run.
        data = open_training_data(config, rank=0, verify_checksums=False, give_up=lambda: False)
        check_captures(data, config)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        wanted = fingerprint(config, data, world_size)
        data.close()
        if done is None or done.step < config.train.steps:
            return run_rank(config, output, done)
        check_resumable(done, wanted)
        if first:
            data.finish()
        logger.info("training is complete at step %d (%s)", done.step, done.folder)
        return export_result(config) if first else 0  # every rank leaves, or the others would wait for the first


def run_rank(config: RunConfig, output: Path, found: Checkpoint | None) -> int:
    """What every rank does: join the others, resume from ``found``, train, save; the first rank exports."""
    import torch

    from dflash2_train.heap import keep_freed_memory
    from dflash2_train.ranks import start_ranks, stop_ranks
    from dflash2_train.ring_rows import WaitStopped

    stop = StopRequest()
    stop.heed(config.train.guard, os.environ)
    if not torch.cuda.is_available():
        keep_freed_memory()
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.train.seed)
    rank, world_size = start_ranks(config.train.guard)
    try:
        finished = train_on_rank(config, output, found, stop, rank=rank, world_size=world_size)
    except WaitStopped as stopped:
        logger.info("%s; the same command continues from the last checkpoint", stopped)
        return EXIT_STOPPED
    stop_ranks()  # only now: a group with a rank that failed waits here for those that wait for it
    if not finished:
        return EXIT_STOPPED
    return export_result(config) if rank == 0 else 0


def train_on_rank(
    config: RunConfig, output: Path, found: Checkpoint | None, stop: StopRequest, *, rank: int, world_size: int
) -> bool:
    """Build, resume from ``found``, loop and save, watched over; False when asked to stop before the last step."""
    from dflash2_train.guard import watched
    from dflash2_train.ranks import first_rank_number
    from dflash2_train.training_data import open_training_data
    from dflash2_train.training_run import TrainingRun

    ending = threading.Event()
    job = first_rank_number(secrets.randbits(48))
    with (
        watched(output, config.train.guard, rank=rank, world_size=world_size, job=job) as watchdog,
        contextlib.closing(
            open_training_data(
                config, rank=rank, verify_checksums=rank == 0, give_up=lambda: bool(stop.reason) or ending.is_set()
            )
        ) as data,
    ):
        run = TrainingRun(config, output, data, found, watchdog, rank=rank, world_size=world_size)
        finished = run.loop(stop, ending)
        if finished and rank == 0:
            data.finish()
    return finished


def export_result(config: RunConfig) -> int:
    """Export the newest checkpoint, unless that very checkpoint is exported already; then the gate, if it is on."""
    from dflash2_train.export.formats import export_drafter

    folder = export_drafter(config)
    logger.info("serve-ready drafter: %s", folder)
    if not config.eval.gate.after_training:
        return 0
    from dflash2_train.evaluate.cli import evaluate

    with without_ranks():  # the others have left
        return evaluate(config)


def sweep(words: list[str]) -> int:
    """Train every combination of values that ``words`` name, each in a process of its own."""
    from dflash2_train.sweep.run import run_sweep

    return run_sweep(words)


def main() -> None:
    """Entry of the console script ``dflash2-train``; with ``--multirun``, of a sweep.

    ``plan=true``, no option of that group, is a short form of ``train.plan=true``.
    """
    sys.argv[1:] = ["train.plan=true" if word == "plan=true" else word for word in sys.argv[1:]]
    words = sys.argv[1:]
    if wants_sweep(words):
        sys.exit(guarded(lambda: sweep(words)))
    run_launched(
        Command(
            name="dflash2-train",
            module="dflash2_train.train",
            main=train,
            single=lambda config: config.train.plan,
            folder=lambda config: absolute(config.train.output_dir),
        )
    )


if __name__ == "__main__":
    main()
