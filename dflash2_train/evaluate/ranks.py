"""An evaluation in several processes (torchrun, accelerate launch): each decodes its share of the prompts.

Every rank has a results file of its own, so nobody writes into another's. All read what earlier runs left before
anyone appends, and the first rank reads all of them once everyone is done. A rerun may have another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from dflash2_train.config import ConfigError

if TYPE_CHECKING:
    import torch

PATIENCE = timedelta(days=2)  # shares are uneven, and the first to finish waits for the last
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the job."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes the reports."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every ``count``-th item from ``rank`` on. The shares of all ranks are all items, each once."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


def open_ranks(*, spread_target: bool = False) -> Ranks:
    """The ranks that the launcher set up; one rank without a launcher.

    Raises:
        ConfigError: several, of which each would spread a target over all GPUs (``spread_target``).
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(rank=0, count=1, device=torch.device("cuda" if has_gpu else "cpu"))
    from accelerate import PartialState

    state = PartialState(cpu=not has_gpu, timeout=PATIENCE)
    if spread_target:
        raise ConfigError(
            f"eval.spread_target=true: {state.num_processes} processes would each spread a target over the same GPUs. "
            "Start one process."
        )
    return Ranks(rank=state.process_index, count=state.num_processes, device=state.device)
