"""Read a capture cache: the order of samples is fixed, tensors are mapped from disk and copied sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_gen.cache.format import (
    MANIFEST_FILE,
    TOKEN_TENSORS,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    IndexRow,
)
from data_gen.cache.writer import index_of_shard, read_index
from dflash2_train.provenance import sha256_file


class CaptureReader:
    """Random access to the samples under ``root``.

    ``index`` lists them by shard and place; sample ``i`` is the same one for every reader of the same cache. The
    index file may be lost: it is then rebuilt in memory from the shards.

    Args:
        root: the ``capture`` folder.
        verify_checksums: compare every shard with its checksum first (reads the whole cache once).

    Raises:
        CacheIntegrityError: no cache, no sample, or a shard that is not what was written.
    """

    def __init__(self, root: Path, *, verify_checksums: bool = True) -> None:
        self.root = root
        self.manifest = CaptureManifest.read(root / MANIFEST_FILE)
        self.shards, self.index = self._read_index(verify_checksums)
        if not self.index:
            raise CacheIntegrityError(
                f"{root}: holds no finished shard. Run dflash2-gen-data stage=capture to the end."
            )
        self._files: dict[str, Any] = {}  # open safetensors files
        self._offsets: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.index)

    def read(self, sample_index: int) -> CapturedSample:
        """Sample ``sample_index`` of ``index``, copied out of the mapped file.

        Raises:
            CacheIntegrityError: the shard does not hold what the index says.
        """
        entry = self.index[sample_index]
        file = self._open(entry.shard)
        offsets = self._offsets[entry.shard]
        begin, end = offsets[entry.row], offsets[entry.row + 1]
        if end - begin != entry.num_tokens:
            raise CacheIntegrityError(
                f"{self.root / entry.shard}: sample {entry.sample_id} has {end - begin} tokens, the index says "
                f"{entry.num_tokens}. Run dflash2-gen-data stage=verify."
            )
        fields = {name: file.get_slice(name)[begin:end] for name in TOKEN_TENSORS}
        fields["loss_mask"] = fields["loss_mask"].to(torch.bool)
        return CapturedSample(sample_id=entry.sample_id, **fields)

    def close(self) -> None:
        """Forget the mapped files."""
        self._files.clear()
        self._offsets.clear()

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            try:
                file = safe_open(self.root / shard, framework="pt")
                self._offsets[shard] = file.get_tensor("offsets").tolist()
            except (SafetensorError, OSError) as error:
                raise _damaged(self.root / shard, str(error)) from error
            self._files[shard] = file
        return self._files[shard]

    def _read_index(self, verify: bool) -> tuple[list[str], list[IndexRow]]:
        shards, rows = read_index(self.root)
        missing = [name for name in shards if not (self.root / name).exists()]
        if missing:
            raise CacheIntegrityError(
                f"{self.root}: {', '.join(missing)} stands in the index but is gone. "
                "Restore it, or run dflash2-gen-data stage=capture to make it again."
            )
        for path in sorted(self.root.glob("shard-*.safetensors")):
            known = shards.get(path.name)
            if known is None:
                shards[path.name], found = index_of_shard(path)
                rows += found
            elif path.stat().st_size != known.num_bytes:
                raise _damaged(path, f"{path.stat().st_size} bytes, {known.num_bytes} were written")
            elif verify and sha256_file(path) != known.sha256:
                raise _damaged(path, "checksum differs")
        return sorted(shards), sorted(rows, key=lambda row: (row.shard, row.row))


def _damaged(path: Path, why: str) -> CacheIntegrityError:
    return CacheIntegrityError(
        f"{path}: damaged ({why}). Run dflash2-gen-data stage=capture, which sets it aside and makes it again."
    )
