"""The index: which shards there are and what each holds, without opening one.

``index.jsonl`` only ever grows, by one line a shard, each written at once and flushed. The last line of a shard counts;
a line ``{"removed": name}`` takes it out. A line that a crash cut is skipped, and the shard it spoke of is found again
by its file. So several writers may append, and losing the file loses nothing: every line can be made from its shard's
header, mask and offsets without reading the states.

Trust. A shard gets its name only after it is whole and on the disk, and is never written again, so what a crash or a
careless copy can leave is a missing file or one of another size. Both are seen here for the price of one look at the
folder, however many terabytes it holds; opening a shard compares its header, ids and lengths with its line; comparing
every byte is what stage=verify is for.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_gen.cache.format import (
    INDEX_FILE,
    CacheIntegrityError,
    CaptureManifest,
    IndexRow,
    ShardRow,
    shard_index,
    shard_name,
)
from data_gen.cache.shard_file import ShardReader
from dflash2_train.config import UserError

logger = logging.getLogger(__name__)
SHARD_PATTERN = "shard-*.safetensors"


@dataclass(frozen=True, kw_only=True)
class IndexState:
    """The index beside what lies in the folder."""

    indexed: dict[str, ShardRow]  # by file name, in the order of shard numbers
    found: dict[str, ShardRow]  # shards without a line, as a crash before the append leaves them, or with a wrong one
    missing: list[str]  # lines without a file
    damaged: dict[str, str]  # files that are no shard; the reason

    @property
    def rows(self) -> dict[str, ShardRow]:
        """All usable shards in the order of their numbers."""
        both = {**self.indexed, **self.found}
        return {name: both[name] for name in sorted(both, key=shard_index)}


def compare_index(root: Path, manifest: CaptureManifest) -> IndexState:
    """Match the lines of the index with the files of the folder; opens only files that do not fit their line."""
    lines = read_index(root)
    sizes = {path.name: path.stat().st_size for path in root.glob(SHARD_PATTERN)}
    found, damaged = {}, {}
    for name in sorted(sizes, key=shard_index):
        known = lines.get(name)
        if known is not None and known.num_bytes == sizes[name]:
            continue
        try:
            found[name] = ShardReader(root / name, manifest).row()  # a header fits files of one size alone
        except CacheIntegrityError as error:
            why = "" if known is None else f"{sizes[name]} bytes, {known.num_bytes} were written; "
            damaged[name] = f"{why}{error}"
    wrong = {*found, *damaged}
    indexed = {name: lines[name] for name in sorted(lines, key=shard_index) if name in sizes and name not in wrong}
    missing = sorted((name for name in lines if name not in sizes), key=shard_index)
    return IndexState(indexed=indexed, found=found, missing=missing, damaged=damaged)


def read_index(root: Path) -> dict[str, ShardRow]:
    """Shards by file name; lines that cannot be read, whose shards are found by their files, are left out."""
    shards: dict[str, ShardRow] = {}
    skipped = 0
    try:
        file = open(root / INDEX_FILE, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return shards
    with file:
        for line in file:
            try:
                record = json.loads(line)
                if "removed" in record:
                    shards.pop(record["removed"], None)
                else:
                    shards[record["shard"]] = _checked(ShardRow(**record))
            except (ValueError, KeyError, TypeError, AttributeError):
                skipped += bool(line.strip())
    if skipped:
        logger.info("%s: %d lines are cut or of an older version; their shards count by their files", root, skipped)
    return shards


def _checked(row: ShardRow) -> ShardRow:
    """The row, if it can be of a shard; whether it is right shows when the shard is opened.

    Raises:
        ValueError, TypeError: it cannot.
    """
    counts = [*row.num_tokens, *row.num_supervised]
    if type(row.num_bytes) is not int or not all(type(count) is int and 0 <= count < 2**31 for count in counts):
        raise ValueError("counts that are none")
    if not len(row.sample_ids) == len(row.num_tokens) == len(row.num_supervised):
        raise ValueError("columns of unequal length")
    if shard_name(shard_index(row.shard)) != row.shard:
        raise ValueError("a name that no shard has")
    return row


def append_index(root: Path, *rows: ShardRow) -> None:
    """Add the lines of shards, flushed to the disk.

    Raises:
        UserError: the disk is full; the shards themselves are there and will be found.
    """
    _append(root, "".join(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows))


def append_removal(root: Path, name: str) -> None:
    """Take a shard out of the index."""
    _append(root, json.dumps({"removed": name}) + "\n")


def _append(root: Path, text: str) -> None:
    if not text:
        return
    try:
        with open(root / INDEX_FILE, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
            torn = end > 0 and file.read(1) != b"\n"
            data = memoryview(("\n" + text if torn else text).encode())
            while data:
                data = data[file.write(data) or 0 :]
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{root / INDEX_FILE}: could not be written ({error}). No shard is lost. "
            "Free space on this disk and run the same command again."
        ) from error


class SampleIndex(Sequence[IndexRow]):
    """All samples in order: the shards' rows, and columns over all of them. About 190 bytes a sample, its id included.

    Attributes:
        shards: the shards in the order of their numbers.
        shard_numbers: [n] int32, place in ``shards`` of each sample's shard.
        num_tokens, num_supervised: [n] int32.
    """

    def __init__(self, shards: Sequence[ShardRow]) -> None:
        self.shards = list(shards)
        counts = [shard.num_samples for shard in self.shards]
        self.starts: NDArray[np.int64] = np.cumsum([0, *counts], dtype=np.int64)
        self.shard_numbers: NDArray[np.int32] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.num_tokens = _column([shard.num_tokens for shard in self.shards])
        self.num_supervised = _column([shard.num_supervised for shard in self.shards])

    def __len__(self) -> int:
        return len(self.shard_numbers)

    @overload
    def __getitem__(self, place: int) -> IndexRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[IndexRow]: ...
    def __getitem__(self, place: int | slice) -> IndexRow | list[IndexRow]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        shard, row = self.place(place)
        return self.shards[shard].sample(row)

    def __iter__(self) -> Iterator[IndexRow]:
        return (shard.sample(row) for shard in self.shards for row in range(shard.num_samples))

    def place(self, sample_index: int) -> tuple[int, int]:
        """Shard's place in ``shards`` and row in the shard of a sample.

        Raises:
            IndexError: there is no such sample.
        """
        if not -len(self) <= sample_index < len(self):
            raise IndexError(f"sample {sample_index} of {len(self)}")
        sample_index %= len(self)
        shard = int(self.shard_numbers[sample_index])
        return shard, sample_index - int(self.starts[shard])


def _column(parts: list[list[int]]) -> NDArray[np.int32]:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in [[], *parts]])
