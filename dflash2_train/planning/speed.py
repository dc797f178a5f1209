"""Time of a step from its operations (``flops.py``), on the shares of the peak that the plan assumes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dflash2_train.config import PlanConfig
from dflash2_train.flops import StepWork, step_flops
from dflash2_train.planning.setting import Setting

MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "unknown"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One window of all ranks."""

    model_flops: float  # of a rank
    hardware_flops: float  # with what is computed again
    tokens: int  # context tokens of all ranks
    seconds: float | None  # None = no peak and no measurement
    basis: str

    @property
    def tokens_per_second(self) -> float | None:
        """Context tokens a second of all ranks."""
        return None if self.seconds is None else self.tokens / self.seconds


def window_work(setting: Setting) -> StepWork:
    """What one rank's window holds, padding counted as tokens; a block sees half of its document on average."""
    batch, shape = setting.batch, setting.shape
    half = batch.document_tokens / 2
    pairs = 0.0
    for kind, layers in Counter(shape.layer_types).items():
        seen = half
        if kind == "sliding_attention" and shape.sliding_window is not None:
            seen = min(half, float(shape.sliding_window))
        pairs += layers * batch.slots * (seen + batch.block_size)
    times = setting.train.accumulation
    return StepWork(
        tokens=times * batch.context,
        blocks=times * batch.rows * batch.anchors,
        slots=times * batch.slots,
        labels=times * batch.labels,
        pairs=times * pairs,
    )


def estimate(setting: Setting, plan: PlanConfig) -> Speed:
    """Seconds of a window: as measured on this very hardware, else operations over a share of the peak."""
    work = window_work(setting)
    flops = step_flops(
        setting.shape,
        work,
        detach_unary=setting.loss.detach_unary,
        gradient_checkpointing=setting.train.gradient_checkpointing,
    )
    seconds, basis = None, UNKNOWN
    if plan.train_seconds_per_step is not None:
        seconds, basis = plan.train_seconds_per_step, MEASURED
    elif plan.hardware.bf16_tflops is not None:
        seconds = flops.hardware / (plan.hardware.bf16_tflops * 1e12 * plan.train_flops_share)
        basis = ESTIMATED
    return Speed(
        model_flops=flops.model,
        hardware_flops=flops.hardware,
        tokens=int(work.tokens) * setting.ranks,
        seconds=seconds,
        basis=basis,
    )
