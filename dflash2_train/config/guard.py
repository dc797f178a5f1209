"""When a run makes room in good order, and when it ends because a rank is lost or stands still."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from dflash2_train.config.rules import require


@dataclass(kw_only=True)
class GuardConfig:
    """Limits in time; they shape when a run ends, never what it learns."""

    collective_timeout_seconds: float = 1800.0  # ranks that do not meet for so long end the job
    stall_seconds: float | None = 600.0  # no step for so long: each rank writes its stacks; null = never
    stall_exit_seconds: float | None = 3600.0  # no step for so long: the rank ends itself; null = never
    end_time: str | None = None  # save and stop before it: seconds since the epoch, or ISO 8601 with a zone
    scheduler_end: bool = True  # save and stop before the end that Slurm tells (SLURM_JOB_END_TIME)
    end_margin_seconds: float = 300.0  # so long before; more than a step, a validation and a save take

    def check(self) -> None:
        """Raise ConfigError for the first rule that these break."""
        for key in ("collective_timeout_seconds", "stall_seconds", "stall_exit_seconds"):
            value = getattr(self, key)
            require(
                value is None or value > 0, f"train.guard.{key}", value, "must be positive", "Leave it at its default."
            )
        require(
            self.stall_exit_seconds is None
            or self.stall_seconds is None
            or self.stall_seconds < self.stall_exit_seconds,
            "train.guard.stall_exit_seconds",
            self.stall_exit_seconds,
            f"must be longer than train.guard.stall_seconds={self.stall_seconds}, after which stacks are written",
            "Raise it, or use null for never.",
        )
        require(
            self.end_margin_seconds >= 0,
            "train.guard.end_margin_seconds",
            self.end_margin_seconds,
            "must be at least 0",
            "Use 300.",
        )
        self.end_timestamp()

    def end_timestamp(self) -> float | None:
        """``end_time`` in seconds since the epoch.

        Raises:
            ConfigError: it is no time, or one of no zone.
        """
        if self.end_time is None or re.fullmatch(r"\d+(\.\d*)?", self.end_time):
            return None if self.end_time is None else float(self.end_time)
        moment = _date(self.end_time)
        require(
            moment is not None and moment.tzinfo is not None,
            "train.guard.end_time",
            self.end_time,
            "must be seconds since the epoch, or a date and time with its zone",
            "Write it as 2026-11-30T18:00:00+00:00.",
        )
        assert moment is not None
        return moment.timestamp()


def _date(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
