"""What one prompt's measurement leaves on disk, and the append-only file that makes a run resumable.

``results-<fingerprint>.jsonl``: a header line with the full fingerprint and what it covers, then a line a prompt,
flushed to the disk as soon as the prompt is done. Further ranks of a job write ``results-<fingerprint>.rank<n>.jsonl``.
Another drafter, other settings or other prompts have another fingerprint and so another file: results are never mixed.
A line cut by a crash is dropped and measured again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dflash2_train.config import ConfigError
from dflash2_train.provenance import atomic_write_bytes, sha256_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DecodeRecord:
    """One decoding of one prompt."""

    token_ids: list[int]
    finish_reason: str
    rounds: list[list[int]]  # [num_proposed, num_accepted, num_emitted] each; empty for plain decoding
    seconds: dict[str, float]  # by part: prefill, context, draft, verify, sample


@dataclass(frozen=True, kw_only=True)
class EqualityRecord:
    """Speculative against plain greedy output."""

    equal: bool
    first_difference: int | None = None  # index in the output
    num_departures: int | None = None  # emitted tokens that are not the target's argmax when teacher-forced
    largest_gap: float | None = None  # in logits; None = not measured, since the outputs are equal in float32


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """Everything measured on one prompt."""

    prompt_id: str
    num_prompt_tokens: int
    greedy: DecodeRecord
    baseline: DecodeRecord | None
    equality: EqualityRecord | None  # None = no baseline
    sampled: DecodeRecord | None

    @property
    def key(self) -> str:
        """The prompt's id."""
        return self.prompt_id

    @staticmethod
    def from_json(row: dict[str, Any]) -> PromptRecord:
        """The inverse of ``dataclasses.asdict``; KeyError or TypeError for another layout."""
        decoded = {key: DecodeRecord(**row[key]) if row[key] else None for key in ("greedy", "baseline", "sampled")}
        if decoded["greedy"] is None:
            raise TypeError("greedy is empty")
        return PromptRecord(
            prompt_id=row["prompt_id"],
            num_prompt_tokens=row["num_prompt_tokens"],
            greedy=decoded["greedy"],
            baseline=decoded["baseline"],
            equality=EqualityRecord(**row["equality"]) if row["equality"] else None,
            sampled=decoded["sampled"],
        )


class Keyed(Protocol):
    """A record that is found by a key."""

    @property
    def key(self) -> str:
        """Unique in its file."""


Record = TypeVar("Record", bound=Keyed)


class RecordsFile(Generic[Record]):
    """The records of one fingerprint, by key.

    Args:
        folder: eval.output_dir; made if missing.
        covered: all that shapes a result, as JSON values. Its hash is the fingerprint.
        parse: JSON object -> record; KeyError or TypeError for another layout.
        stem: how the file's name begins.
        rank: which of the job's files this process appends to; all are read.

    Raises:
        ConfigError: a file of this name with another content than this writer's.
    """

    def __init__(
        self,
        folder: Path,
        covered: dict[str, Any],
        parse: Callable[[dict[str, Any]], Record],
        *,
        stem: str,
        rank: int = 0,
    ) -> None:
        self.fingerprint = sha256_json(covered)
        self._parse, self._stem = parse, f"{stem}-{self.fingerprint[:12]}"
        self.path = folder / (f"{self._stem}.rank{rank}.jsonl" if rank else f"{self._stem}.jsonl")
        self.records: dict[str, Record] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            header = json.dumps({"fingerprint": self.fingerprint, "covers": covered}, ensure_ascii=False)
            atomic_write_bytes(self.path, header.encode() + b"\n")
        self.reload()

    def reload(self) -> None:
        """Read the files of all ranks. No other rank may be appending."""
        for path in sorted(self.path.parent.glob(f"{self._stem}*.jsonl")):
            self._load(path)

    def _load(self, path: Path) -> None:
        content = path.read_bytes()
        whole, newline, torn = content.rpartition(b"\n")
        lines = whole.split(b"\n")
        try:
            if json.loads(lines[0])["fingerprint"] != self.fingerprint:
                raise ValueError("its fingerprint is another one")
            for line in lines[1:]:
                record = self._parse(json.loads(line))
                self.records[record.key] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: not readable as results of this evaluation ({error}). Move the file away and run again."
            ) from error
        if torn:
            logger.warning("%s: its last line was cut short and is dropped; that prompt is measured again", path.name)
            if path == self.path:
                atomic_write_bytes(path, whole + newline)

    def append(self, record: Record) -> None:
        """Add a record; on the disk when this returns."""
        with open(self.path, "ab") as file:
            file.write(json.dumps(asdict(record)).encode() + b"\n")  # type: ignore[call-overload]
            file.flush()
            os.fsync(file.fileno())
        self.records[record.key] = record


class ResultsFile(RecordsFile[PromptRecord]):
    """The hold-out's results of one fingerprint, by prompt id; see :class:`RecordsFile`."""

    def __init__(self, folder: Path, covered: dict[str, Any], *, rank: int = 0) -> None:
        super().__init__(folder, covered, PromptRecord.from_json, stem="results", rank=rank)
