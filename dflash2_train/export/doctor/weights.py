"""The tensors of a folder, of one safetensors file or of an indexed set, one in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash2_train.export.payload import WEIGHTS, read_header
from dflash2_train.export.weight_files import INDEX, read_tensor

PIECE_ELEMENTS = 1 << 23  # of a tensor in float32 at a time: 32 MiB


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies and what its file says of it."""

    file: Path
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]


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
        self.tensors: dict[str, StoredTensor] = {}
        self.unreadable: list[str] = []
        self.index_faults: list[str] = []
        self.files: list[Path] = []
        self._figures: dict[str, Figures] = {}
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        index = folder / INDEX
        listed = self._read_index(index) if index.exists() else None
        if listed is None:
            self.files = [folder / WEIGHTS]
        else:
            self.files = [folder / name for name in sorted(set(listed.values()))]
        for path in self.files:
            self._enter(path)
        if listed is not None:
            self._compare(listed)

    def _read_index(self, path: Path) -> dict[str, str] | None:
        """Tensor name -> file name, or None (and a fault) if the index is no such list."""
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            named = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.index_faults.append(f"{INDEX}: no readable weight_map ({type(error).__name__}: {error})")
            return None
        outside = sorted({file for file in named.values() if Path(file).name != file})
        if outside:  # a path out of the folder is no shard of this drafter, and is not opened
            self.index_faults += [f"{INDEX} names {file}, which is no file name in this folder" for file in outside]
            return None
        return named

    def _enter(self, path: Path) -> None:
        try:
            header = read_header(path)
        except ValueError as error:
            self.unreadable.append(str(error).split(". ")[0] if path.exists() else f"{path.name}: no such file")
            return
        for name, (dtype, shape) in header.items():
            if name in self.tensors:
                self.index_faults.append(f"{name} stands in {self.tensors[name].file.name} and in {path.name}")
            self.tensors[name] = StoredTensor(file=path, dtype=dtype, shape=shape)

    def _compare(self, listed: dict[str, str]) -> None:
        read = {tensor.file.name for tensor in self.tensors.values()}
        for name, file in sorted(listed.items()):
            if file in read and (name not in self.tensors or self.tensors[name].file.name != file):
                self.index_faults.append(f"{INDEX} says that {name} stands in {file}, but it does not")
        unlisted = sorted(self.tensors.keys() - listed.keys())
        self.index_faults += [
            f"{name} stands in {self.tensors[name].file.name}, but not in {INDEX}" for name in unlisted
        ]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The values of ``name`` in float32, some rows at a time (a scalar as it is)."""
        # The tensor is read as a whole, not mapped: a slice of a tensor that is not mapped reads all of it each time.
        tensor = read_tensor(self.tensors[name].file, name)
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
        """One pass over the values, remembered."""
        if name not in self._figures:
            self._figures[name] = figures(self.pieces(name))
        return self._figures[name]


def figures(pieces: Iterator[Tensor]) -> Figures:
    """One pass over float32 pieces of a tensor."""
    finite, low, high = True, float("inf"), float("-inf")
    for piece in pieces:
        if piece.numel() == 0:
            continue
        good = torch.isfinite(piece)
        if not bool(good.all()):
            finite, piece = False, piece[good]
        if piece.numel():
            low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    if low > high:  # no finite value at all
        low = high = 0.0
    return Figures(finite=finite, low=low, high=high)
