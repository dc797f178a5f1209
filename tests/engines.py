"""An engine that trains nothing: one rank's state in plain tensors, for tests of what is written and read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash2_train.engine import AVERAGE, MASTERS, MOMENTS


class StillEngine:
    """Has the calls of ``TrainEngine`` that checkpoints use; every kind of state is a number that tells it apart."""

    def __init__(self, *, averaged: bool = False, world_size: int = 1) -> None:
        self.rank, self.world_size, self.averaged = 0, world_size, averaged
        self.count = 3
        self.taken: dict[str, dict[str, Tensor]] = {}
        self.random: dict[str, Tensor] = {}

    def any_rank(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        pass

    def state_kinds(self) -> list[str]:
        return [MASTERS, *MOMENTS, *([AVERAGE] if self.averaged else [])]

    def gather(self, kind: str, named: nn.Module) -> dict[str, Tensor]:
        offset = float(self.state_kinds().index(kind))
        return {name: parameter.detach().float() + offset for name, parameter in named.named_parameters()}

    def scatter(self, kind: str, named: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.taken[kind] = tensors

    def counts(self) -> dict[str, int]:
        return {"applied_steps": self.count, "average_updates": self.count}

    def set_counts(self, **counts: int) -> None:
        self.count = counts["applied_steps"]

    def gather_random_states(self) -> dict[str, Tensor]:
        return {"rank0.cpu": torch.arange(4, dtype=torch.uint8)}

    def set_random_states(self, states: dict[str, Tensor]) -> None:
        self.random = states


def still(**options: Any) -> Any:
    """A :class:`StillEngine`, untyped so that it passes for the real one."""
    return StillEngine(**options)
