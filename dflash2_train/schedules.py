"""The learning rate over a run: linear warm-up, then one of three shapes. Pure functions of the optimizer step.

cosine   half a cosine from 1 down to ``final_lr_ratio`` at the last step
linear   a straight line between the same ends
wsd      warm-up, stable at 1, and a straight line down over the last ``decay`` of the steps
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dflash2_train.config import TrainConfig


def rate_factor(train: TrainConfig) -> Callable[[int], float]:
    """Factor on a group's rate by optimizer step, 0-based: above 0, and 1 once the warm-up is over."""
    warmup = max(1, round(train.warmup * train.steps))
    # wsd falls over the last steps, the others over all that follow the warm-up
    falling = max(1, round(train.decay * train.steps)) if train.schedule == "wsd" else max(1, train.steps - warmup)
    start = train.steps - falling if train.schedule == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, max(0.0, (step - start) / falling))
        left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1.0 - done
        return train.final_lr_ratio + (1 - train.final_lr_ratio) * left

    return factor
