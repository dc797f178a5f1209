"""Reading a GGUF drafter, ours or anybody's: the file's facts as they are, and the drafter that they describe.

:class:`GgufFile` judges nothing, so that a check-up can look at broken files; :func:`read_gguf_drafter` takes only a
file that is a whole DFlash 2 drafter. The file is mapped, and values are read when asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2_train.export.gguf_layout import (
    TOKENS_KEY,
    published_name,
    shape_from_entries,
)
from dflash2_train.export.gguf_types import GgufError, decode, gguf_package
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import EMBEDDING, HEAD, DrafterShape

PIECE_VALUES = 1 << 20  # values encoded or decoded at a time: 4 MiB in fp32, which the processor's cache holds
_COUNTED_KEYS = (TOKENS_KEY, "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # as torch has it: the reverse of the file's order
    kind: str  # ggml's name of the storage type
    start: int  # its first byte, counted from the start of the file
    num_bytes: int


class GgufFile:
    """The keys and tensors of a GGUF file.

    Args:
        path: one file; split ones are not read.

    Raises:
        GgufError: no such file, no GGUF file, or one that is cut or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        _check_start(self.path)
        gguf = gguf_package()
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
            raise GgufError(f"{self.path}: cut or damaged ({error}). Copy it anew or convert again.") from error
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}
        self.tensors = {
            name: GgufTensor(
                name=name,
                shape=tuple(int(size) for size in reversed(tensor.shape.tolist())),
                kind=tensor.tensor_type.name,
                start=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes),
            )
            for name, tensor in self._stored.items()
        }

    @property
    def keys(self) -> list[str]:
        """Every key, in the file's order."""
        return [key for key in self._reader.fields if not key.startswith("GGUF.")]

    def kind(self, key: str) -> str:
        """The type of a value by GGUF's name, as ``UINT32``, or ``ARRAY[BOOL]``."""
        kinds: list[str] = [kind.name for kind in self._reader.fields[key].types]
        return f"ARRAY[{kinds[-1]}]" if kinds[0] == "ARRAY" else kinds[0]

    def value(self, key: str, default: Any = None) -> Any:
        """A value as Python's own; a FLOAT32 by its shortest decimal, so that 1e-5 reads as 1e-5."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value = field.contents()
        return _shortest(value) if self.kind(key) == "FLOAT32" else value

    @cached_property
    def small_values(self) -> dict[str, Any]:
        """Key -> value of all but the token lists."""
        return {key: self.value(key) for key in self.keys if key not in _COUNTED_KEYS}

    @property
    def num_tokens(self) -> int:
        """Entries of the tokenizer's list; 0 where there is none."""
        field = self._reader.get_field(TOKENS_KEY)
        return 0 if field is None else len(field.data)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The values of a tensor, float32, whole rows [n, m] at a time."""
        stored = self._stored[name].data
        rows = stored.reshape(-1, stored.shape[-1]) if stored.ndim else stored.reshape(1, 1)
        step = max(1, PIECE_VALUES // self.tensors[name].shape[-1])
        for start in range(0, rows.shape[0], step):
            yield decode(rows[start : start + step], self.tensors[name].kind)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A whole tensor in the shape and dtype asked for."""
        return torch.cat([piece.to(dtype) for piece in self.pieces(name)]).view(self.tensors[name].shape)

    def row(self, name: str, index: int) -> Tensor:
        """Row ``index`` of a matrix, float32 [m]."""
        return decode(self._stored[name].data[index : index + 1], self.tensors[name].kind)[0]


@dataclass(frozen=True, kw_only=True)
class GgufDrafter:
    """A whole DFlash 2 drafter in a file."""

    file: GgufFile
    shape: DrafterShape
    notes: list[str]  # what the file leaves open
    names: dict[str, str]  # published name -> name in the file, of the 6 + 15 L tensors
    has_embedding: bool  # a token_embd of its own
    has_head: bool  # an output head of its own

    @property
    def config(self) -> dict[str, Any]:
        """The published ``config.json`` that means the same."""
        values = self.file.small_values
        return self.shape.to_published(
            "bfloat16",
            bos_token_id=values.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=values.get("tokenizer.ggml.eos_token_id"),
            pad_token_id=values.get("tokenizer.ggml.padding_token_id"),
        )

    @property
    def kinds(self) -> dict[str, str]:
        """Published name -> storage type."""
        return {published: self.file.tensors[name].kind for published, name in self.names.items()}

    @property
    def mask_embedding(self) -> Tensor | None:
        """What llama.cpp embeds in a mask slot, float32 [H]; None = the target's own row of the mask token."""
        return self.file.row("token_embd.weight", self.shape.mask_token_id) if self.has_embedding else None

    def state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The published tensors, read and cast one after the other."""
        return {published: self.file.tensor(name, dtype) for published, name in self.names.items()}


def read_gguf_drafter(path: Path) -> GgufDrafter:
    """The drafter in a file, nothing guessed and nothing filled in.

    Raises:
        GgufError: not a whole DFlash 2 drafter: another architecture, a missing key, or a tensor that is missing,
            unknown or of another shape; lists them.
    """
    file = GgufFile(path)
    values = {**file.small_values, TOKENS_KEY: range(file.num_tokens)}
    try:
        shape, notes = shape_from_entries(values)
    except ValueError as error:
        raise GgufError(f"{file.path}: {error}") from error
    published = {published_name(name) or name: name for name in file.tensors}
    wanted = Drafter.expected_tensors(shape)
    whole = {EMBEDDING: (shape.vocab_size, shape.hidden_size), HEAD: (shape.vocab_size, shape.hidden_size)}
    faults = [f"{name}: missing, expected shape {list(wanted[name])}" for name in sorted(wanted.keys() - published)]
    faults += [f"{name}: unknown to this architecture" for name in sorted(published.keys() - wanted - whole.keys())]
    for name in sorted(published.keys() & (wanted | whole).keys()):
        found = file.tensors[published[name]].shape
        if found != tuple((wanted | whole)[name]):
            faults.append(f"{name}: shape {list(found)}, expected {list((wanted | whole)[name])}")
    if faults:
        raise GgufError(f"{file.path} is not a whole DFlash 2 drafter:\n  " + "\n  ".join(faults))
    return GgufDrafter(
        file=file,
        shape=shape,
        notes=notes,
        names={name: published[name] for name in wanted},
        has_embedding=EMBEDDING in published,
        has_head=HEAD in published,
    )


def _check_start(path: Path) -> None:
    """Magic, version and counts, before the package walks along whatever the counts say."""
    try:
        with open(path, "rb") as file:
            start = file.read(24)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise GgufError(f"{path}: no such file. Name a .gguf file.") from error
    if len(start) < 24 or start[:4] != b"GGUF":
        raise GgufError(f"{path}: no GGUF file (it does not begin with GGUF). Name a .gguf file.")
    version, num_tensors, num_keys = struct.unpack("<IQQ", start[4:])
    if version != 3 or max(num_tensors, num_keys) > 1 << 20:
        raise GgufError(
            f"{path}: version {version} with {num_tensors} tensors and {num_keys} keys is not a file of version 3 in "
            "little-endian order. Convert the drafter again."
        )


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in fp32."""
    import numpy

    return float(str(numpy.float32(value)))
