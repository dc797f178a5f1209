"""What is alive when: items of memory, the moments of a step at which most is alive, and the largest sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Moments, in the order of a step; the last one does not come in every step.
LOOK = "losses"  # the sweep over the logits; with the parts' gradients, every train.gradient_share_every steps
LOSS = "backward of the loss"
LAYERS = "backward of a layer"
UPDATE = "optimizer step"
SAVE = "saving"  # of the first rank, every train.save_every steps
MOMENTS = (LOOK, LOSS, LAYERS, UPDATE, SAVE)
STEP = (LOOK, LOSS, LAYERS)  # activations are alive
ALWAYS = MOMENTS


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that takes memory, and when it is there."""

    group: str  # of the table: state | activations | loss | data | frozen | libraries
    name: str
    size: int  # bytes
    moments: tuple[str, ...] = ALWAYS
    basis: str = "shapes"  # shapes | measured | assumed


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The items of one place, a device or a host."""

    items: tuple[Item, ...]

    def total(self, moment: str) -> int:
        """Bytes at a moment."""
        return sum(item.size for item in self.items if moment in item.moments)

    @property
    def peak_moment(self) -> str:
        """When most is alive; the first of equals."""
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes then."""
        return self.total(self.peak_moment)

    def at(self, moment: str) -> list[Item]:
        """What is alive at a moment and takes anything, in the order of the table."""
        return [item for item in self.items if moment in item.moments and item.size > 0]


def timeline_of(*parts: Iterable[Item]) -> Timeline:
    """A timeline of several lists of items."""
    return Timeline(items=tuple(item for part in parts for item in part))
