"""Writing a file and taking the sha256 of what is handed to the system, side by side: both release the interpreter."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO, Self

Data = bytes | memoryview


class HashedWriter:
    """A file that is written from its start on; leaves ``file`` itself to whoever opened it.

    Args:
        file: open for writing.
        before: what stands in it already.
    """

    def __init__(self, file: IO[bytes], before: bytes = b"") -> None:
        self._file = file
        self._digest = hashlib.sha256(before)
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def write(self, data: Data) -> None:
        """Append ``data``, which must stay as it is until the next call."""
        self._settle()
        self._pending = self._thread.submit(self._digest.update, data)
        self._file.write(data)

    def sha256(self) -> str:
        """Hex sha256 of all that was written."""
        self._settle()
        return self._digest.hexdigest()

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._thread.shutdown()
