"""Writing published weights tensor by tensor: memory is that of one tensor, whatever the size of the drafter.

The safetensors library writes a file from a dictionary that holds all of it, so the bytes are laid out here: the
header's length in 8 bytes, the header as JSON, then the tensors without gaps in the order of their names. Every file's
sha256 is taken of the bytes as they are handed over; that the file on disk has the same one is for the caller to see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dflash2_train.export.hashed_writer import HashedWriter
from dflash2_train.export.payload import PLAIN_DTYPES, WEIGHTS
from dflash2_train.export.weight_files import INDEX
from dflash2_train.provenance import atomic_write_json

ALIGNMENT = 8  # of the first tensor's byte, as the library does
DTYPE_NAMES = {name: stored for stored, name in PLAIN_DTYPES.items()}  # torch name -> safetensors name
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file to write."""

    name: str
    tensors: tuple[str, ...]


def shard_bytes(max_shard_gib: float | None) -> int | None:
    """``max_bytes`` of :func:`write_weights` from a size in GiB."""
    return None if max_shard_gib is None else int(max_shard_gib * 2**30)


def plan_shards(shapes: Shapes, itemsize: int, max_bytes: int | None) -> list[Shard]:
    """Which tensors go into which file, in the order of their names.

    Args:
        shapes: of all tensors.
        itemsize: bytes an element.
        max_bytes: tensor bytes a file; None = one file. A single larger tensor gets a file of its own.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(shapes):
        size = prod(shapes[name]) * itemsize
        if max_bytes is not None and groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [Shard(name=WEIGHTS, tensors=tuple(groups[0]))]
    stem = WEIGHTS.removesuffix(".safetensors")
    return [
        Shard(name=f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def write_weights(
    folder: Path, shapes: Shapes, read: Callable[[str], Tensor], *, dtype: torch.dtype, max_bytes: int | None = None
) -> dict[str, str]:
    """Write all tensors below ``folder``, each read, cast and dropped in turn; with an index if there are shards.

    Args:
        folder: is there; its files are overwritten.
        shapes: of all tensors.
        read: gives a tensor by name, of any device and floating-point type.
        dtype: to store.
        max_bytes: tensor bytes a file; None = one file.

    Returns:
        File name -> sha256 of what was written.

    Raises:
        ValueError: ``read`` gave another shape than promised.
    """
    shards = plan_shards(shapes, dtype.itemsize, max_bytes)
    hashes = {shard.name: _write_file(folder / shard.name, shard, shapes, read, dtype) for shard in shards}
    if len(shards) > 1:
        total = sum(prod(shape) for shape in shapes.values())
        index = {
            "metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
            "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
        }
        atomic_write_json(folder / INDEX, index)
    return hashes


def _header(shard: Shard, shapes: Shapes, dtype: torch.dtype) -> bytes:
    """Length and JSON header of one file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in shard.tensors:
        end = start + prod(shapes[name]) * dtype.itemsize
        stored = DTYPE_NAMES[str(dtype).removeprefix("torch.")]
        entries[name] = {"dtype": stored, "shape": list(shapes[name]), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, shard: Shard, shapes: Shapes, read: Callable[[str], Tensor], dtype: torch.dtype) -> str:
    with open(path, "wb") as file, HashedWriter(file) as hashed:
        hashed.write(_header(shard, shapes, dtype))
        for name in shard.tensors:
            tensor = read(name)
            if tuple(tensor.shape) != tuple(shapes[name]):
                raise ValueError(f"{name}: shape {list(tensor.shape)}, expected {list(shapes[name])}.")
            hashed.write(tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8).flatten().numpy().data)
        return hashed.sha256()
