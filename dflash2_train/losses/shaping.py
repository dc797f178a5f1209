"""What a model does to its raw logits: a factor, then a soft cap. Both are increasing, so neither changes an order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """``softcap(multiplier * raw)`` with ``softcap(x) = cap * tanh(x / cap)``; no cap, no change."""

    multiplier: float = 1.0
    cap: float | None = None

    def apply(self, raw: Tensor) -> Tensor:
        """A new tensor of shaped logits in at least fp32."""
        return self.apply_(raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True))

    def apply_(self, logits: Tensor) -> Tensor:
        """Shape in place; ``logits`` in the work dtype."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def differentiable(self, raw: Tensor) -> Tensor:
        """Shaped logits as part of the graph of ``raw``, in its dtype."""
        logits = raw if self.multiplier == 1.0 else self.multiplier * raw
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Derivative of shaped logits by the raw product, from the shaped logits."""
        if self.cap is None:
            out = torch.empty_like(logits) if out is None else out
            return out.fill_(self.multiplier)
        squared = torch.mul(logits, logits, out=out)
        return squared.mul_(-self.multiplier / self.cap**2).add_(self.multiplier)  # d = m (1 - tanh^2)
