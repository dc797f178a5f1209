"""Read a capture cache: the order of samples is fixed, tensors are views of mapped files."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from data_gen.cache.format import MANIFEST_FILE, CacheIntegrityError, CapturedSample, CaptureManifest
from data_gen.cache.index import IndexState, SampleIndex, compare_index
from data_gen.cache.shard_file import ShardReader

OPEN_SHARDS = 64  # mapped at once by one reader; each costs address space, a descriptor and its header


class CaptureReader:
    """Random access to the samples under ``root``.

    ``index`` lists them by shard and place; sample ``i`` is the same one for every reader of the same cache. The
    index file may be lost: it is then rebuilt in memory from the shards' headers.

    Threads may share a reader. A worker process may be given one, pickled (it opens its own files) or by a fork while
    no thread reads.

    Args:
        root: the ``capture`` folder.
        verify_checksums: compare every byte of every shard with its digest first (reads the whole cache once).
        open_shards: files mapped at once; the one used longest ago is closed for the next.

    Raises:
        CacheIntegrityError: no cache, no sample, or a shard that is not what was written.
    """

    def __init__(self, root: Path, *, verify_checksums: bool = True, open_shards: int = OPEN_SHARDS) -> None:
        self.root = root
        self.manifest = CaptureManifest.read(root / MANIFEST_FILE)
        self.index = SampleIndex(list(_refuse_faults(root, compare_index(root, self.manifest)).rows.values()))
        if not self.index:
            raise CacheIntegrityError(
                f"{root}: holds no finished shard. Run dflash2-gen-data stage=capture to the end."
            )
        self._limit = max(open_shards, 1)
        self._open_files: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()
        if verify_checksums:
            for number in range(len(self.index.shards)):
                self.shard(number).check_content()

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def shards(self) -> list[str]:
        """File names, in order."""
        return [shard.shard for shard in self.index.shards]

    def read(self, sample_index: int, states: Tensor | None = None) -> CapturedSample:
        """Sample ``sample_index`` of ``index``: views of the mapped file; fp8 states are decoded to bf16.

        Args:
            sample_index: which.
            states: [S, T*H] bf16, a part of a batch say; if given, the tap states are put there in one pass.

        Raises:
            CacheIntegrityError: the shard is not the one that the index speaks of.
        """
        shard, row = self.index.place(sample_index)
        return self.shard(shard).read(row, states)

    def prefetch(self, sample_indices: Iterable[int]) -> None:
        """Ask the kernel to bring the states of samples into the page cache, in large reads; returns at once.

        A mapped file is otherwise read as its pages are touched, 128 KiB at a time.
        """
        for sample_index in sample_indices:
            shard, row = self.index.place(sample_index)
            file = self.shard(shard)
            os.posix_fadvise(file.descriptor, *file.state_bytes(row), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Forget the mapped files; samples already handed out stay valid."""
        with self._lock:
            self._open_files.clear()

    def shard(self, number: int) -> ShardReader:
        """Shard ``number`` of ``index.shards``, mapped.

        Raises:
            CacheIntegrityError: it is not the one that the index speaks of.
        """
        with self._lock:
            file = self._open_files.get(number)
            if file is not None:
                self._open_files.move_to_end(number)
                return file
        known = self.index.shards[number]
        file = ShardReader(self.root / known.shard, self.manifest)  # outside the lock: a slow disk stalls one thread
        if file.row() != known:
            raise CacheIntegrityError(
                f"{file.path}: not what the index says of it: one of the two was replaced or damaged. "
                "Run dflash2-gen-data stage=verify data.store.quarantine=true."
            )
        with self._lock:
            self._open_files[number] = file
            while len(self._open_files) > self._limit:
                self._open_files.popitem(last=False)
        return file


def _refuse_faults(root: Path, state: IndexState) -> IndexState:
    """Raise if a shard is gone or damaged."""
    if state.missing:
        raise CacheIntegrityError(
            f"{root}: {', '.join(state.missing[:5])} ({len(state.missing)} in all) stands in the index but is gone. "
            "Restore it, or run dflash2-gen-data stage=capture to make it again."
        )
    for name, reason in state.damaged.items():
        raise CacheIntegrityError(
            f"{root / name}: damaged ({reason}). Run dflash2-gen-data stage=capture, which sets it aside and makes it "
            "again."
        )
    return state
