"""One window: its blocks, forward and backward of all micro-batches, the optimizer; or dropped, and noted."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash2_train.blocks import BlockBatch, build_blocks
from dflash2_train.config import RunConfig, UserError
from dflash2_train.data import PackedBatch
from dflash2_train.engine import TrainEngine
from dflash2_train.losses import Moment
from dflash2_train.metrics import MetricSums
from dflash2_train.objective import Objective
from dflash2_train.run_state import Progress
from dflash2_train.served_anchors import move_anchors
from dflash2_train.telemetry.gradients import is_due
from dflash2_train.telemetry.recorder import StepRecorder

logger = logging.getLogger(__name__)


class WindowStep:
    """Trains on one window after the other and moves ``progress``.

    Args:
        config: the experiment.
        objective: that ``engine`` wraps.
        engine: on this rank.
        recorder: counts the work.
        progress: of the run; its step, rows and drops are moved here.
        rows_per_window: over all ranks.
        output: run folder, where the samples of dropped windows are noted.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        engine: TrainEngine,
        recorder: StepRecorder,
        progress: Progress,
        *,
        rows_per_window: int,
        output: Path,
    ) -> None:
        self._config, self._objective, self._engine = config, objective, engine
        self._recorder, self._progress = recorder, progress
        self._rows_per_window, self._output = rows_per_window, output
        self._dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32

    def __call__(self, window: Sequence[PackedBatch]) -> MetricSums:
        """Train on ``window``.

        Returns:
            This rank's sums; empty where the window was dropped because a loss or gradient was not finite.

        Raises:
            UserError: the last one of ``train.max_bad_steps`` dropped windows in a row.
        """
        engine, progress = self._engine, self._progress
        moment = Moment(step=progress.step, steps=self._config.train.steps, seed=self._config.train.seed)
        batches, blocks = self._make_blocks(window, moment)
        denominator = torch.stack([self._objective.window_weight(block, moment) for block in blocks]).sum()
        denominator = engine.all_reduce_sum(denominator)
        self._recorder.count(batches, blocks)
        sums, applied = self._pass_through(batches, blocks, denominator, moment)
        progress.step += 1
        progress.rows_consumed += self._rows_per_window
        if not applied:
            self._note_drop(batches)
            return MetricSums()
        progress.bad_in_a_row = 0
        if self._config.loss.selector_denominator == "hits":
            shares = sums.reduced(engine.all_reduce_sum).rates()
            progress.selector_share = shares.get("selector_share", progress.selector_share)
        return sums

    def _make_blocks(self, window: Sequence[PackedBatch], moment: Moment) -> tuple[list[PackedBatch], list[BlockBatch]]:
        """The window's micro-batches on the device, and what is predicted from them."""
        size = window_block_size(self._config, moment.step)
        batches = [batch.to(self._engine.device, self._dtype) for batch in window]
        batches = [move_anchors(self._objective, batch, block_size=size, moment=moment) for batch in batches]
        mask_token_id = self._objective.drafter.shape.mask_token_id
        return batches, [build_blocks(batch, block_size=size, mask_token_id=mask_token_id) for batch in batches]

    def _pass_through(
        self, batches: list[PackedBatch], blocks: list[BlockBatch], denominator: Tensor, moment: Moment
    ) -> tuple[MetricSums, bool]:
        """Forward, backward and the optimizer; the window's sums, and whether it was applied."""
        engine, train = self._engine, self._config.train
        ramp_steps = self._config.loss.selector_ramp * train.steps
        ramp = min(1.0, (moment.step + 1) / ramp_steps) if ramp_steps > 0 else 1.0
        sums, applied = MetricSums(), True
        for batch, block in zip(batches, blocks, strict=True):
            output = engine.forward(
                batch,
                block,
                denominator=denominator,
                scale=float(engine.loss_scale),
                selector_ramp=ramp,
                moment=moment,
                selector_share=self._progress.selector_share,
                measure_gradients=is_due(moment.step + 1, every=train.gradient_share_every, log_every=train.log_every),
            )
            engine.backward(output.loss)
            applied = engine.step()
            sums = sums + output.sums
        return sums, applied

    def _note_drop(self, batches: Sequence[PackedBatch]) -> None:
        """Count a dropped window, keep its sample ids, and end the run after too many in a row."""
        progress, reason = self._progress, self._engine.drop_reason
        progress.dropped += 1
        progress.bad_in_a_row += 1
        ids = [name for batch in batches for row in batch.sample_ids for name in row]
        path = self._output / f"dropped-rank{self._engine.rank}.jsonl"
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": progress.step, "reason": reason, "sample_ids": ids}) + "\n")
        logger.warning("%s of step %d is not finite: not applied, samples in %s", reason, progress.step, path)
        if progress.bad_in_a_row >= self._config.train.max_bad_steps:
            raise UserError(
                f"{progress.bad_in_a_row} steps in a row had a loss or gradient that is not finite "
                f"(train.max_bad_steps). The last checkpoint is good; look at the samples named in {path} and run "
                "dflash2-gen-data stage=verify."
            )


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
