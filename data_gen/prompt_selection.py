"""Which of many prompts are kept, in memory for those alone: a seeded selection, and shares by weight."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

from data_gen.prompt_records import PromptRecord


def order_key(duplicate_key: bytes, seed: int) -> int:
    """Place of a prompt in the seeded order, 128 bits; equal for copies of one prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + duplicate_key).digest()[:16], "big")


class Selection:
    """The ``limit`` prompts with the smallest order keys, out of a stream of any length.

    Of several copies that of the smallest id is kept, so the result does not depend on the order of the stream.
    Copies of a prompt that the limit leaves out count as left out, since they are not remembered.
    """

    def __init__(self, limit: int | None) -> None:
        """Args: limit: None keeps every prompt."""
        self._limit = limit
        self._kept: dict[int, PromptRecord] = {}
        self._copies: dict[int, int] = {}
        self._largest: list[int] = []  # heap of negated keys; empty without a limit
        self.left_out = 0  # rows beyond the limit

    @property
    def duplicates(self) -> int:
        """Rows that are further copies of a kept prompt."""
        return sum(self._copies.values()) - len(self._copies)

    def wants(self, key: int) -> bool:
        """Whether the prompt of this key belongs to the selection so far; counts it if not."""
        if self._limit is None or len(self._kept) < self._limit or key in self._kept or key < -self._largest[0]:
            return True
        self.left_out += 1
        return False

    def add(self, key: int, record: PromptRecord) -> None:
        """Take in a prompt that is wanted, and let go of the last one if there is one too many."""
        if key in self._kept:
            self._copies[key] += 1
            if record.prompt_id < self._kept[key].prompt_id:
                self._kept[key] = record
            return
        self._kept[key], self._copies[key] = record, 1
        if self._limit is None:
            return
        heapq.heappush(self._largest, -key)
        if len(self._kept) > self._limit:
            last = -heapq.heappop(self._largest)
            del self._kept[last]
            self.left_out += self._copies.pop(last)

    def ranked(self) -> list[tuple[int, PromptRecord]]:
        """What is kept, with its keys, in order."""
        return sorted(self._kept.items(), key=lambda entry: entry[0])


def share_out(total: int, available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many of ``total`` each source gives, in proportion to the weights.

    A source with less than its share gives all it has; the others share the rest in the same proportion.

    Args:
        total: prompts wanted in all.
        available: prompts that each source has.
        weights: positive, in any unit.
    """
    given = [0] * len(available)
    left, open_sources = min(total, sum(available)), set(range(len(available)))
    while open_sources:
        weight = sum(weights[i] for i in open_sources)
        short = [i for i in open_sources if available[i] * weight <= left * weights[i]]
        if not short:
            break
        for i in short:
            given[i] = available[i]
        open_sources -= set(short)
        left -= sum(available[i] for i in short)
    if not open_sources:
        return given
    exact = {i: left * weights[i] / weight for i in open_sources}
    for i in open_sources:
        given[i] = int(exact[i])
    rest = left - sum(given[i] for i in open_sources)
    for i in sorted(open_sources, key=lambda i: (given[i] - exact[i], i))[:rest]:  # largest remainders first
        given[i] += 1
    return given
