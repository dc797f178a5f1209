"""What decoding leaves behind: tokens, rounds, times; and the one rule by which every path stops."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dflash2_train.runner.settings import DecodeSettings

STOP, LENGTH = "stop", "length"
now = time.perf_counter  # the clock of all timings; benchmarks count CPU seconds by another one


class Round(NamedTuple):
    """One verification of one row."""

    num_proposed: int
    num_accepted: int  # as verified, before a stop cuts the output
    num_emitted: int  # tokens that this round added to the output, 1..num_accepted + 1


@dataclass(kw_only=True)
class Timings:
    """Seconds by part, of the whole batch. Plain decoding fills prefill, verify (its forwards) and sample."""

    prefill: float = 0.0  # target over the prompts, up to and with the first tokens
    context: float = 0.0  # drafter context, the prompts' included
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0  # acceptance rule, rollback and bookkeeping of the output

    @property
    def decode(self) -> float:
        """Everything after the first token, the drafter's view of the prompt included."""
        return self.context + self.draft + self.verify + self.sample


class Clock:
    """Adds the time since the last reading to one part of :class:`Timings`."""

    def __init__(self, device: torch.device) -> None:
        self.timings = Timings()
        self._synchronize = device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return now()

    def charge(self, part: str) -> None:
        """Book the time since the last reading on ``part``."""
        reading = self._now()
        setattr(self.timings, part, getattr(self.timings, part) + reading - self._last)
        self._last = reading

    def skip(self) -> None:
        """Book the time since the last reading on nothing: it was the caller's."""
        self._last = self._now()


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What one prompt produced."""

    token_ids: list[int]  # at most max_new_tokens; ends with the first stop token if there was one
    finish_reason: str  # stop | length
    rounds: list[Round] = field(default_factory=list)  # empty for plain decoding
    timings: Timings  # of the batch that the prompt was part of


class RowOutput:
    """The tokens of one row so far."""

    def __init__(self, row: int, settings: DecodeSettings) -> None:
        self.row = row  # place of the prompt in the batch as it was given
        self.token_ids: list[int] = []
        self.rounds: list[Round] = []
        self.finish_reason: str | None = None
        self._limit = settings.max_new_tokens
        self._stop_ids = settings.stop_ids

    def extend(self, ids: Sequence[int]) -> int:
        """Add tokens up to the first stop token or the limit; returns how many were added."""
        for added, token in enumerate(ids, start=1):
            self.token_ids.append(token)
            if token in self._stop_ids:
                self.finish_reason = STOP
            elif len(self.token_ids) == self._limit:
                self.finish_reason = LENGTH
            if self.finish_reason is not None:
                return added
        return len(ids)

    def result(self, timings: Timings) -> GenerationResult:
        """The finished row."""
        assert self.finish_reason is not None, f"row {self.row} has not finished"
        return GenerationResult(
            token_ids=self.token_ids, finish_reason=self.finish_reason, rounds=self.rounds, timings=timings
        )
