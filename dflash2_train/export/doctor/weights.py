"""The values of a folder's tensors, a piece in memory at a time; each weight file is read from start to end once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash2_train.export.payload import PLAIN_DTYPES
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.export.weight_files import FoundWeights, StoredTensor, read_tensor

PIECE_ELEMENTS = 1 << 20  # of a tensor in float32 at a time: 4 MiB, which the processor's cache holds


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one pass over a tensor's values tells."""

    finite: bool
    low: float  # of the finite values
    high: float

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))


class Weights:
    """Tensors by name.

    Attributes:
        tensors: every tensor that was found, in whichever file.
        unreadable: a line for each file that is missing, empty, cut or damaged.
        index_faults: a line for each way in which the index and its files disagree.
        files: the weight files that belong to the drafter.
    """

    def __init__(self, folder: Path | None) -> None:
        found = None if folder is None else FoundWeights(folder)
        self.tensors: dict[str, StoredTensor] = {} if found is None else found.tensors
        self.unreadable = [] if found is None else [fault.short for fault in found.unreadable]
        self.index_faults = [] if found is None else [fault.short for fault in found.index_faults]
        self.files = [] if found is None else found.files
        self._open: dict[Path, TensorFile] = {} if found is None else found.open_files
        self._figures: dict[str, Figures] = {}
        self._sha256: dict[Path, str] = {}

    def sha256(self, path: Path) -> str | None:
        """Hex sha256 of a weight file, of the very bytes that the values were read from; None for another file."""
        if path in self._open and path not in self._sha256:
            self._sha256[path] = self._open[path].sha256()
        return self._sha256.get(path)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The values of ``name`` in float32, some rows at a time (a scalar as it is)."""
        # The tensor is read as a whole, not mapped: a slice of a tensor that is not mapped reads all of it each time.
        stored = self.tensors[name]
        plain = stored.dtype in PLAIN_DTYPES
        tensor = self._open[stored.file].read(name) if plain else read_tensor(stored.file, name)
        if not tensor.shape:
            yield tensor.float()
            return
        step = max(1, PIECE_ELEMENTS // max(1, tensor[:1].numel()))
        for start in range(0, tensor.shape[0], step):
            yield tensor[start : start + step].float()

    def values(self, name: str) -> Tensor:
        """The whole tensor in float32, for small ones."""
        parts = [torch.empty(0), *(piece.reshape(-1) for piece in self.pieces(name))]
        return torch.cat(parts).reshape(self.tensors[name].shape)

    def figures(self, name: str) -> Figures:
        """One pass over the values as stored, remembered."""
        if name not in self._figures:
            stored = self.tensors[name]
            plain = stored.dtype in PLAIN_DTYPES
            self._figures[name] = figures(self._open[stored.file].pieces(name) if plain else self.pieces(name))
        return self._figures[name]


def figures(pieces: Iterator[Tensor]) -> Figures:
    """One pass over pieces of a tensor, of any floating-point type that torch compares."""
    finite, low, high = True, float("inf"), float("-inf")
    for piece in pieces:
        if piece.numel() == 0:
            continue
        ends = [float(end) for end in torch.aminmax(piece)]  # NaN where any value is
        if not all(map(math.isfinite, ends)):
            finite, good = False, piece[torch.isfinite(piece)]
            ends = [float(end) for end in torch.aminmax(good)] if good.numel() else []
        low, high = min([low, *ends]), max([high, *ends])
    if low > high:  # no finite value at all
        low = high = 0.0
    return Figures(finite=finite, low=low, high=high)
