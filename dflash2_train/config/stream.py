"""The ring between capture and training in stream mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2_train.config.rules import absolute, require


@dataclass(kw_only=True)
class StreamConfig:
    """The ring between capture and training (``data.mode=stream``); one set of values for producers and trainers."""

    root: str | None = None  # folder of the ring, on any file system that all of them see; None = data.root/ring
    budget_mib: int = 4096  # the ring never takes more, files being written included
    segment_rows: int = 16  # packed rows a segment: what is captured, and released, at once
    reuse: int = 1  # times a segment is trained on before the next; 1 = the order of the cache mode
    stale_after_s: float = 60.0  # a producer of another host that shows no sign of life for so long is given up
    timeout_s: float = 1800.0  # the trainer ends when no producer shows a sign of life for so long
    workers: int = 0  # capture processes that stage=stream starts, and replaces when they die; 0 = it captures itself
    max_worker_deaths: int = 20  # of one worker; the next one ends the stage

    def folder(self, data_root: Path) -> Path:
        """Folder of the ring."""
        return data_root / "ring" if self.root is None else absolute(self.root)

    def check(self) -> None:
        for key in ("budget_mib", "segment_rows", "reuse", "stale_after_s", "timeout_s"):
            value = getattr(self, key)
            require(value > 0, f"data.stream.{key}", value, "must be positive", "Leave it at its default.")
        for key in ("workers", "max_worker_deaths"):
            value = getattr(self, key)
            require(value >= 0, f"data.stream.{key}", value, "must be at least 0", "Leave it at its default.")
