"""Writing one GGUF file, and holding the written file against what it was made from before it gets its name.

Header and keys go through the ``gguf`` package; the values of a tensor are read, encoded and appended a few rows at a
time, so memory does not grow with the drafter. Then the file is opened as any reader would open it: every key with its
type, every tensor's name, shape and storage type, and every value within what its type may lose.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

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
from dflash2_train.export.gguf_types import GgufError, encode, error_bound, gguf_package
from dflash2_train.provenance import publish


def write_gguf(
    path: Path,
    entries: dict[str, Entry],
    tensors: Sequence[PlannedTensor],
    add_tokenizer: Callable[[Any], None],
) -> None:
    """Write, check and publish a file; an earlier one of that name stays until the new one is whole.

    Args:
        path: final name.
        entries: whole key -> value, ``general.architecture`` and tokenizer excepted.
        tensors: in the order to write.
        add_tokenizer: gives the writer its tokenizer keys.

    Raises:
        GgufError: values that cannot be stored, or a written file that is not what was meant.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer = gguf_package().GGUFWriter(None, ARCHITECTURE)
    try:
        _add_entries(writer, entries)
        add_tokenizer(writer)
        for tensor in tensors:
            _announce(writer, tensor)
        _write(writer, temporary, tensors)
        check_written(temporary, writer.kv_data[0], tensors)
        publish(temporary, path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


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


def _write(writer: Any, path: Path, tensors: Iterable[PlannedTensor]) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    for tensor in tensors:
        writer.write_padding(file, file.tell())  # each tensor starts on a multiple of the alignment
        for rows in tensor.source.pieces():
            file.write(encode(rows, tensor.kind, tensor.published).data)  # tofile would hide a full disk's errno
    writer.write_padding(file, file.tell())
    writer.close()


def check_written(path: Path, fields: dict[str, Any], tensors: Sequence[PlannedTensor]) -> None:
    """Hold a file against the keys and tensors that it was to have.

    Args:
        path: the file.
        fields: key -> ``gguf.GGUFValue``, as the writer had them.
        tensors: the plan; the sources are read once more.

    Raises:
        GgufError: lists up to ten differences.
    """
    file = GgufFile(path)
    differences = chain(_key_differences(file, fields), _tensor_differences(file, tensors))
    found = [line for _, line in zip(range(10), differences, strict=False)]
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


def _tensor_differences(file: GgufFile, tensors: Sequence[PlannedTensor]) -> Iterable[str]:
    names = {tensor.name for tensor in tensors}
    yield from (f"{name}: not written by us" for name in sorted(file.tensors.keys() - names))
    for tensor in tensors:
        found = file.tensors.get(tensor.name)
        if found is None:
            yield f"{tensor.name}: missing"
        elif (found.shape, found.kind) != (tensor.shape, tensor.kind):
            yield f"{tensor.name}: {found.kind} {list(found.shape)}, meant {tensor.kind} {list(tensor.shape)}"
        else:
            yield from _value_differences(file, tensor)


def _value_differences(file: GgufFile, tensor: PlannedTensor) -> Iterable[str]:
    """At most one line: where a value lies further from its own than its type allows."""
    start = 0
    for stored, rows in zip(file.pieces(tensor.name), tensor.source.pieces(), strict=True):
        wrong = _outside(stored, rows, tensor.kind)
        if wrong is not None:
            yield f"{tensor.name}: row {start + wrong} is further from its values than {tensor.kind} allows"
            return
        start += len(rows)


def _outside(stored: Tensor, rows: Tensor, kind: str) -> int | None:
    """The first row of [n, m] that lies outside the bound of its type, or None."""
    error = (stored - rows.float()).abs()
    bad = ~(error <= error_bound(rows, kind)).all(-1)  # so that NaN counts as bad
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def file_bits_per_value(tensors: Sequence[PlannedTensor]) -> float:
    """Bits that a value of the file takes on average."""
    bits = sum(
        tensor.num_values * 8 * STORAGE_TYPES[tensor.kind].bytes / STORAGE_TYPES[tensor.kind].block
        for tensor in tensors
    )
    return bits / sum(tensor.num_values for tensor in tensors)
