"""Progress of long work: a live bar on a terminal, a line every few seconds everywhere else.

Log files and CI show nothing of a live bar, and silence looks like a hang, so off a terminal the same facts
are logged as lines. Time and rate come from a monotonic clock, the rate over this run alone (resumed work that was
done before does not count).
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)
TABLE_WIDTH = 160  # off a terminal, where rich would take 80 columns
LINE_EVERY_S = 4.0  # with units of five seconds, still a line within ten


def clock(seconds: float) -> str:
    """Seconds as ``1:02:03`` or ``02:03``."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


class ProgressReporter:
    """Context manager that shows ``done / total`` of one piece of work with a free text of facts.

    Args:
        title: what is being done.
        total: units in all; at least 1.
        done: units finished by earlier runs.
        enabled: False on ranks other than 0.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, enabled: bool = True) -> None:
        self.title, self.total, self.done = title, max(total, 1), done
        self._first_done = done
        self._enabled = enabled
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._started = self._last_line = 0.0

    def __enter__(self) -> ProgressReporter:
        self._started = time.monotonic()
        self._last_line = self._started - LINE_EVERY_S
        if self._enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, facts="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, facts: str = "") -> None:
        """Say that ``done`` units are finished; ``facts`` is a short text such as ``loss 3.2``."""
        self.done = done
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=facts)
            return
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S and done < self.total:
            return
        self._last_line = now
        elapsed = now - self._started
        fresh = done - self._first_done
        left = clock(elapsed / fresh * (self.total - done)) if fresh > 0 else "?"
        logger.info("%s %d/%d, %s gone, %s left  %s", self.title, done, self.total, clock(elapsed), left, facts)

    def show(self, table: RenderableType) -> None:
        """Print something larger above the bar, or among the lines."""
        if self._enabled:
            console = self._console if self._bar is not None else Console(stderr=True, width=TABLE_WIDTH)
            console.print(table)
