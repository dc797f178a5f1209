"""An exponential moving average of the fp32 master weights, kept where the masters are kept: each rank its shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightAverage:
    """``average = d * average + (1 - d) * masters`` after every applied step.

    ``d = min(decay, (1 + n) / (10 + n))`` at update n, so that the random start is forgotten within tens of steps
    and not within 1 / (1 - decay) of them.

    Args:
        masters: fp32 tensors to average, on any device; copied.
        decay: d of a long run, in (0, 1).
    """

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.shards = [master.detach().clone() for master in masters]

    @torch.no_grad()
    def update(self, masters: Sequence[Tensor]) -> None:
        """Take in the masters of one more applied step."""
        share = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for shard, master in zip(self.shards, masters, strict=True):
            shard.lerp_(master.detach(), share)
        self.updates += 1
