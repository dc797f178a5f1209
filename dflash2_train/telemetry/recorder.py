"""What a training step is worth in time, work and memory: everything of a log line that the losses do not tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dflash2_train.blocks import BlockBatch
from dflash2_train.config import RunConfig
from dflash2_train.data import PackedBatch
from dflash2_train.flops import WORK_NAMES, StepWork, count_work, step_flops
from dflash2_train.objective import Objective
from dflash2_train.telemetry.memory import memory_values
from dflash2_train.telemetry.peaks import peak_tflops

TERA = 1e12


class StepRecorder:
    """Counts work and time between two log lines; every rank has one and asks it at the same steps.

    Time that is no training (saving, validating) is left out of rates: :meth:`paused`.

    Args:
        config: of the run.
        objective: whose drafter is trained; its frozen tables on their device already.
        device: that this rank trains on.
        world_size: ranks.
        clock: seconds from any fixed point.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        *,
        device: torch.device,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter, self._device, self._world_size, self._clock = objective.drafter, device, world_size, clock
        self._detach_unary = config.loss.detach_unary
        self._checkpointing = config.train.gradient_checkpointing
        dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
        self._peak = peak_tflops(device, dtype, config.train.peak_tflops)
        self._usual_norm = median_row_norm(objective.frozen.embedding)
        self._work = torch.zeros(len(WORK_NAMES), dtype=torch.float64, device=device)
        self.start()

    def start(self, waited: float = 0.0) -> None:
        """Begin to count here; ``waited`` as :meth:`values` takes it."""
        self._since, self._paused, self._waited = self._clock(), 0.0, waited
        self._work.zero_()

    def count(self, batches: Sequence[PackedBatch], blocks: Sequence[BlockBatch]) -> None:
        """Add the work of a window's micro-batches on this rank."""
        for batch, block in zip(batches, blocks, strict=True):
            self._work += count_work(batch.document_ids, block, self._drafter.shape)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is no training time."""
        before = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - before

    def values(self, waited: float, all_reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Figures since the last call, over all ranks; memory is this rank's own. Names: ``telemetry.catalogue``.

        Args:
            waited: seconds that this rank stood still for want of data, since any fixed point.
            all_reduce_sum: adds a tensor over the ranks and returns it.
        """
        seconds = self._clock() - self._since - self._paused
        times = torch.tensor([seconds, waited - self._waited], dtype=torch.float64, device=self._device)
        *counts, all_seconds, all_waited = all_reduce_sum(torch.cat([self._work, times])).tolist()
        self.start(waited)
        return {
            **self._speed(StepWork.from_counts(counts), max(all_seconds / self._world_size, 1e-9)),
            "data_wait": round(all_waited / max(all_seconds, 1e-9), 6),
            **memory_values(self._device),
            **self._mask_embedding(),
        }

    def _speed(self, work: StepWork, seconds: float) -> dict[str, float]:
        flops = step_flops(
            self._drafter.shape, work, detach_unary=self._detach_unary, gradient_checkpointing=self._checkpointing
        )
        device_seconds = seconds * self._world_size
        values = {
            "tokens_per_second": _short(work.tokens / seconds),
            "blocks_per_second": _short(work.blocks / seconds),
            "tflops": _short(flops.model / device_seconds / TERA),
        }
        if self._peak is not None:
            possible = device_seconds * self._peak * TERA
            values["utilisation"] = _short(flops.model / possible)
            values["hardware_utilisation"] = _short(flops.hardware / possible)
        return values

    @torch.no_grad()
    def _mask_embedding(self) -> dict[str, float]:
        norm = float(self._drafter.mask_embedding.float().norm())
        return {"mask_embedding/norm": norm, "mask_embedding/ratio": norm / self._usual_norm}


def _short(value: float) -> float:
    """Six significant digits: clocks know no more, and a long run has many lines."""
    return float(f"{value:.6g}")


@torch.no_grad()
def median_row_norm(table: Tensor) -> float:
    """Median of the Euclidean norms of a table's rows [V, H] that are not zero: what inputs of slots usually have."""
    norms = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32)
    return float(norms[norms > 0].median())
