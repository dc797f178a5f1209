"""AdamW and its parameter groups.

| group            | parameters                                  | rate x                   | decay |
|------------------|---------------------------------------------|--------------------------|-------|
| matrices         | all other: fc, attention, MLP               | 1                        | yes   |
| conv             | kernel projections of the convolutions      | ``conv_lr_scale``        | yes   |
| selector         | its projection of the state                 | ``selector_lr_scale``    | yes   |
| codebooks        | the selector's two tables                   | ``selector_lr_scale``    | no    |
| gains            | norm weights and base kernels, near 1       | ``gain_lr_scale``        | no    |
| mask_embedding   | the learned input of every mask slot        | ``mask_lr_scale``        | no    |

Adam moves every element by about the rate. A matrix of elements near 0.02 changes its function within tens of such
steps, a gain near 1 hardly at all, hence a factor for the gains. Conv or selector projections with factor 1 belong to
the matrices: a group is a flat buffer in DeepSpeed, and fewer are better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import nn

from dflash2_train.config import TrainConfig
from dflash2_train.parameter_groups import DECAYING, grouped, rate_scales


def parameter_groups(module: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Optimizer groups in the order of the table above; empty ones are left out."""
    scales = rate_scales(train)
    named = dict(module.named_parameters())
    return [
        {
            "params": [named[member] for member in members],
            "lr": train.lr * scales[name],
            "weight_decay": train.weight_decay if name in DECAYING else 0.0,
            "name": name,
        }
        for name, members in grouped(named, train).items()
    ]


def build_optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Torch's AdamW over :func:`parameter_groups`; at ZeRO stage 0 the one that clips and checks by itself."""
    groups, betas = parameter_groups(module, train), (train.betas[0], train.betas[1])
    if train.zero_stage == 0:
        return ClippedAdamW(groups, max_norm=train.grad_clip, lr=train.lr, betas=betas, fused=True)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, fused=True)


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips to ``max_norm`` (0 = never) and leaves everything as it is when the norm is not finite.

    ZeRO does both from stage 1 on. At stage 0 DeepSpeed would apply a non-finite gradient and report no norm; it does
    read ``overflow`` and ``_global_grad_norm`` from whatever optimizer has them.
    """

    def __init__(self, groups: list[dict[str, Any]], *, max_norm: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip, check, step."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._global_grad_norm = float(norm)
        self.overflow = not bool(torch.isfinite(norm))
        if self.overflow:
            return None
        if self.max_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        super().step()
        return None
