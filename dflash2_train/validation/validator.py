"""One validation on all ranks, and the guarantee that training does not notice."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from dflash2_train.config import RunConfig, UserError
from dflash2_train.engine import TrainEngine
from dflash2_train.metrics import MetricSums
from dflash2_train.objective import Objective
from dflash2_train.training_data import TrainingData
from dflash2_train.validation.captures import open_captures
from dflash2_train.validation.decode import FORECAST, RealDecoding, add_rounds
from dflash2_train.validation.figures import LENGTH, accepted_drafts, no_rows, row_figures
from dflash2_train.validation.outcome import Outcome
from dflash2_train.validation.slots import read_blocks

logger = logging.getLogger(__name__)


class Validator:
    """Looks at the present drafter; every rank must call :meth:`run` at the same steps.

    Args:
        config: the experiment; ``train.validation`` says on what.
        data: that is trained on.
        objective: of training, on the engine's device.
        engine: around the objective.
        dtype: of training.

    Raises:
        CacheIntegrityError: captures of their own that cannot be read, or that are trained on as well.
        ConfigError: answers that do not fit, or prompts that cannot be decoded here.
    """

    def __init__(
        self, config: RunConfig, data: TrainingData, objective: Objective, engine: TrainEngine, dtype: torch.dtype
    ) -> None:
        self._train, self._objective, self._engine, self._dtype = config.train, objective, engine, dtype
        averaged = config.export.weights == "ema" and config.train.ema_decay is not None
        self._weights = "ema" if averaged else "last"
        self._captures = open_captures(config, data, verify_checksums=engine.rank == 0)
        self._decoding: RealDecoding | None = None
        if config.train.validation.decode_prompts > 0:
            self._decoding = RealDecoding(
                config, self._captures, device=engine.device, rank=engine.rank, world_size=engine.world_size
            )
            with unnoticed(objective, engine.device):
                self._decoding.rehearse(objective.drafter)
        logger.info("validation: %d held-back answers, the same ones each time", len(self._captures.documents))

    def due(self, step: int) -> bool:
        """Whether a validation belongs behind this step."""
        return step % self._train.validate_every == 0 or step == self._train.steps

    def run(self, step: int) -> Outcome:
        """Validate the weights that would be exported now.

        Raises:
            UserError: none of the held-back answers has a token to draft, or a figure is not finite.
        """
        started = time.monotonic()
        drafter, engine = self._objective.drafter, self._engine
        with ExitStack() as stack:
            stack.enter_context(unnoticed(self._objective, engine.device))
            if self._weights == "ema":
                stack.enter_context(engine.average_in_place(drafter))
            sums = self._look()
            if self._decoding is not None:
                sums = sums + self._decoding.run(drafter)
        reduced = sums.reduced(lambda flat: engine.all_reduce_sum(flat.to(engine.device)))
        self._refuse_unusable(step, reduced)
        return Outcome(
            step=step,
            sums=reduced,
            num_drafted=drafter.shape.block_size - 1,
            weights=self._weights,
            tolerance=self._train.validation.tolerance,
            seconds=time.monotonic() - started,
        )

    def _refuse_unusable(self, step: int, sums: MetricSums) -> None:
        """Raise UserError, on all ranks alike, for figures that say nothing."""
        counts = sums.sums()
        if counts[LENGTH][1] == 0:
            raise UserError(
                f"train.validation: none of {len(self._captures.documents)} held-back answers has two supervised "
                "tokens in a row, so nothing can be validated. Raise train.validation.share or max_documents."
            )
        broken = [name for name, pair in counts.items() if not all(map(math.isfinite, pair))]
        if broken:
            raise UserError(
                f"validation at step {step}: {broken[0]} is not finite, so weights or captured states are not. The "
                "newest checkpoint is good; run dflash2-gen-data stage=verify, and if the captures are whole, start "
                "anew from that checkpoint (train.warm_start) with a lower train.lr."
            )

    def _look(self) -> MetricSums:
        """Sums of this rank's rows."""
        engine, decoding = self._engine, self._decoding
        sums = no_rows(self._objective.drafter.shape.block_size - 1)
        if decoding is not None:
            add_rounds(sums, FORECAST, torch.zeros(0, dtype=torch.int64))
        for batch in self._captures.batches(engine.rank, engine.world_size):
            table = read_blocks(self._objective, batch.to(engine.device, self._dtype))
            found, served = row_figures(table)
            sums = sums + found
            if decoding is not None:
                rounds = table.kept(served & decoding.compared(batch, table.anchors))
                add_rounds(sums, FORECAST, accepted_drafts(rounds.selector))
        return sums


@contextmanager
def unnoticed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode; modes and torch's global generators are put back to where they were."""
    modes = [(part, part.training) for part in module.modules()]
    devices = [device] if device.type == "cuda" else []
    module.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
