"""One training on one rank, from the first step to the last: built or resumed, looped, logged, validated, saved."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch

from dflash2_train.admission import attest_cache
from dflash2_train.attest import Attestation
from dflash2_train.best import BestKeeper, open_validator
from dflash2_train.building import build_objective
from dflash2_train.checkpoint import Checkpoint, check_resumable, check_space, load_checkpoint, save_checkpoint
from dflash2_train.config import RunConfig
from dflash2_train.data import PackedBatch
from dflash2_train.engine import TrainEngine
from dflash2_train.guard import Watchdog
from dflash2_train.guard.status import SAVING, STEPPING, VALIDATING, WAITING
from dflash2_train.layer_execution import apply_layer_options
from dflash2_train.log_line import RunLog, step_values
from dflash2_train.metrics import MetricSums
from dflash2_train.prefetch import Prefetcher
from dflash2_train.ring_rows import WaitStopped
from dflash2_train.run_control import StopRequest
from dflash2_train.run_records import last_attempt, plot_run, write_run_record
from dflash2_train.run_state import Progress, fingerprint
from dflash2_train.telemetry.recorder import StepRecorder
from dflash2_train.training_data import TrainingData, build_loader
from dflash2_train.validation import Outcome
from dflash2_train.window_step import WindowStep

logger = logging.getLogger(__name__)
AGREE_EVERY_S = 0.5  # ranks that wait for a stream tell each other so


class TrainingRun:
    """Everything that lives from the first step to the last."""

    def __init__(
        self,
        config: RunConfig,
        output: Path,
        data: TrainingData,
        found: Checkpoint | None,
        watchdog: Watchdog,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.config, self.output, self.data, self.watchdog = config, output, data, watchdog
        self.saved_step = -1 if found is None else found.step
        self.fingerprint = fingerprint(config, data, world_size)
        if found is not None:
            check_resumable(found, self.fingerprint)
        self.loader = build_loader(config, data, rank=rank, world_size=world_size, pin=torch.cuda.is_available())
        attested = self.admit(rank, world_size) if found is None else None
        self.objective = build_objective(config, None if found is not None else data.first_samples())
        self.engine = TrainEngine(self.objective, config.train)
        self.prepare_device()
        self.recorder = StepRecorder(config, self.objective, device=self.engine.device, world_size=world_size)
        self.progress = self.start_progress(found)
        self.step = WindowStep(
            config,
            self.objective,
            self.engine,
            self.recorder,
            self.progress,
            rows_per_window=self.loader.rows_per_window,
            output=output,
        )
        validator = open_validator(config, data, self.objective, self.engine)
        self.best = BestKeeper(validator, self.recorder, self.progress, output)
        self.engine.barrier()  # no rank reads before the first one has told where all begin
        if rank == 0:
            self.write_records(attested)

    def admit(self, rank: int, world_size: int) -> Attestation | None:
        """Before the first step of all: tell a ring where it begins, and put the samples through their gates."""
        if rank == 0:
            self.begin(row=0, world_size=world_size)
        return attest_cache(self.config, self.output, self.data.attestable(), rank)

    def begin(self, *, row: int, world_size: int) -> None:
        """Tell the source of the data from where on it is read, and to where. Called by the first rank."""
        goal = self.config.train.steps * self.loader.rows_per_window
        self.data.begin(row=row, world_size=world_size, goal=goal)

    def prepare_device(self) -> None:
        """Put the frozen tables where the drafter is, and apply what shapes how its layers run."""
        dtype = torch.bfloat16 if self.config.train.dtype == "bfloat16" else torch.float32
        self.objective.frozen.to(self.engine.device, dtype)
        apply_layer_options(self.objective.drafter.layers, self.config.train, self.engine.device)

    def start_progress(self, found: Checkpoint | None) -> Progress:
        """Where the run stands: at its beginning, or where ``found`` was saved, to which the engine is set."""
        averaged = self.config.train.ema_decay is not None
        check_space(self.engine, self.objective.drafter, self.output, averaged=averaged)
        if found is None:
            return Progress(run_id=f"{self.config.name}-{os.urandom(4).hex()}")
        progress = Progress(**load_checkpoint(self.engine, self.objective.drafter, found))
        progress.attempt = max(progress.attempt, last_attempt(self.output)) + 1
        logger.info("continuing from step %d (%s)", progress.step, found.folder)
        if self.engine.rank == 0:
            self.begin(row=progress.rows_consumed, world_size=self.engine.world_size)
        return progress

    def write_records(self, attested: Attestation | None) -> None:
        """Record this start, and the mark of the best checkpoint, should a kill have kept it from being set."""
        self.best.mark()
        write_run_record(
            self.config,
            self.output,
            self.data,
            self.progress,
            attested=attested,
            deepspeed=self.engine.deepspeed_config,
            world_size=self.engine.world_size,
        )

    def open_windows(self, ending: threading.Event) -> Prefetcher:
        """The windows that are left, read ahead."""
        self.recorder.start()
        return Prefetcher(
            self.loader,
            start=self.progress.rows_consumed,
            windows=self.config.train.steps - self.progress.step,
            depth=self.config.train.prefetch_windows,
            closing=ending,
        )

    def loop(self, stop: StopRequest, ending: threading.Event) -> bool:
        """Train to the last step; False when asked to stop before."""
        cfg, progress, first = self.config.train, self.progress, self.engine.rank == 0
        started, before = time.monotonic(), progress.seconds
        if cfg.max_seconds is not None:
            stop.stop_in(cfg.max_seconds, f"train.max_seconds={cfg.max_seconds:g}")
        with (
            RunLog(self.config, self.output, progress, self.fingerprint, first=first) as log,
            self.open_windows(ending) as windows,
        ):
            stopping = False
            while progress.step < cfg.steps and not stopping:
                self.tell(WAITING)
                batches = self.next_window(windows, stop)
                if batches is None:
                    stopping = True
                else:
                    self.tell(STEPPING)
                    sums = self.step(batches)
                    progress.seconds = before + time.monotonic() - started
                    stopping = self.engine.any_rank(bool(stop.reason))
                    self.look_back(sums, windows, log, stopping=stopping)
                if stopping and progress.step < cfg.steps:
                    self.save()
                    reason = stop.reason or "another rank was asked to"
                    logger.info("stopped at step %d (%s); the same command continues", progress.step, reason)
        if first and progress.step >= cfg.steps:
            plot_run(self.output, title=self.config.name)
        return progress.step >= cfg.steps

    def tell(self, doing: str) -> None:
        """Give a sign of life."""
        self.watchdog.beat(step=self.progress.step, doing=doing)

    def next_window(self, windows: Prefetcher, stop: StopRequest) -> list[PackedBatch] | None:
        """The next window, or None where a rank was asked to stop while a stream kept one of them waiting.

        Ranks wait for a stream together: none stands in a collective meanwhile, and all leave behind the same step.
        """
        while self.config.data.mode == "stream":
            ready = asked = False
            try:
                ready = windows.ready(AGREE_EVERY_S)
            except WaitStopped:
                asked = True
            waiting, leaving = self.engine.any_rank_each([not ready, asked or bool(stop.reason)])
            if leaving:
                return None
            if not waiting:
                break
            self.tell(WAITING)
        return windows.next()

    def look_back(self, sums: MetricSums, windows: Prefetcher, log: RunLog, *, stopping: bool) -> None:
        """Behind a step: validate, log and save, whatever is due."""
        cfg, step = self.config.train, self.progress.step
        last = step == cfg.steps
        self.tell(VALIDATING)
        outcome = self.best.validate(log.reporter, leaving=stopping and not last)
        if outcome is not None or step % cfg.log_every == 0 or last:
            log.write(step, self.values(sums, windows, outcome))
        if self.best.takes(outcome) or step % cfg.save_every == 0 or last:
            self.save()

    def values(self, sums: MetricSums, windows: Prefetcher, outcome: Outcome | None) -> dict[str, float]:
        """What is logged of a step, its validation included."""
        values = step_values(
            sums,
            self.engine,
            self.recorder,
            self.progress,
            waited=windows.wait_seconds,
            epoch=self.loader.epoch_of(self.progress.rows_consumed),
        )
        return values | ({} if outcome is None else outcome.values())

    def save(self) -> None:
        """Commit a checkpoint of this moment, unless it is committed already."""
        if self.saved_step == self.progress.step:
            return
        self.tell(SAVING)
        with self.recorder.paused():
            save_checkpoint(
                self.engine,
                self.objective.drafter,
                self.output,
                step=self.progress.step,
                state=asdict(self.progress),
                fingerprint=self.fingerprint,
                keep=self.config.train.keep_checkpoints,
            )
        self.saved_step = self.progress.step
        if self.engine.rank == 0:
            self.data.saved(self.progress.rows_consumed)
            self.best.mark()
