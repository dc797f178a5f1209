"""``dflash2-train``: from captured samples, in a cache or out of a ring, to a trained, exported drafter.

Started again with the same command it continues from the newest whole checkpoint, bit for bit, or on another number of
ranks with the same windows; finished already, it says so and does nothing. SIGTERM and Ctrl-C finish the step, save
and leave. The file is in the order of a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.app import guarded, wants_sweep
from dflash2_train.config import RunConfig, UserError, absolute, to_plain
from dflash2_train.launching import Command, run_launched, without_ranks
from dflash2_train.run_control import StopRequest, only_run_in

if TYPE_CHECKING:
    from data_gen.cache.format import CaptureManifest
    from dflash2_train.attest import Attestation
    from dflash2_train.attest.samples import Samples
    from dflash2_train.checkpoint import Checkpoint
    from dflash2_train.data import PackedBatch
    from dflash2_train.metrics import MetricSums
    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.drafter_config import DrafterShape
    from dflash2_train.objective import Objective
    from dflash2_train.prefetch import Prefetcher
    from dflash2_train.progress import ProgressReporter
    from dflash2_train.target import FrozenHead
    from dflash2_train.training_data import FirstSamples, TrainingData
    from dflash2_train.validation import Outcome, Validator

logger = logging.getLogger(__name__)
EXIT_STOPPED = 143  # left in good order before the last step (SIGTERM, train.max_seconds)
SHOWN_WAIT = 0.02  # share of the time spent waiting for data that is worth a look
# Settings that may change between two starts of one run: they shape where and how often, not what is learned.
FREE_TO_CHANGE = (
    "output_dir",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "validate_every",
    "validation",  # what is held back shows in the order of the rows
    "max_bad_steps",
    "max_seconds",
    "wandb",
    "wandb_project",
    "tensorboard",
    "gradient_share_every",
    "peak_tflops",
    "num_threads",
    "prefetch_windows",
    "zero_stage",
    "gradient_checkpointing",
    "compile_layers",
    # Their product with the number of ranks is what counts, and stands in the fingerprint.
    "rows",
    "accumulation",
)


@dataclass(kw_only=True)
class Progress:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0  # windows done, dropped ones included
    rows_consumed: int = 0
    dropped: int = 0  # windows not applied because a loss or gradient was not finite
    seconds: float = 0.0  # training time over all attempts
    attempt: int = 1
    run_id: str = ""
    bad_in_a_row: int = 0
    selector_share: float = 1.0  # of the last window, for loss.selector_denominator=hits; 1 for the other setting
    best_metric: str = ""  # of the validation that did best so far: which figure, its value, and after which step
    best_value: float = 0.0
    best_step: int = 0

    def takes_for_best(self, metric: str, value: float | None) -> bool:
        """Remember the present step as the best if this value beats all before of the same metric."""
        if value is None or (metric == self.best_metric and value <= self.best_value):
            return False
        self.best_metric, self.best_value, self.best_step = metric, value, self.step
        return True


def fingerprint(config: RunConfig, data: TrainingData, world_size: int) -> dict[str, Any]:
    """All that shapes what is learned; a resume must share it."""
    plain = to_plain(config)
    train = {key: value for key, value in plain["train"].items() if key not in FREE_TO_CHANGE}
    train["rows_per_window"] = world_size * config.train.rows * config.train.accumulation
    content = {"cache": data.manifest.fingerprint, "order": data.order()}
    return {"drafter": plain["drafter"], "loss": plain["loss"], "train": train, **content}


def train(config: RunConfig) -> int:
    """Run or continue the training of ``config`` and export its result."""
    from dflash2_train.checkpoint import check_resumable, newest_checkpoint
    from dflash2_train.export.run import check_exportable
    from dflash2_train.training_data import open_training_data, ring_is_gone

    output = absolute(config.train.output_dir)
    first = os.environ.get("RANK", "0") == "0"
    with only_run_in(output) if first else nullcontext():
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


def check_captures(data: TrainingData, config: RunConfig) -> None:
    """:func:`check_cache` for what is trained on and, if it lies elsewhere, for what is validated on."""
    from data_gen.cache.format import MANIFEST_FILE, CaptureManifest

    check_cache(data.manifest, absolute(config.data.root), config)
    if config.train.validation.root is not None:
        root = absolute(config.train.validation.root)
        check_cache(CaptureManifest.read(root / "capture" / MANIFEST_FILE), root, config)


def check_cache(manifest: CaptureManifest, root: Path, config: RunConfig) -> None:
    """Refuse samples of another target, other taps or another teacher, listing what differs."""
    from data_gen.cache.format import CacheIntegrityError, list_differences
    from dflash2_train.target import open_target_config

    wanted = {
        "target_hash": open_target_config(config.target).target_hash,  # wherever the folder lies
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "hidden_size": config.target.hidden_size,
        "teacher_top_k": config.data.teacher_top_k,
        "enable_thinking": config.data.enable_thinking,
    }
    stored = {key: manifest.content[key] for key in wanted}
    lines = list_differences(stored, wanted)
    if lines:
        listed = "\n  ".join(lines)
        raise CacheIntegrityError(
            f"{root} was captured from {manifest.content['target']} and for something "
            f"else than this config of {config.target.name} (cache -> config):\n  {listed}\n"
            "Capture again with this config in another folder, or set the config back."
        )


def run_rank(config: RunConfig, output: Path, found: Checkpoint | None) -> int:
    """What every rank does: build, resume from ``found``, loop, save; the first rank exports."""
    import torch

    from dflash2_train.engine import start_ranks, stop_ranks
    from dflash2_train.ring_rows import WaitStopped
    from dflash2_train.training_data import open_training_data

    stop, closing = StopRequest(), threading.Event()
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.train.seed)
    rank, world_size = start_ranks()
    data = open_training_data(
        config, rank=rank, verify_checksums=rank == 0, give_up=lambda: bool(stop.reason) or closing.is_set()
    )
    finished = False
    try:
        run = TrainingRun(config, output, data, found, rank=rank, world_size=world_size)
        finished = run.loop(stop, closing)
        if finished and rank == 0:
            data.finish()
    except WaitStopped as stopped:
        logger.info("%s; the same command continues from the last checkpoint", stopped)
    finally:
        stop_ranks()
        data.close()
    if not finished:
        return EXIT_STOPPED
    del run  # an evaluation behind the export needs its memory
    return export_result(config) if rank == 0 else 0


def attest_cache(config: RunConfig, output: Path, samples: Samples, rank: int) -> Attestation | None:
    """Put the cache through its gates on the first rank; a refused cache ends the run on every rank.

    The verdicts are shown and written to ``attestation.json`` before anything is refused.

    Raises:
        CacheIntegrityError: a gate failed.
        UserError: on the other ranks, the first one refused the cache or could not read it.
    """
    from dflash2_train.app import open_console
    from dflash2_train.attest import attest
    from dflash2_train.engine import first_rank_says
    from dflash2_train.provenance import atomic_write_json

    attested, passed = None, False
    try:
        if rank == 0:
            attested = attest(samples, config)
            open_console(stderr=True).print(attested.table())
            atomic_write_json(output / "attestation.json", attested.to_dict())
            passed = attested.passed
    finally:
        passed = first_rank_says(passed)  # also when the first rank met an error: the others must not wait for it
    if attested is not None:
        attested.refuse()
    elif not passed:
        raise UserError("the first rank refused the cache; its output names the gates that failed.")
    return attested


class TrainingRun:
    """Everything that lives from the first step to the last."""

    def __init__(
        self,
        config: RunConfig,
        output: Path,
        data: TrainingData,
        found: Checkpoint | None,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        import torch

        from dflash2_train.checkpoint import check_resumable, check_space, load_checkpoint
        from dflash2_train.engine import TrainEngine
        from dflash2_train.layer_execution import apply_layer_options
        from dflash2_train.lineage import warm_start_chain
        from dflash2_train.provenance import atomic_write_json, run_record
        from dflash2_train.telemetry.recorder import StepRecorder
        from dflash2_train.training_data import build_loader

        self.config, self.output, self.data = config, output, data
        self.dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
        self.fingerprint = fingerprint(config, data, world_size)
        if found is not None:
            check_resumable(found, self.fingerprint)
        self.loader = build_loader(config, data, rank=rank, world_size=world_size, pin=torch.cuda.is_available())
        goal = config.train.steps * self.loader.rows_per_window
        attested = None
        if found is None:
            if rank == 0:
                data.begin(row=0, world_size=world_size, goal=goal)
            attested = attest_cache(config, output, data.attestable(), rank)
        self.objective = build_objective(config, None if found is not None else data.first_samples())
        self.engine = TrainEngine(self.objective, config.train)
        self.objective.frozen.to(self.engine.device, self.dtype)
        apply_layer_options(self.objective.drafter.layers, config.train, self.engine.device)
        self.recorder = StepRecorder(config, self.objective, device=self.engine.device, world_size=world_size)
        averaged = config.train.ema_decay is not None
        check_space(self.engine, self.objective.drafter, output, averaged=averaged)
        self.progress = Progress(run_id=f"{config.name}-{os.urandom(4).hex()}")
        if found is not None:
            self.progress = Progress(**load_checkpoint(self.engine, self.objective.drafter, found))
            self.progress.attempt += 1
            logger.info("continuing from step %d (%s)", self.progress.step, found.folder)
            if rank == 0:
                data.begin(row=self.progress.rows_consumed, world_size=world_size, goal=goal)
                self.mark_best()
        self.validator = self.open_validator()
        self.engine.barrier()  # no rank reads before the first one has told where all begin
        if rank == 0:
            record = run_record(to_plain(config))
            record["attestation"] = None if attested is None else attested.to_dict()
            record["run_id"] = self.progress.run_id
            if found is None:
                record["warm_start"] = warm_start_chain(config.train.warm_start)
            record["cache"] = data.manifest.content
            record["deepspeed"] = self.engine.deepspeed_config
            name = "run.json" if found is None else f"run.attempt{self.progress.attempt}.json"
            atomic_write_json(output / name, record)

    def open_validator(self) -> Validator | None:
        """What looks at hold-out captures every ``train.validate_every`` steps."""
        from dflash2_train.validation import Validator

        if self.config.train.validate_every == 0:
            return None
        return Validator(self.config, self.data, self.objective, self.engine, self.dtype)

    def open_windows(self, closing: threading.Event) -> Prefetcher:
        """The windows that are left, read ahead."""
        from dflash2_train.prefetch import Prefetcher

        self.recorder.start()
        return Prefetcher(
            self.loader,
            start=self.progress.rows_consumed,
            windows=self.config.train.steps - self.progress.step,
            depth=self.config.train.prefetch_windows,
            closing=closing,
        )

    def loop(self, stop: StopRequest, closing: threading.Event) -> bool:
        """Train to the last step; False when asked to stop before."""
        from dflash2_train.progress import ProgressReporter
        from dflash2_train.ring_rows import WaitStopped
        from dflash2_train.tracker import MetricsLog, open_tracker

        cfg, progress, first = self.config.train, self.progress, self.engine.rank == 0
        tracker = open_tracker(
            cfg,
            name=self.config.name,
            run_id=progress.run_id,
            record=self.fingerprint,
            folder=self.output,
            step=progress.step,
            first_rank=first,
        )
        log = MetricsLog(self.output / "metrics.jsonl", attempt=progress.attempt) if first else None
        started, before = time.monotonic(), progress.seconds
        with (
            ProgressReporter("train", cfg.steps, done=progress.step, enabled=first) as reporter,
            self.open_windows(closing) as windows,
        ):
            while progress.step < cfg.steps:
                try:
                    batches = windows.next()
                except WaitStopped:
                    if self.engine.world_size == 1:  # other ranks may be anywhere, and saving needs all of them
                        self.save()
                    raise
                sums = self.step(batches)
                progress.seconds = before + time.monotonic() - started
                over_time = cfg.max_seconds is not None and time.monotonic() - started >= cfg.max_seconds
                stopping = self.engine.any_rank(bool(stop.reason) or over_time)
                last = progress.step == cfg.steps
                outcome = self.validate(reporter, leaving=stopping and not last)
                if outcome is not None or progress.step % cfg.log_every == 0 or last:
                    values = self.values(sums, windows) | ({} if outcome is None else outcome.values())
                    if log is not None:
                        log.write(progress.step, values)
                        tracker.log(values, progress.step)
                        reporter.update(progress.step, facts(values))
                best = outcome is not None and progress.takes_for_best(outcome.metric, outcome.best_by)
                if progress.step % cfg.save_every == 0 or last or stopping or best:
                    self.save()
                if stopping and progress.step < cfg.steps:
                    logger.info("stopped at step %d; the same command continues", progress.step)
                    break
        tracker.finish()
        if log is not None:
            log.close()
            if progress.step >= cfg.steps:
                plot_run(self.output, title=self.config.name)
        return progress.step >= cfg.steps

    def step(self, window: list[PackedBatch]) -> MetricSums:
        """One window: all its micro-batches, then the optimizer, unless loss or gradient is not finite."""
        import torch

        from dflash2_train.blocks import build_blocks
        from dflash2_train.losses import Moment
        from dflash2_train.metrics import MetricSums
        from dflash2_train.served_anchors import move_anchors
        from dflash2_train.telemetry.gradients import is_due

        engine, progress, shape = self.engine, self.progress, self.objective.drafter.shape
        moment = Moment(step=progress.step, steps=self.config.train.steps, seed=self.config.train.seed)
        batches = [batch.to(engine.device, self.dtype) for batch in window]
        block_size = window_block_size(self.config, progress.step)
        batches = [move_anchors(self.objective, batch, block_size=block_size, moment=moment) for batch in batches]
        blocks = [build_blocks(batch, block_size=block_size, mask_token_id=shape.mask_token_id) for batch in batches]
        denominator = torch.stack([self.objective.window_weight(block, moment) for block in blocks]).sum()
        denominator = engine.all_reduce_sum(denominator)
        self.recorder.count(batches, blocks)
        every, log_every = self.config.train.gradient_share_every, self.config.train.log_every
        ramp_steps = self.config.loss.selector_ramp * self.config.train.steps
        ramp = min(1.0, (progress.step + 1) / ramp_steps) if ramp_steps > 0 else 1.0
        sums = MetricSums()
        applied = True
        for batch, block in zip(batches, blocks, strict=True):
            output = engine.forward(
                batch,
                block,
                denominator=denominator,
                scale=float(engine.loss_scale),
                selector_ramp=ramp,
                moment=moment,
                selector_share=progress.selector_share,
                measure_gradients=is_due(progress.step + 1, every=every, log_every=log_every),
            )
            engine.backward(output.loss)
            applied = engine.step()
            sums = sums + output.sums
        progress.step += 1
        progress.rows_consumed += self.loader.rows_per_window
        if not applied:
            self.note_bad_window(batches)
            return MetricSums()
        progress.bad_in_a_row = 0
        if self.config.loss.selector_denominator == "hits":
            shares = sums.reduced(engine.all_reduce_sum).rates()
            progress.selector_share = shares.get("selector_share", progress.selector_share)
        return sums

    def validate(self, reporter: ProgressReporter, *, leaving: bool) -> Outcome | None:
        """Validate behind a step that is due, unless the run was asked to leave; None where it was not done."""
        if self.validator is None or leaving or not self.validator.due(self.progress.step):
            return None
        with self.recorder.paused():
            outcome = self.validator.run(self.progress.step)
        reporter.show(outcome.table())
        alarm = outcome.alarm()
        if alarm is not None:
            logger.warning(alarm)
        return outcome

    def note_bad_window(self, batches: list[Any]) -> None:
        """Count a dropped window, keep its sample ids, and end the run after too many in a row."""
        progress, reason = self.progress, self.engine.drop_reason
        progress.dropped += 1
        progress.bad_in_a_row += 1
        ids = [name for batch in batches for row in batch.sample_ids for name in row]
        path = self.output / f"dropped-rank{self.engine.rank}.jsonl"
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": progress.step, "reason": reason, "sample_ids": ids}) + "\n")
        logger.warning("%s of step %d is not finite: not applied, samples in %s", reason, progress.step, path)
        if progress.bad_in_a_row >= self.config.train.max_bad_steps:
            raise UserError(
                f"{progress.bad_in_a_row} steps in a row had a loss or gradient that is not finite "
                f"(train.max_bad_steps). The last checkpoint is good; look at the samples named in {path} and run "
                "dflash2-gen-data stage=verify."
            )

    def values(self, sums: MetricSums, windows: Prefetcher) -> dict[str, float]:
        """What is logged of a step, over all ranks; the names stand in ``telemetry.catalogue``."""
        from dflash2_train.telemetry.gradients import with_gradient_shares

        reduced = sums.reduced(self.engine.all_reduce_sum)
        norm = self.engine.gradient_norm()
        return {
            **with_gradient_shares(reduced.rates()),
            "lr": self.engine.learning_rate(),
            **{f"lr/{group}": rate for group, rate in self.engine.group_rates().items()},
            **({"grad_norm": norm} if math.isfinite(norm) else {}),  # JSON has no infinity
            "epoch": float(self.loader.epoch_of(self.progress.rows_consumed)),
            "dropped": float(self.progress.dropped),
            **self.recorder.values(windows.wait_seconds, self.engine.all_reduce_sum),
            "seconds": round(self.progress.seconds, 3),
        }

    def save(self) -> None:
        """Commit a checkpoint of this moment."""
        from dflash2_train.checkpoint import save_checkpoint

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
        if self.engine.rank == 0:
            self.data.saved(self.progress.rows_consumed)
            self.mark_best()

    def mark_best(self) -> None:
        """Point ``best.json`` at the checkpoint of the best validation, also if a kill kept that from being done."""
        from dflash2_train.checkpoint import MANIFEST, mark_best

        progress, folder = self.progress, self.output / f"step{self.progress.best_step:06d}"
        if progress.best_step > 0 and (folder / MANIFEST).exists():
            mark_best(self.output, folder, metric=progress.best_metric, value=progress.best_value)


def plot_run(output: Path, *, title: str) -> None:
    """Draw ``metrics.png`` from the ``metrics.jsonl`` of a training folder."""
    from dflash2_train.plots.training import PLOT_NAME, write_training_plot
    from dflash2_train.tracker import read_metrics

    write_training_plot(read_metrics(output / "metrics.jsonl"), output / PLOT_NAME, title)
    logger.info("curves: %s", output / PLOT_NAME)


def window_block_size(config: RunConfig, step: int) -> int:
    """Block size of one window: the drafter's own, or a shorter one for a share of the windows.

    A short block costs less and spends it where a young drafter can gain, on the first slots; the whole blocks among
    them keep the later slots trained. Random sizes make one drafter good at every number of drafted tokens. Drawn from
    (seed, window), so that ranks agree and a resume repeats it.
    """
    train, whole = config.train, config.drafter.block_size
    generator = random.Random(f"block/{train.seed}/{step}")  # noqa: S311 - a schedule, not a secret
    if train.short_block_size is None or generator.random() >= train.short_block_share:
        return whole
    return generator.randint(train.short_block_size, whole - 1) if train.short_block_random else train.short_block_size


def facts(values: dict[str, float]) -> str:
    """The few numbers worth a look while it runs."""
    shown = [f"loss {values['loss']:.3f}"] if "loss" in values else ["step dropped"]
    if "selector_path" in values:
        shown.append(f"forecast length {1 + values['selector_path']:.2f}")
    shown.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "utilisation" in values:
        shown.append(f"{values['utilisation']:.0%} of peak")
    if values["data_wait"] >= SHOWN_WAIT:
        shown.append(f"waits for data {values['data_wait']:.0%}")
    return "  ".join([*shown, f"lr {values['lr']:.1e}"])


def build_objective(config: RunConfig, samples: FirstSamples | None) -> Objective:
    """Drafter (warm from another one, or fresh with what the target lends) and frozen tables, on the CPU.

    Args:
        config: the experiment.
        samples: whose states shape a fresh drafter; None where a checkpoint replaces it anyway.
    """
    from dflash2_train.model.drafter_config import DrafterShape
    from dflash2_train.objective import Objective
    from dflash2_train.target import FrozenHead
    from dflash2_train.warm_start import warm_drafter

    frozen = FrozenHead.load(config.target, dtype=config.train.dtype)
    shape = DrafterShape.from_config(config)
    if config.train.warm_start is not None:
        drafter = warm_drafter(config.train.warm_start, shape, frozen.embedding)
    else:
        drafter = fresh_drafter(config, shape, frozen, samples)
    drafter.attention = config.train.attention
    return Objective(drafter, frozen, config.loss)


def fresh_drafter(config: RunConfig, shape: DrafterShape, frozen: FrozenHead, samples: FirstSamples | None) -> Drafter:
    """A new drafter: random, with what the config takes from the target and from captured states."""
    import torch

    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.initialise import fc_from_taps, initialise, look_at_recent
    from dflash2_train.target import TargetTensors

    drafter = Drafter(shape)
    drafter.reset_mask_embedding(frozen.embedding[shape.mask_token_id].float())
    if config.train.init_tap_weights:
        fc_from_taps(drafter, config.train.init_tap_weights)
    tensors = TargetTensors(config.target)
    layers = dict(enumerate(config.train.init_layers))
    initialise(drafter, tensors.__getitem__, layers, prefix=tensors.decoder_prefix())
    with torch.no_grad():
        drafter.norm.weight.mul_(config.train.init_norm_scale)
        if config.train.init_recent_gain > 0 and samples is not None:
            states = [samples.read(index).tap_hidden for index in range(len(samples))]
            context = drafter.encode_context(torch.cat(states).float())  # [tokens, H]
            look_at_recent(drafter, context, config.train.init_recent_gain)
    return drafter


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

    return run_sweep(words, stopped_code=EXIT_STOPPED)


def main() -> None:
    """Entry of the console script ``dflash2-train``; with ``--multirun``, of a sweep."""
    words = sys.argv[1:]
    if wants_sweep(words):
        sys.exit(guarded(lambda: sweep(words)))
    run_launched(
        Command(
            name="dflash2-train",
            module="dflash2_train.train",
            main=train,
            folder=lambda config: absolute(config.train.output_dir),
        )
    )


if __name__ == "__main__":
    main()
