"""Writing one GGUF file, and holding the written file against what it was made from before it gets its name.

Header and keys go through the ``gguf`` package; the values of a tensor are read, encoded and appended a few rows at a
time, so memory does not grow with the drafter. What was encoded is decoded again at once, and no value may be further
from its own than its type allows. Then the file is opened as any reader would open it: every key with its type, every
tensor's name, shape, storage type and place, and the sha256 of all its bytes is that of what was handed to the system.
So a source is read once, and so is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash2_train.export.gguf_layout import (
    ARCHITECTURE,
    STORAGE_TYPES,
    Entry,
    stored_bytes,
)
from dflash2_train.export.gguf_read import GgufFile
from dflash2_train.export.gguf_source import PlannedTensor
from dflash2_train.export.gguf_types import PLAIN, GgufError, decode, encode, error_bound, gguf_package
from dflash2_train.export.hashed_writer import HashedWriter
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.export.workspace import workspace
from dflash2_train.provenance import publish, sha256_file

if TYPE_CHECKING:
    import numpy


def write_gguf(
    path: Path,
    entries: dict[str, Entry],
    tensors: Sequence[PlannedTensor],
    add_tokenizer: Callable[[Any], None],
    *,
    sources: Mapping[Path, str],
) -> str:
    """Write, check and publish a file; an earlier one of that name stays until the new one is whole.

    Args:
        path: final name.
        entries: whole key -> value, ``general.architecture`` and tokenizer excepted.
        tensors: in the order to write, which is best that of the files they are read from.
        add_tokenizer: gives the writer its tokenizer keys.
        sources: file -> sha256 that it must have, of those that ``tensors`` are read from.

    Returns:
        Hex sha256 of the file.

    Raises:
        GgufError: values that cannot be stored, a source that is not the one meant, or a written file that is not what
            was meant.
        ExportError: another process writes it, or the system refused to.
    """
    with workspace(path) as space:
        temporary = space / path.name
        writer = gguf_package().GGUFWriter(None, ARCHITECTURE)
        try:
            _add_entries(writer, entries)
            add_tokenizer(writer)
            for tensor in tensors:
                _announce(writer, tensor)
            written = _write(writer, temporary, tensors, sources)
        finally:
            writer.close()
        check_written(temporary, writer.kv_data[0], tensors, written)
        publish(temporary, path)
    return written.sha256


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was handed to the system."""

    sha256: str
    starts: dict[str, int]  # tensor -> its first byte


def _add_entries(writer: Any, entries: dict[str, Entry]) -> None:
    types = gguf_package().GGUFValueType
    for key, entry in entries.items():
        kind = types[entry.kind]
        if entry.array:
            writer.add_key_value(key, entry.value, types.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, entry.value, kind)


def _announce(writer: Any, tensor: PlannedTensor) -> None:
    """Name, shape, type and size of a tensor whose values follow later."""
    import numpy

    kinds = gguf_package().GGMLQuantizationType
    size = stored_bytes(tensor.shape, tensor.kind)
    # as bytes, from which the package counts back to values by the type
    writer.add_tensor_info(tensor.name, size, numpy.dtype("uint8"), math.prod(size), raw_dtype=kinds[tensor.kind])


def _write(writer: Any, path: Path, tensors: Sequence[PlannedTensor], sources: Mapping[Path, str]) -> Written:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    file.flush()
    readers: dict[Path, TensorFile] = {}
    starts: dict[str, int] = {}
    with HashedWriter(file, path.read_bytes()) as out:
        for tensor in tensors:
            writer.write_padding(out, file.tell())  # each tensor starts on a multiple of the alignment
            starts[tensor.name] = file.tell()
            source = tensor.source
            if source.path not in readers:
                readers[source.path] = TensorFile(source.path)
            for rows in source.pieces(readers[source.path]):
                out.write(_encoded(rows, tensor).data)  # tofile would hide a full disk's errno
        writer.write_padding(out, file.tell())
        refuse_changed(readers, sources)
        return Written(sha256=out.sha256(), starts=starts)


def _encoded(rows: Tensor, tensor: PlannedTensor) -> numpy.ndarray[Any, Any]:
    """Rows [n, m] as they are stored, once every value reads back within what its type may lose."""
    packed = encode(rows, tensor.kind, tensor.published)
    if PLAIN.get(tensor.kind) is rows.dtype:  # the very bytes
        return packed
    error = (decode(packed, tensor.kind).view_as(rows) - rows.float()).abs()
    if not bool((error <= error_bound(rows, tensor.kind)).all()):  # so that NaN counts as bad
        raise GgufError(
            f"{tensor.published}: a value read back as {tensor.kind} is further from its own than this type allows. "
            "Choose another type, and report it: the gguf package or this one encodes it wrongly."
        )
    return packed


def refuse_changed(readers: Mapping[Path, TensorFile], sources: Mapping[Path, str]) -> None:
    """Raise GgufError where a file's bytes, as they were read, are not those of the file that was meant."""
    for path, digest in sources.items():
        if path in readers and readers[path].sha256() != digest:
            raise GgufError(
                f"{path}: its bytes are not those that were hashed before: it is damaged or was written to meanwhile. "
                "No file is made of it. Run the same command again."
            )


def check_written(path: Path, fields: dict[str, Any], tensors: Sequence[PlannedTensor], written: Written) -> None:
    """Hold a file against the keys, tensors and bytes that it was to have.

    Args:
        path: the file.
        fields: key -> ``gguf.GGUFValue``, as the writer had them.
        tensors: the plan.
        written: what was handed to the system.

    Raises:
        GgufError: lists up to ten differences.
    """
    file = GgufFile(path)
    found = list(islice(chain(_key_differences(file, fields), _tensor_differences(file, tensors, written)), 10))
    if not found and sha256_file(path) != written.sha256:
        found = ["its bytes are not those that were written"]
    if found:
        listed = "\n  ".join(found)
        raise GgufError(f"{path}: read back, the file is not what was written. Check the disk.\n  {listed}")


def _key_differences(file: GgufFile, fields: dict[str, Any]) -> Iterable[str]:
    types = gguf_package().GGUFValueType
    yield from (f"{key}: missing" for key in sorted(fields.keys() - set(file.keys)))
    yield from (f"{key}: not written by us" for key in sorted(set(file.keys) - fields.keys()))
    for key in file.keys:
        if key not in fields:
            continue
        meant = fields[key]
        kind = meant.type.name
        if meant.type == types.ARRAY:
            kind = f"ARRAY[{(meant.sub_type or types.get_type(meant.value[0])).name}]"
        if file.kind(key) != kind:
            yield f"{key}: type {file.kind(key)}, meant {kind}"
        elif not _same(file.value(key), meant.value, kind):
            yield f"{key}: another value"


def _same(found: Any, meant: Any, kind: str) -> bool:
    if "FLOAT32" in kind:
        pair = torch.tensor([found, meant], dtype=torch.float32)
        return bool(torch.equal(pair[0], pair[1]))
    return bool(found == (list(meant) if kind.startswith("ARRAY") else meant))


def _tensor_differences(file: GgufFile, tensors: Sequence[PlannedTensor], written: Written) -> Iterable[str]:
    names = {tensor.name for tensor in tensors}
    yield from (f"{name}: not written by us" for name in sorted(file.tensors.keys() - names))
    for tensor in tensors:
        found = file.tensors.get(tensor.name)
        if found is None:
            yield f"{tensor.name}: missing"
        elif (found.shape, found.kind) != (tensor.shape, tensor.kind):
            yield f"{tensor.name}: {found.kind} {list(found.shape)}, meant {tensor.kind} {list(tensor.shape)}"
        elif found.start != written.starts[tensor.name]:
            yield f"{tensor.name}: begins at byte {found.start}, written at byte {written.starts[tensor.name]}"


def file_bits_per_value(tensors: Sequence[PlannedTensor]) -> float:
    """Bits that a value of the file takes on average."""
    bits = sum(
        tensor.num_values * 8 * STORAGE_TYPES[tensor.kind].bytes / STORAGE_TYPES[tensor.kind].block
        for tensor in tensors
    )
    return bits / sum(tensor.num_values for tensor in tensors)
