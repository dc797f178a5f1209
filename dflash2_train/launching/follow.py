"""Showing a log file on the console while another process writes it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

POLL_S = 0.1


class Follow:
    """Context manager: what is appended to a file appears on a stream, all of it by the end."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream = path, stream
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow {path.name}", daemon=True)

    def __enter__(self) -> Follow:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._path.exists():
            if self._finished.wait(POLL_S):
                return
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            last = False
            while True:
                text = file.read()
                if text:
                    self._stream.write(text)
                    self._stream.flush()
                elif last:
                    return
                else:
                    last = self._finished.wait(POLL_S)  # once more after the end: it may have written meanwhile


def keep_older(path: Path) -> None:
    """Move a log of an earlier start out of the way, to the first free ``NAME.N.log``; nothing is overwritten."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log, for a report."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
