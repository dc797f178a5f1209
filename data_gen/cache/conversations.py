"""Conversations on disk: ``conversations/manifest.json`` and Parquet shards written through ``datasets``.

A row is one answer to one turn, with prompt and completion *ids* as the engine returned them, why it ended, every
sampling field and its seed, and the target that wrote it. Text is kept for reading only and is never tokenised again.

A row that stands in a shard is done; nothing else says so. Jobs of an array write shard numbers of their own
(``data_gen.cache.jobs``) into the one folder, so that readers see one list of shards whatever wrote them.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.cache.format import MANIFEST_FILE, CacheIntegrityError, read_json_object, refuse_differences
from data_gen.cache.jobs import Job, alone_in, key64
from dflash2_train.provenance import atomic_write_json, publish, sha256_json

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # version 1 has one turn a row and no counts; capture and attestation need neither
CONVERSATIONS = "conversations"
ONLY_JOB = Job()
NAMES_AT_ONCE = 4096  # looked up in one call
KeyArray = np.ndarray[Any, np.dtype[np.uint64]]


class KeySet:
    """Names as sorted 64-bit hashes: 8 bytes each, where a set of a million strings takes 100 MB.

    Args:
        keys: ``key64`` of every name, in any order; the set takes them over and sorts them where they lie.
    """

    def __init__(self, keys: array[int]) -> None:
        self.keys: KeyArray = np.asarray(keys)
        self.keys.sort()

    def __contains__(self, name: str) -> bool:
        key = np.uint64(key64(name))
        place = int(np.searchsorted(self.keys, key))
        return place < len(self.keys) and bool(self.keys[place] == key)

    def __len__(self) -> int:
        return len(self.keys)

    def repeated(self) -> int:
        """How many entries are there more than once."""
        return int((self.keys[1:] == self.keys[:-1]).sum())

    def count_outside(self, names: Iterable[str]) -> int:
        """How many different entries are not among ``names``, which are read as a stream."""
        seen = np.zeros(len(self.keys), np.bool_)  # at the first of equal entries
        rest = iter(names)
        while len(batch := np.fromiter(map(key64, itertools.islice(rest, NAMES_AT_ONCE)), np.uint64)):
            places = np.searchsorted(self.keys, batch)
            inside = places < len(self.keys)
            places = places[inside]
            seen[places[self.keys[places] == batch[inside]]] = True
        return len(self) - self.repeated() - int(seen.sum())


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """The small columns of one shard, as lists."""

    row_id: list[str]
    repeat: list[int]
    turn: list[int]
    num_prompt_tokens: list[int]
    num_completion_tokens: list[int]
    finish_reason: list[str]
    dropped: list[str]


class ConversationStore:
    """The ``conversations`` folder: manifest and Parquet shards."""

    def __init__(self, root: Path) -> None:
        self.folder = root / CONVERSATIONS

    def open(self, content: dict[str, Any], job: Job = ONLY_JOB) -> None:
        """Create the folder, or check that it was made with the same settings; clear leftovers of this job.

        Raises:
            CacheIntegrityError: it was not; the differences are listed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / MANIFEST_FILE
        with alone_in(self.folder):  # jobs that start together agree on whose settings were first
            for leftover in self.folder.glob(f".{MANIFEST_FILE}.*.tmp"):
                leftover.unlink(missing_ok=True)
            if not path.exists():
                if self.shards():
                    raise CacheIntegrityError(
                        f"{self.folder} holds shards but no {MANIFEST_FILE}. Restore it or use another data.root."
                    )
                record = {"format_version": FORMAT_VERSION, "fingerprint": sha256_json(content), "content": content}
                atomic_write_json(path, record)
        version = read_json_object(path).get("format_version")
        if version != FORMAT_VERSION:
            raise CacheIntegrityError(
                f"{path}: format_version {version!r}, this program continues {FORMAT_VERSION} only. "
                "Capture what is there, or use another data.root (or run_dir) to generate again."
            )
        refuse_differences(path, self.content(), content, "conversations")
        for leftover in self.folder.glob(".shard-*.tmp"):
            if job.owns_shard(int(leftover.name.split(".")[1].removeprefix("shard-"))):
                leftover.unlink(missing_ok=True)

    def content(self) -> dict[str, Any]:
        """Settings of the conversations on disk.

        Raises:
            CacheIntegrityError: there are none, or they are of an unknown format version.
        """
        path = self.folder / MANIFEST_FILE
        stored = read_json_object(path)
        if stored.get("format_version") not in READABLE_VERSIONS:
            raise CacheIntegrityError(
                f"{path}: format_version {stored.get('format_version')!r}, this program reads {READABLE_VERSIONS}. "
                "Use the version that wrote it, or another data.root (or run_dir) to generate again."
            )
        content: dict[str, Any] = stored["content"]
        return content

    def shards(self) -> list[int]:
        """Numbers of the shards on disk; they need not be consecutive."""
        return sorted(int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.parquet"))

    def path(self, index: int) -> Path:
        """File of one shard."""
        return self.folder / f"shard-{index:05d}.parquet"

    def read(self, index: int, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Rows of one shard.

        Raises:
            CacheIntegrityError: the file is no whole Parquet file.
        """
        rows: list[dict[str, Any]] = self._table(index, columns).to_pylist()
        return rows

    def facts(self) -> Iterator[RowFacts]:
        """What is known of the rows without reading their ids, shard by shard.

        Raises:
            CacheIntegrityError: see :meth:`read`.
        """
        names = list(RowFacts.__dataclass_fields__)
        for index in self.shards():
            yield RowFacts(**self._table(index, names).to_pydict())

    def find(self, row_ids: set[str], columns: list[str]) -> dict[str, dict[str, Any]]:
        """The rows of these names, as far as they are there."""
        found: dict[str, dict[str, Any]] = {}
        for index in self.shards() if row_ids else []:
            names = self._table(index, ["row_id"]).column(0).to_pylist()
            if not row_ids.isdisjoint(names):
                rows = self.read(index, ["row_id", *columns])
                found.update({row["row_id"]: row for row in rows if row["row_id"] in row_ids})
        return found

    def _table(self, index: int, columns: list[str] | None) -> Any:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]

        try:
            return pyarrow.parquet.read_table(self.path(index), columns=columns)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise CacheIntegrityError(
                f"{self.path(index)}: not a whole Parquet file ({error}). Remove it and run stage=regenerate again."
            ) from error

    def write(self, index: int, rows: list[dict[str, Any]]) -> None:
        """Store rows as shard ``index``, whole or not at all; the two counts of tokens are added here.

        Raises:
            CacheIntegrityError: that shard is there already.
        """
        import datasets

        datasets.disable_progress_bars()
        path = self.path(index)
        if path.exists():
            raise CacheIntegrityError(f"{path}: is there already; another process writes into this folder. End it.")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            table = datasets.Dataset.from_list([_with_counts(row) for row in rows], features=_features())
            with open(temporary, "wb") as file:
                table.to_parquet(file)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _with_counts(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "num_prompt_tokens": len(row["prompt_ids"]),
        "num_completion_tokens": len(row["completion_ids"]),
    }


def _features() -> Any:
    from datasets import Features, List, Value

    text, number, real = Value("string"), Value("int64"), Value("float64")
    return Features(
        {
            "row_id": text,
            "prompt_id": text,
            "repeat": number,
            "turn": number,  # which of the conversation's answers, from 0
            "messages": text,  # JSON; the history that this answer continues
            "tools": text,  # JSON, or empty
            "source": text,
            "license": text,
            "prompt_ids": List(Value("int32")),
            "completion_ids": List(Value("int32")),
            "num_prompt_tokens": number,
            "num_completion_tokens": number,
            "completion_text": text,  # for reading; ids are what counts
            "finish_reason": text,
            "dropped": text,  # reason for leaving the row out of the capture, or empty
            "seed": number,
            "temperature": real,
            "top_p": real,
            "top_k": number,
            "min_p": real,
            "presence_penalty": real,
            "frequency_penalty": real,
            "repetition_penalty": real,
            "max_tokens": number,
            "stop_ids": List(Value("int32")),
            "target": text,
            "revision": text,
            "target_hash": text,
            "enable_thinking": Value("bool"),
        }
    )
