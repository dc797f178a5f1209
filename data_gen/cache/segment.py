"""One segment of a ring on disk: a capture shard (:mod:`data_gen.cache.shard_file` writes it), read sample by sample.

Reading goes by plain reads and not by a memory map: a segment may be deleted while it is read, and on a network file
system a map of a deleted file kills the process where a read raises an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from data_gen.cache import fp8
from data_gen.cache.format import TAP_SCALE, TOKEN_TENSORS, CacheIntegrityError, CapturedSample
from data_gen.cache.shard_file import DIGESTS, content_digest

HEADER_BYTES = 4096  # more than the fixed part of a shard's header takes
SAMPLE_BYTES = 64  # of each sample's place in header and offsets, its id not counted
STORED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def segment_bytes(sample_ids: Sequence[str], num_tokens: int, token_bytes: int) -> int:
    """The most that a segment of these samples takes on disk."""
    names = sum(len(json.dumps(name)) + SAMPLE_BYTES for name in sample_ids)
    return HEADER_BYTES + names + num_tokens * token_bytes


class SegmentReader:
    """Samples of one segment by id, through an open file. Deleting the file does not disturb it on a local disk.

    Raises:
        FileNotFoundError: no such segment.
        CacheIntegrityError: the file is no whole segment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._read_header()
        except (ValueError, KeyError, EOFError) as error:
            self.close()
            raise CacheIntegrityError(
                f"{path}: not a whole segment ({error}). Delete it; a producer makes it again."
            ) from error

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, sample_id: str, states: Tensor | None = None) -> CapturedSample:
        """One sample, copied into memory.

        Args:
            sample_id: which one.
            states: [S, T*H] bf16, contiguous; the tap states are read straight into it.

        Raises:
            CacheIntegrityError: it is not in this segment.
        """
        row = self._rows.get(sample_id)
        if row is None:
            raise CacheIntegrityError(
                f"{self.path}: holds no sample {sample_id}, which the plan puts there. Delete the ring and start its "
                "producers again."
            )
        begin, end = self._offsets[row], self._offsets[row + 1]
        fields = {name: self._slice(name, begin, end) for name in TOKEN_TENSORS if name != "tap_hidden"}
        fields["loss_mask"] = fields["loss_mask"].to(torch.bool)
        if TAP_SCALE in self._header:
            codes, factors = self._slice("tap_hidden", begin, end), self._slice(TAP_SCALE, begin, end)
            fields["tap_hidden"] = fp8.decode(codes, factors, states)
        else:
            fields["tap_hidden"] = self._slice("tap_hidden", begin, end, states)
        return CapturedSample(sample_id=sample_id, **fields)

    def check_content(self) -> None:
        """Compare every byte with the digest that was taken before it was written.

        Raises:
            CacheIntegrityError: they differ.
        """
        tensors = {
            name: self._slice(name, 0, entry["shape"][0])
            for name, entry in self._header.items()
            if name != "__metadata__"
        }
        metadata = self._header["__metadata__"]
        algorithm = next((name for name in DIGESTS if name in metadata), None)
        if algorithm is None or content_digest(tensors, algorithm) != metadata[algorithm]:
            raise CacheIntegrityError(
                f"{self.path}: its bytes are not those that were written. Delete it; a producer makes it again."
            )

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read_header(self) -> None:
        length = int.from_bytes(self._bytes(0, 8), "little")
        size = os.fstat(self._file).st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"{size} bytes with a header of {length}")
        self._header = json.loads(self._bytes(8, length))
        self._data = 8 + length
        whole = max(entry["data_offsets"][1] for name, entry in self._header.items() if name != "__metadata__")
        if size != self._data + whole:
            raise ValueError(f"{size} bytes, its header tells of {self._data + whole}")
        names = json.loads(self._header["__metadata__"]["sample_ids"])
        self._rows = {name: row for row, name in enumerate(names)}
        self._offsets = self._slice("offsets", 0, len(names) + 1).tolist()

    def _slice(self, name: str, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """Rows [begin, end) of a stored tensor, in ``out`` if given."""
        entry = self._header[name]
        dtype, shape = STORED_DTYPES[entry["dtype"]], [end - begin, *entry["shape"][1:]]
        first, last = entry["data_offsets"]
        row_bytes = (last - first) // max(entry["shape"][0], 1)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif list(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"{self.path}: {name} is {dtype} {shape}, its place is {out.dtype} {list(out.shape)}")
        if out.numel():
            self._fill(out.view(torch.uint8).flatten().numpy().data, self._data + first + begin * row_bytes)
        return out

    def _bytes(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, view: memoryview, offset: int) -> None:
        """Read the file from ``offset`` on until ``view`` is full."""
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], offset + done)
            if count == 0:
                raise EOFError(f"ends after {offset + done} bytes")
            done += count
