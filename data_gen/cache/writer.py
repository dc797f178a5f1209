"""Write a capture cache so that a crash at any moment leaves whole shards and nothing else under a final name.

Any number of writers may fill one folder, on one machine or over a shared file system: a shard appears whole, the first
writer of a name wins, and the index is only ever appended to. No lock is taken, as some shared file systems have none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from data_gen.cache.format import (
    MANIFEST_FILE,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    ShardRow,
    refuse_differences,
    shard_index,
    shard_name,
)
from data_gen.cache.index import SHARD_PATTERN, append_index, append_removal, compare_index
from data_gen.cache.quarantine import quarantine
from data_gen.cache.shard_file import ShardReader, is_whole, remove_leftovers, write_shard_file
from dflash2_train.provenance import atomic_write_json

logger = logging.getLogger(__name__)


class CaptureWriter:
    """Creates or continues the cache under ``root``.

    Opening it costs one look at the folder and the index, not a pass over the shards. Shards without an index line get
    one; files that are cut are set aside in ``quarantine/``, to be made again.

    Raises:
        CacheIntegrityError: ``root`` holds a cache of other settings; the differences are listed.
    """

    def __init__(self, root: Path, manifest: CaptureManifest) -> None:
        self.root, self.manifest = root, manifest
        path = root / MANIFEST_FILE
        if path.exists():
            self.manifest = CaptureManifest.read(path)
            refuse_differences(path, self.manifest.content, manifest.content, "states")
        elif any(root.glob(SHARD_PATTERN)):
            raise CacheIntegrityError(
                f"{root} holds shards but no {MANIFEST_FILE}. Restore it or choose another data.root."
            )
        else:
            root.mkdir(parents=True, exist_ok=True)
            atomic_write_json(path, manifest.to_dict())
        self._present = self._settle()

    def existing_shards(self) -> set[int]:
        """Numbers of the shards that are on disk, whole and in the index. Others are to be made."""
        return set(self._present)

    def sample_ids(self, index: int) -> list[str]:
        """Samples of an existing shard, in order."""
        return ShardReader(self.root / shard_name(index), self.manifest).sample_ids

    def write_shard(self, index: int, samples: Sequence[CapturedSample]) -> ShardRow:
        """Store one group of samples as shard ``index``; it exists afterwards as a whole, or not at all.

        Raises:
            CacheIntegrityError: a sample breaks the format, or the shard is there with other samples.
            UserError: the disk is full.
        """
        row = write_shard_file(self.root / shard_name(index), samples, self.manifest)
        append_index(self.root, row)
        self._present.add(index)
        return row

    def _settle(self) -> set[int]:
        """Make index and folder agree; numbers of the usable shards."""
        remove_leftovers(self.root)
        state = compare_index(self.root, self.manifest)
        for name in state.missing:
            logger.warning("%s stands in the index of %s but is gone; it counts as not made", name, self.root)
            append_removal(self.root, name)
        for name, reason in state.damaged.items():
            # Writers that start together find the same faults: look again, lest a shard just made be moved.
            if not is_whole(self.root / name, self.manifest):
                quarantine(self.root, name, [reason])
        append_index(self.root, *state.found.values())
        return {shard_index(name) for name in state.rows}
