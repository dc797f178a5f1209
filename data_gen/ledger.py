"""What became of the answers that are in no shard: one JSON line an event, only ever appended.

A row that stands in a conversation shard is done; a row that nothing names is pending. The ledger holds the rest:

* ``failed``: the engine gave no answer, why, and in how many runs it was tried. The next run tries again; after
  ``data.max_attempts`` it is a *dead letter*, which only ``data.retry_failed=true`` opens again.
* ``skipped``: a later turn that cannot be asked, as its history ended in a cut answer, and why.

Every job of an array appends to a file of its own and reads all of them. Which of two lines about a row holds does not
depend on their order or on any clock: the later opening wins, then the higher attempt.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.jobs import Job

FAILED, SKIPPED, REOPENED = "failed", "skipped", "reopened"
LEDGER_FILES = "ledger-*.jsonl"
MAX_REASON = 300  # characters of a reason that are kept


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """The present state of one row."""

    row_id: str
    status: str  # failed | skipped | reopened
    reason: str = ""
    attempts: int = 0  # runs that tried
    opening: int = 0  # how often it was opened again

    @property
    def rank(self) -> tuple[int, int]:
        """Which of two entries is the later one."""
        return self.opening, self.attempts

    @classmethod
    def parse(cls, line: bytes, place: str) -> LedgerEntry:
        """An entry from its line.

        Raises:
            CacheIntegrityError: it is none.
        """
        try:
            entry = cls(**json.loads(line))
            known = entry.status in (FAILED, SKIPPED, REOPENED)
        except (ValueError, TypeError) as error:
            raise CacheIntegrityError(f"{place}: not a line of a ledger ({error}). Delete the line.") from error
        if not known:
            raise CacheIntegrityError(f"{place}: unknown status {entry.status!r}. Delete the line.")
        return entry


class Ledger:
    """The ledger files of a folder, and this job's one open for appending.

    Args:
        folder: of the conversations.
        job: whose file is appended to.
        max_attempts: failures after which a row is a dead letter.
    """

    def __init__(self, folder: Path, job: Job, max_attempts: int) -> None:
        self._path = folder / f"ledger-{job.name}.jsonl"
        self._max_attempts = max_attempts
        self._entries: dict[str, LedgerEntry] = {}
        for path in sorted(folder.glob(LEDGER_FILES)):
            self._read(path, own=path == self._path)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Ledger:
        self._file = open(self._path, "ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _read(self, path: Path, *, own: bool) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if own and whole < len(content):  # the run that wrote it was killed within a line
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            self._keep(LedgerEntry.parse(line, f"{path}:{number}"))

    def _keep(self, entry: LedgerEntry) -> None:
        known = self._entries.get(entry.row_id)
        if known is None or entry.rank >= known.rank:
            self._entries[entry.row_id] = entry

    def _append(self, entry: LedgerEntry) -> None:
        assert self._file is not None, "the ledger is open for writing inside a with block"
        self._file.write(json.dumps(vars(entry), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._keep(entry)

    def fail(self, row_id: str, reason: str) -> None:
        """One more run tried this row in vain."""
        known = self._known(row_id)
        self._append(replace(known, status=FAILED, reason=reason[:MAX_REASON], attempts=known.attempts + 1))

    def skip(self, row_id: str, reason: str) -> None:
        """This turn cannot be asked."""
        self._append(replace(self._known(row_id), status=SKIPPED, reason=reason[:MAX_REASON]))

    def _known(self, row_id: str) -> LedgerEntry:
        """The row's entry, or a fresh one that nothing has happened to."""
        return self._entries.get(row_id) or LedgerEntry(row_id=row_id, status=FAILED)

    def reopen_dead(self) -> int:
        """Give every dead letter a new count of attempts; returns how many."""
        dead = [entry for entry in self._entries.values() if self._is_dead(entry)]
        for entry in dead:
            self._append(LedgerEntry(row_id=entry.row_id, status=REOPENED, opening=entry.opening + 1))
        return len(dead)

    def _is_dead(self, entry: LedgerEntry) -> bool:
        return entry.status == FAILED and entry.attempts >= self._max_attempts

    def is_dead(self, row_id: str) -> bool:
        """Whether the row was given up."""
        entry = self._entries.get(row_id)
        return entry is not None and self._is_dead(entry)

    def is_skipped(self, row_id: str) -> bool:
        """Whether the row cannot be asked."""
        entry = self._entries.get(row_id)
        return entry is not None and entry.status == SKIPPED

    def entries(self, status: str) -> list[LedgerEntry]:
        """Every row whose last event is ``status``; a failed one may since stand in a shard."""
        return [entry for entry in self._entries.values() if entry.status == status]
