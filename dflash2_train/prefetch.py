"""Windows read and packed in the background while the one before is trained on."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from dflash2_train.data import PackedBatch, WindowLoader


class Prefetcher:
    """The windows of a run in order, up to ``depth`` of them ahead; a context manager.

    One thread reads them in order, so a source sees the same reads as without it. What goes wrong in the thread is
    raised by :meth:`next` where the window would have come.

    Args:
        loader: gives the windows.
        start: rows consumed before the first one.
        windows: how many there will be; none beyond is read.
        depth: windows ahead at most.
        closing: set at the end, so that a source that waits for data gives up.
    """

    def __init__(self, loader: WindowLoader, *, start: int, windows: int, depth: int, closing: threading.Event) -> None:
        self._loader = loader
        self._next_row = start
        self._left = windows
        self._closing = closing
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._pending: deque[Future[list[PackedBatch]]] = deque()
        self.wait_seconds = 0.0  # that the caller of next() stood still, in all
        for _ in range(depth):
            self._submit()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next window; whether it is there. Raises what kept it from coming."""
        started = time.monotonic()
        done, _ = wait([self._pending[0]], seconds)
        self.wait_seconds += time.monotonic() - started
        if done:
            self._pending[0].result()
        return bool(done)

    def next(self) -> list[PackedBatch]:
        """Micro-batches of the next window."""
        started = time.monotonic()
        try:
            batches = self._pending.popleft().result()
        finally:
            self.wait_seconds += time.monotonic() - started
        self._submit()
        return batches

    def close(self) -> None:
        """Drop what was read ahead and wait for the thread, which ends with the window that it is reading."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        if self._left > 0:
            self._left -= 1
            self._pending.append(self._thread.submit(self._loader.window, self._next_row))
            self._next_row += self._loader.rows_per_window
