"""Where a GGUF file's tensors come from: a published drafter folder, and the target's embedding where one is wanted.

Nothing is held: a tensor is read from its safetensors file in runs of rows, whenever it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2_train.config import GgufConfig, TargetConfig
from dflash2_train.export.gguf_layout import gguf_name, shape_faults, storage_type
from dflash2_train.export.gguf_read import PIECE_VALUES
from dflash2_train.export.gguf_types import GgufError
from dflash2_train.export.payload import (
    CONFIG,
    MASK,
    PLAIN_DTYPES,
    read_header,
    read_json,
    read_mask_embedding,
    tensor_faults,
)
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.export.weight_files import WeightFiles
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import EMBEDDING, HEAD, DrafterShape
from dflash2_train.provenance import sha256_file, sha256_json
from dflash2_train.target import TargetTensors


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor in a safetensors file, perhaps with one row replaced."""

    path: Path
    key: str
    shape: tuple[int, ...]
    row: int | None = None
    row_values: Tensor | None = None  # [m]

    def pieces(self, file: TensorFile | None = None) -> Iterator[Tensor]:
        """Whole rows [n, m] at a time, in the stored dtype, not to be changed in place; a vector is one row.

        Args:
            file: ``path``, opened by one who reads it in its order and wants its sha256; None = opened here.

        Raises:
            GgufError: a value that is not finite.
            TensorFileError: the file went away or was cut meanwhile.
        """
        width, start = self.shape[-1], 0
        for values in (file or TensorFile(self.path)).pieces(self.key, max(1, PIECE_VALUES // width) * width):
            rows = values.view(-1, width)
            yield self._checked(self._with_row(rows, start))
            start += len(rows)

    def _with_row(self, rows: Tensor, start: int) -> Tensor:
        if self.row is None or self.row_values is None or not start <= self.row < start + len(rows):
            return rows
        rows = rows.clone()  # what was read is on its way into the hash
        rows[self.row - start] = self.row_values.to(rows.dtype)
        return rows

    def _checked(self, rows: Tensor) -> Tensor:
        if not bool(torch.stack(torch.aminmax(rows)).isfinite().all()):  # NaN where any value is
            raise GgufError(f"{self.path}: {self.key} holds values that are not finite. Use another checkpoint.")
        return rows


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor of the file to write."""

    name: str  # in the file
    published: str
    kind: str  # storage type
    source: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""
        return self.source.shape

    @property
    def num_values(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class DrafterFolder:
    """A published drafter: ours, or anybody's in that layout.

    Args:
        folder: with ``config.json`` and weights, in one file or in shards; ``mask_embedding.pt`` where the drafter has
            a learned mask vector. Beside the 6 + 15 L tensors the weights may hold ``embed_tokens.weight`` and
            ``lm_head.weight``.
        hashes: file name -> sha256 that was computed a moment ago; None = nobody has read the files yet.

    Raises:
        GgufError: a file is missing or damaged, a tensor is missing, unknown or wrong, or llama.cpp would refuse the
            drafter.
    """

    def __init__(self, folder: Path, hashes: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self._known = hashes or {}
        try:
            self.config: dict[str, Any] = read_json(self.folder / CONFIG)
            self.shape = DrafterShape.from_published(self.config)
            self.weights = WeightFiles(self.folder)
            self.mask = self._read_mask()
        except ValueError as error:
            raise GgufError(f"{self.folder}: no drafter that can be converted: {error}") from error
        table = (self.shape.vocab_size, self.shape.hidden_size)
        optional = {name: table for name in (EMBEDDING, HEAD) if name in self.weights.header}
        self.expected = {**Drafter.expected_tensors(self.shape), **optional}
        faults = tensor_faults(self.weights.header, self.expected) + shape_faults(self.shape)
        if faults:
            listed = "\n  ".join(faults)
            raise GgufError(f"{self.folder}: no drafter that llama.cpp could load:\n  {listed}")

    @cached_property
    def weights_hashes(self) -> dict[str, str]:
        """Name -> hex sha256 of every weights file, which whoever converts them finds again or refuses."""
        return {path.name: self._known.get(path.name) or sha256_file(path) for path in self.weights.paths}

    @property
    def weights_by_path(self) -> dict[Path, str]:
        """Weights file -> hex sha256."""
        return {path: self.weights_hashes[path.name] for path in self.weights.paths}

    @property
    def weights_sha256(self) -> str:
        """Hex sha256 of the weights: of the one file, or of the list of hashes of several."""
        hashes = self.weights_hashes
        return next(iter(hashes.values())) if len(hashes) == 1 else sha256_json(hashes)

    def _read_mask(self) -> Tensor | None:
        """The learned mask vector [H]; None where there is no file, so that the target's own row is meant."""
        path = self.folder / MASK
        if not path.exists():
            return None
        return read_mask_embedding(path, hidden_size=self.shape.hidden_size, mask_token_id=self.shape.mask_token_id)

    def source(self, name: str) -> SourceTensor:
        """A tensor of the weights by its published name."""
        return SourceTensor(path=self.weights.path_of(name), key=name, shape=tuple(self.expected[name]))

    def embedding(self, target: TargetConfig, choice: str) -> SourceTensor | None:
        """The table for ``token_embd.weight``, the learned mask vector in its row; None = none is written.

        Args:
            target: whose table is taken where the folder brings none along.
            choice: ``export.gguf.embedding``.
        """
        wanted = choice == "own" or (choice == "auto" and (self.mask is not None or EMBEDDING in self.weights.header))
        if not wanted:
            return None
        stored = self.source(EMBEDDING) if EMBEDDING in self.weights.header else _target_embedding(target, self.shape)
        if self.mask is None:
            return stored
        return SourceTensor(
            path=stored.path,
            key=stored.key,
            shape=stored.shape,
            row=self.shape.mask_token_id,
            row_values=self.mask,
        )

    def plan(self, kind: str, settings: GgufConfig, embedding: SourceTensor | None) -> list[PlannedTensor]:
        """Every tensor of a file of type ``kind``, in the order in which the weights have them."""
        sources = {name: self.source(name) for name in self.weights.header}
        if embedding is not None:
            sources[EMBEDDING] = embedding
        else:
            sources.pop(EMBEDDING, None)
        planned = []
        for published, source in sources.items():
            name = gguf_name(published)
            stored = storage_type(name, source.shape, kind, settings.codebook_type)
            planned.append(PlannedTensor(name=name, published=published, kind=stored, source=source))
        return planned


def _target_embedding(target: TargetConfig, shape: DrafterShape) -> SourceTensor:
    """The target's embedding [V, H] where it lies."""
    tensors = TargetTensors(target)
    key = f"{tensors.decoder_prefix()}embed_tokens.weight"
    path = tensors.path_of(key)
    dtype, found = read_header(path)[key]
    expected = (shape.vocab_size, shape.hidden_size)
    if found != expected or dtype not in PLAIN_DTYPES:
        raise GgufError(
            f"target.name={target.name!r}: {key} is {dtype} {list(found)}, expected {list(expected)} in one of "
            f"{', '.join(PLAIN_DTYPES)}. Use the target that the drafter was trained for, or "
            "export.gguf.embedding=target to write no table."
        )
    return SourceTensor(path=path, key=key, shape=expected)
