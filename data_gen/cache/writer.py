"""Write capture shards so that a crash at any moment leaves whole shards and nothing else under a final name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_gen.cache.format import (
    INDEX_FILE,
    MANIFEST_FILE,
    TOKEN_TENSORS,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    IndexRow,
    ShardRow,
    refuse_differences,
    shard_index,
    shard_name,
)
from dflash2_train.provenance import atomic_write_json, atomic_write_text, publish, sha256_file

DTYPES = {
    "input_ids": torch.int32,
    "loss_mask": torch.bool,
    "tap_hidden": torch.bfloat16,
    "teacher_ids": torch.int32,
    "teacher_logprobs": torch.float16,
    "teacher_log_normaliser": torch.float32,
}


def check_sample(sample: CapturedSample, manifest: CaptureManifest) -> None:
    """Refuse a sample that does not have the shapes, dtypes or tokens that the manifest promises.

    Raises:
        CacheIntegrityError: names the sample and the tensor.
    """
    length = len(sample)
    width = len(manifest.content["target_layer_ids"]) * manifest.content["hidden_size"]
    top_k = manifest.content["teacher_top_k"]
    shapes = {
        "input_ids": (length,),
        "loss_mask": (length,),
        "tap_hidden": (length, width),
        "teacher_ids": (length, top_k),
        "teacher_logprobs": (length, top_k),
        "teacher_log_normaliser": (length,),
    }
    for name, shape in shapes.items():
        tensor: Tensor = getattr(sample, name)
        if tuple(tensor.shape) != shape or tensor.dtype != DTYPES[name]:
            raise CacheIntegrityError(
                f"sample {sample.sample_id}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {DTYPES[name]} {list(shape)}. The capture backend is at fault; do not use its output."
            )
    if length == 0 or not bool(sample.loss_mask.any()):
        raise CacheIntegrityError(
            f"sample {sample.sample_id}: no supervised token, so nothing could be learnt from it."
        )
    if not bool(torch.isfinite(sample.tap_hidden).all()):
        raise CacheIntegrityError(f"sample {sample.sample_id}: tap_hidden holds values that are not finite.")


def content_digest(tensors: dict[str, Tensor]) -> str:
    """Hex sha256 over names, shapes and raw bytes; kept in the shard's own header, so that the index can be rebuilt."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class CaptureWriter:
    """Creates or continues the cache under ``root``.

    Raises:
        CacheIntegrityError: ``root`` holds a cache of other settings; the differences are listed.
    """

    def __init__(self, root: Path, manifest: CaptureManifest) -> None:
        self.root, self.manifest = root, manifest
        path = root / MANIFEST_FILE
        if path.exists():
            stored = CaptureManifest.read(path)
            refuse_differences(path, stored.content, manifest.content, "states")
        elif any(root.glob("shard-*.safetensors")):
            raise CacheIntegrityError(
                f"{root} holds shards but no {MANIFEST_FILE}. Restore it or choose another data.root."
            )
        else:
            root.mkdir(parents=True, exist_ok=True)
            atomic_write_json(path, manifest.to_dict())
        self._shards, self._samples = self._open_index()

    def existing_shards(self) -> set[int]:
        """Numbers of the shards that are on disk, whole and in the index. Others are removed, to be made again."""
        return {shard_index(name) for name in self._shards}

    def sample_ids(self, index: int) -> list[str]:
        """Samples of an existing shard, in order."""
        name = shard_name(index)
        return [row.sample_id for row in self._samples if row.shard == name]

    def write_shard(self, index: int, samples: Sequence[CapturedSample]) -> ShardRow:
        """Store one group of samples as shard ``index``; it exists afterwards as a whole, or not at all."""
        for sample in samples:
            check_sample(sample, self.manifest)
        path = self.root / shard_name(index)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        tensors = _concatenate(samples)
        metadata = {"sample_ids": json.dumps([sample.sample_id for sample in samples])}
        metadata["content_sha256"] = content_digest(tensors)
        try:
            save_file(tensors, temporary, metadata=metadata)
            checksum = sha256_file(temporary)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        shard = ShardRow(shard=path.name, num_samples=len(samples), num_bytes=path.stat().st_size, sha256=checksum)
        rows = [_index_row(sample, path.name, row) for row, sample in enumerate(samples)]
        append_index(self.root / INDEX_FILE, shard, rows)
        self._shards[shard.shard] = shard
        self._samples += rows
        return shard

    def _open_index(self) -> tuple[dict[str, ShardRow], list[IndexRow]]:
        """Match index and files: rebuild lines that a crash lost, drop shards whose bytes are not what was written."""
        for leftover in self.root.glob(".*.tmp"):
            leftover.unlink()
        shards, rows = read_index(self.root)
        on_disk = {path.name for path in self.root.glob("shard-*.safetensors")}
        for name in sorted(on_disk):
            known = shards.get(name)
            if known is not None and sha256_file(self.root / name) == known.sha256:
                continue
            rows = [row for row in rows if row.shard != name]
            shards.pop(name, None)
            try:
                shard, found = index_of_shard(self.root / name)
            except CacheIntegrityError:
                (self.root / name).rename(self.root / f"damaged-{name}")
                continue
            shards[name] = shard
            rows += found
        shards = {name: shard for name, shard in shards.items() if (self.root / name).exists()}
        rows = [row for row in rows if row.shard in shards]
        write_index(self.root / INDEX_FILE, shards.values(), rows)
        return shards, rows


def _concatenate(samples: Sequence[CapturedSample]) -> dict[str, Tensor]:
    """Shard tensors [N, ...] of the samples in order, and their offsets."""
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]).contiguous() for name in TOKEN_TENSORS}
    tensors["loss_mask"] = tensors["loss_mask"].to(torch.uint8)
    lengths = torch.tensor([0, *(len(sample) for sample in samples)], dtype=torch.int64)
    tensors["offsets"] = lengths.cumsum(0)
    return tensors


def _index_row(sample: CapturedSample, shard: str, row: int) -> IndexRow:
    supervised = int(sample.loss_mask.sum())
    return IndexRow(sample_id=sample.sample_id, shard=shard, row=row, num_tokens=len(sample), num_supervised=supervised)


def index_of_shard(path: Path) -> tuple[ShardRow, list[IndexRow]]:
    """Index lines of a shard from the shard alone.

    Raises:
        CacheIntegrityError: the file is cut, empty, or its bytes are not those that were written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CacheIntegrityError(
            f"{path}: not a whole safetensors file ({error}). Capture this shard again."
        ) from error
    if {*TOKEN_TENSORS, "offsets"} != set(tensors) or metadata.get("content_sha256") != content_digest(tensors):
        raise CacheIntegrityError(f"{path}: its bytes are not those that were written. Capture this shard again.")
    offsets = tensors["offsets"].tolist()
    rows = [
        IndexRow(
            sample_id=sample_id,
            shard=path.name,
            row=row,
            num_tokens=offsets[row + 1] - offsets[row],
            num_supervised=int(tensors["loss_mask"][offsets[row] : offsets[row + 1]].sum()),
        )
        for row, sample_id in enumerate(json.loads(metadata["sample_ids"]))
    ]
    shard = ShardRow(shard=path.name, num_samples=len(rows), num_bytes=path.stat().st_size, sha256=sha256_file(path))
    return shard, rows


def _lines(shard: ShardRow, rows: Iterable[IndexRow]) -> str:
    records = [{"kind": "shard", **asdict(shard)}, *({"kind": "sample", **asdict(row)} for row in rows)]
    return "".join(json.dumps(record) + "\n" for record in records)


def append_index(path: Path, shard: ShardRow, rows: Sequence[IndexRow]) -> None:
    """Add a shard's lines with one write, flushed to the disk."""
    with open(path, "ab") as file:
        file.write(_lines(shard, rows).encode())
        file.flush()
        os.fsync(file.fileno())


def write_index(path: Path, shards: Iterable[ShardRow], rows: Sequence[IndexRow]) -> None:
    """Replace the whole index, shards and rows in order."""
    ordered = sorted(shards, key=lambda shard: shard.shard)
    parts = [
        _lines(shard, sorted((row for row in rows if row.shard == shard.shard), key=lambda row: row.row))
        for shard in ordered
    ]
    atomic_write_text(path, "".join(parts))


def read_index(root: Path) -> tuple[dict[str, ShardRow], list[IndexRow]]:
    """Shards and samples of the index file; a shard whose lines are not all there is left out.

    A torn last line, which a crash while appending can leave, counts as not there.
    """
    path = root / INDEX_FILE
    shards: dict[str, ShardRow] = {}
    rows: dict[tuple[str, int], IndexRow] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "shard":
                shards[record["shard"]] = ShardRow(**record)
            else:
                rows[record["shard"], record["row"]] = IndexRow(**record)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a line that a crash cut and a later append completed; its shard is incomplete below
    whole = {
        name: shard for name, shard in shards.items() if all((name, row) in rows for row in range(shard.num_samples))
    }
    kept = [rows[name, row] for name, shard in sorted(whole.items()) for row in range(shard.num_samples)]
    return whole, kept
