"""One safetensors file, read a tensor at a time, and its sha256 taken of the very bytes that were read.

Weights are gigabytes, and reading them once to hash and once more for their values is twice the disk. So whoever reads
tensors in the order of the file gets its hash on the way, in a thread: hashlib and reading both release the
interpreter. What little lies between the tensors asked for (the header, small tensors) is read for the hash alone; a
tensor out of order, behind or far ahead, is read by itself and leaves the hash where it was.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dflash2_train.config import UserError
from dflash2_train.export.payload import PLAIN_DTYPES, read_header

PIECE_BYTES = 8 << 20
MAX_GAP_BYTES = 8 << 20  # a single tensor read ahead of its turn must not pull the hash along
LENGTH_BYTES = 8  # of the header's length, at the start of a file
_UNREADABLE = "{path}: {name} cannot be read ({error}). Copy the file anew or make it again."


class TensorFileError(UserError, ValueError):
    """A file that went away or was cut while it was read; the text says what to do."""


class TensorFile:
    """A file whose tensors are asked for by name.

    Nothing is mapped or kept but the tensor last read, until its bytes are hashed. The library judges the header
    (lengths, offsets, overlaps) before any of it is believed.

    Raises:
        ValueError: the file is missing, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._places = read_header(path), _places(path)
        # name -> (safetensors dtype name, shape), in the order of the file
        self.header = {name: header[name] for name in sorted(self._places, key=self._places.__getitem__)}
        self._digest = hashlib.sha256()
        self._hashed = 0  # bytes from the start that are in the digest, or on their way into it
        self._pending: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, of one of the plain types.

        Its bytes may still be on their way into the hash: call :meth:`settle` before changing it in place.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its file went away or was cut meanwhile, or it is of another type.
        """
        shape, dtype = self.header[name][1], self._dtype(name)
        self.settle()
        values = torch.empty(prod(shape), dtype=dtype)
        if values.numel():
            data = values.view(torch.uint8).numpy().data
            with self._at(name) as file:
                for start in range(0, len(data), PIECE_BYTES):
                    self._take(file, data[start : start + PIECE_BYTES], ahead=True)  # part of one tensor
        return values.reshape(shape)

    def pieces(self, name: str, num_values: int | None = None) -> Iterator[Tensor]:
        """The values of a tensor in their order, so many at a time; memory is that of two pieces.

        Args:
            name: of a tensor.
            num_values: of a piece, the last one excepted; None = 8 MiB of them.

        Yields:
            Flat tensors as stored, not to be changed in place.

        Raises:
            KeyError, ValueError: as :meth:`read`.
        """
        dtype, left = self._dtype(name), prod(self.header[name][1])
        step = num_values or PIECE_BYTES // dtype.itemsize
        with self._at(name) as file:
            while left:
                values = torch.empty(min(step, left), dtype=dtype)
                self._take(file, values.view(torch.uint8).numpy().data, ahead=False)
                left -= len(values)
                yield values

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.header[name][0]
        if stored not in PLAIN_DTYPES:
            raise ValueError(f"{self.path}: {name} is {stored}, expected one of {', '.join(PLAIN_DTYPES)}.")
        dtype: torch.dtype = getattr(torch, PLAIN_DTYPES[stored])
        return dtype

    @contextmanager
    def _at(self, name: str) -> Iterator[io.FileIO]:
        """The file, opened where a tensor begins; what little stands before it is hashed on the way."""
        start = self._places[name][0]
        try:
            with open(self.path, "rb", buffering=0) as file:
                if start - self._hashed <= MAX_GAP_BYTES:
                    self._hash_up_to(file, start)
                file.seek(start)
                yield file
        except (OSError, EOFError) as error:
            raise TensorFileError(_UNREADABLE.format(path=self.path, name=name, error=error)) from error

    def _take(self, file: io.FileIO, piece: memoryview, *, ahead: bool) -> None:
        """Fill ``piece`` from the file, and hash it where it is the next that the hash lacks.

        ``ahead``: without waiting for the hash of what was taken before, which stays in memory until it is done.
        """
        in_order = file.tell() == self._hashed
        _read_whole(file, piece)
        if not in_order:
            return
        if not ahead:
            self.settle()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._pending.append(self._thread.submit(self._digest.update, piece))  # one worker keeps the order
        self._hashed += len(piece)

    def _hash_up_to(self, file: io.FileIO, end: int) -> None:
        """Hash what stands between the last byte hashed and ``end``; nothing where that lies behind already."""
        if self._hashed < end:
            file.seek(self._hashed)
        while self._hashed < end:
            self._take(file, memoryview(bytearray(min(PIECE_BYTES, end - self._hashed))), ahead=False)

    def settle(self) -> None:
        """Wait until all that was read is hashed."""
        for done in self._pending:
            done.result()
        self._pending.clear()

    def sha256(self) -> str:
        """Hex sha256 of the file: of what :meth:`read` gave in order, and of the rest, which is read now.

        Raises:
            ValueError: the file went away or was cut meanwhile.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                self._hash_up_to(file, file.seek(0, io.SEEK_END))
        except (OSError, EOFError) as error:
            raise TensorFileError(_UNREADABLE.format(path=self.path, name="the rest", error=error)) from error
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        return self._digest.hexdigest()


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> first byte and byte after the last, counted from the start of the file; the header is a sound one."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    base = LENGTH_BYTES + length
    return {name: (base + entry["data_offsets"][0], base + entry["data_offsets"][1]) for name, entry in entries.items()}


def _read_whole(file: io.FileIO, piece: memoryview) -> None:
    filled = 0
    while filled < len(piece):
        count = file.readinto(piece[filled:])
        if not count:
            raise EOFError("the file ends before it")
        filled += count
