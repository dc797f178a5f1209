"""One shard file: samples in, the same samples out, and proof that the bytes are those that were written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_gen.cache import fp8
from data_gen.cache.format import (
    FLOAT8,
    TAP_SCALE,
    TOKEN_TENSORS,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    ShardRow,
)
from dflash2_train.config import ConfigError, UserError
from dflash2_train.provenance import fsync_path, safetensors_header

DTYPES = {
    "input_ids": torch.int32,
    "loss_mask": torch.bool,
    "tap_hidden": torch.bfloat16,
    "teacher_ids": torch.int32,
    "teacher_logprobs": torch.float16,
    "teacher_log_normaliser": torch.float32,
}
# Keys of a header under which the digest of the tensors stands, newest first. Damage is what they are for: xxHash runs
# at memory speed, where sha256 would bound writing and verifying on most machines.
DIGESTS: dict[str, Callable[[], Any]] = {"content_xxh3_128": xxhash.xxh3_128, "content_sha256": hashlib.sha256}
DIGEST_BYTES = 64 << 20  # hashed between two signs of life
FOREIGN_LEFTOVER_S = 86_400.0  # after so long another machine's temporary file is nobody's


def _ignore(_: int) -> None:
    """No progress wanted."""


def check_sample(sample: CapturedSample, manifest: CaptureManifest) -> None:
    """Refuse a sample that does not have the shapes, dtypes or tokens that the manifest promises.

    Raises:
        CacheIntegrityError: names the sample and the tensor.
    """
    length = len(sample)
    top_k = manifest.content["teacher_top_k"]
    shapes = {
        "input_ids": (length,),
        "loss_mask": (length,),
        "tap_hidden": (length, manifest.tap_width),
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
    if not bool(torch.isfinite(fp8.largest_magnitudes(sample.tap_hidden, manifest.num_taps)).all()):
        raise CacheIntegrityError(f"sample {sample.sample_id}: tap_hidden holds values that are not finite.")


def content_digest(
    tensors: dict[str, Tensor], algorithm: str = next(iter(DIGESTS)), on_bytes: Callable[[int], None] = _ignore
) -> str:
    """Hex digest over names, dtypes, shapes and raw bytes.

    Args:
        tensors: of a shard, all of them.
        algorithm: a key of ``DIGESTS``.
        on_bytes: called with the bytes hashed since the last call.
    """
    digest = DIGESTS[algorithm]()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.view(torch.uint8).flatten().numpy().data
        for start in range(0, len(data), DIGEST_BYTES):
            piece = data[start : start + DIGEST_BYTES]
            digest.update(piece)
            on_bytes(len(piece))
    return str(digest.hexdigest())


def write_shard_file(path: Path, samples: Sequence[CapturedSample], manifest: CaptureManifest) -> ShardRow:
    """Store samples as the shard ``path``: whole or not at all, and never over another file.

    Of two writers of one shard the first to finish wins; the second's work is dropped if the file holds the same
    samples.

    Args:
        path: file name; its folder is there.
        samples: in order, at least one.
        manifest: of the cache; decides how tap states are stored.

    Returns:
        The index line of the file that is now there.

    Raises:
        CacheIntegrityError: a sample breaks the format, or the name is taken by a shard of other samples.
        UserError: the disk is full or refuses the file; nothing half-written stays.
    """
    for sample in samples:
        check_sample(sample, manifest)
    tensors = _concatenate(samples, manifest)
    algorithm = next(iter(DIGESTS))
    sample_ids = [sample.sample_id for sample in samples]
    metadata = {"sample_ids": json.dumps(sample_ids), algorithm: content_digest(tensors)}
    temporary = _temporary(path)
    try:
        save_file(tensors, temporary, metadata=metadata)
        _publish_new(temporary, path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: could not be written ({error}). Nothing half-written stays. Free space on this disk, or mend "
            "what the message says (the file system must have hard links), and run the same command again."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    row = ShardReader(path, manifest).row()
    if row.sample_ids != sample_ids:
        raise CacheIntegrityError(
            f"{path}: another writer stored other samples under this name meanwhile. Two commands with different "
            "prompts or settings write to one data.root: stop one, and run stage=verify."
        )
    return row


def _concatenate(samples: Sequence[CapturedSample], manifest: CaptureManifest) -> dict[str, Tensor]:
    """Shard tensors [N, ...] of the samples in order, and their offsets."""
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]).contiguous() for name in TOKEN_TENSORS}
    tensors["loss_mask"] = tensors["loss_mask"].to(torch.uint8)
    lengths = torch.tensor([0, *(len(sample) for sample in samples)], dtype=torch.int64)
    tensors["offsets"] = lengths.cumsum(0)
    if manifest.cache_dtype == FLOAT8:
        try:
            tensors["tap_hidden"], tensors[TAP_SCALE] = fp8.encode(tensors["tap_hidden"], manifest.num_taps)
        except ValueError as error:
            raise CacheIntegrityError(f"samples from {samples[0].sample_id} on: {error}.") from error
    return tensors


def _temporary(path: Path) -> Path:
    """A name that no other writer uses, and that tells whose it is."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _publish_new(temporary: Path, path: Path) -> None:
    """Make ``temporary`` visible as ``path`` unless that is there; a link, unlike a rename, replaces nothing."""
    fsync_path(temporary)
    with suppress(FileExistsError):
        os.link(temporary, path)
    fsync_path(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files of writers that are gone; those of living ones, here or elsewhere, stay."""
    for path in folder.glob(".shard-*.tmp"):
        owner, *rest = path.name.rsplit(".", 3)
        gone = False
        if len(rest) == 3 and rest[0].isdecimal() and owner.endswith(f".{socket.gethostname()}"):
            gone = not Path(f"/proc/{rest[0]}").exists()
        else:
            with suppress(FileNotFoundError):
                gone = time.time() - path.stat().st_mtime > FOREIGN_LEFTOVER_S
        if gone:
            path.unlink(missing_ok=True)


def is_whole(path: Path, manifest: CaptureManifest) -> bool:
    """Can ``path`` be opened as a shard of this cache? Its bytes are not compared."""
    try:
        ShardReader(path, manifest)
    except CacheIntegrityError:
        return False
    return True


class ShardReader:
    """One shard, mapped from disk. Its tensors are views of the page cache: reading copies nothing.

    Safe to share between threads and with forked processes. A mapping lives as long as a tensor of it; do not write
    into them (a write changes this process's view alone, never the file). A file that is cut while it is mapped kills
    the process that reads beyond its end; nothing here ever cuts one, a faulty shard is moved.

    Args:
        path: the shard.
        manifest: of its cache.

    Raises:
        CacheIntegrityError: no whole shard of this cache: cut, empty, without its tensors, or of other shapes.
    """

    def __init__(self, path: Path, manifest: CaptureManifest) -> None:
        self.path, self.manifest = path, manifest
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.descriptor)
            header = safetensors_header(path)
            with safe_open(path, framework="pt") as file:
                self._metadata: dict[str, str] = file.metadata() or {}
                self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.sample_ids: list[str] = json.loads(self._metadata.get("sample_ids", "[]"))
        except (SafetensorError, ConfigError, OSError, ValueError) as error:
            raise self._damaged(f"not a whole safetensors file: {error}") from error
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        self._places = json.loads(header)
        self._data_start = 8 + len(header)
        self._check_layout()
        self._rows: list[tuple[Tensor, ...]] | None = None
        self.offsets: list[int] = self.tensors["offsets"].tolist()
        whole = self.offsets[0] == 0 and self.offsets[-1] == len(self.tensors["input_ids"])
        if not whole or not bool((self._lengths() > 0).all()):
            raise self._damaged("offsets that do not cut its tokens into samples")

    def __len__(self) -> int:
        return len(self.sample_ids)

    def span(self, row: int) -> slice:
        """Where sample ``row`` lies along the first dimension of ``tensors``."""
        return slice(self.offsets[row], self.offsets[row + 1])

    def read(self, row: int, states: Tensor | None = None) -> CapturedSample:
        """Sample ``row``: views of the file, except fp8 states, which are decoded to bf16.

        Args:
            row: place in the shard.
            states: [S, T*H] bf16; if given, the tap states are put there in one pass, whatever they are stored in.
        """
        ids, mask, taps, teacher_ids, logprobs, normaliser = self._cut()[row]
        if TAP_SCALE in self.tensors:
            taps = fp8.decode(taps, self.tensors[TAP_SCALE][self.span(row)], states)
        elif states is not None:
            taps = states.copy_(taps)  # faster than pread: no call, wider stores
        return CapturedSample(
            sample_id=self.sample_ids[row],
            input_ids=ids,
            loss_mask=mask,
            tap_hidden=taps,
            teacher_ids=teacher_ids,
            teacher_logprobs=logprobs,
            teacher_log_normaliser=normaliser,
        )

    def _cut(self) -> list[tuple[Tensor, ...]]:
        """The token tensors of every sample. Cut at the first read, all at once: a third of the time of slices."""
        if self._rows is None:
            lengths = self._lengths().tolist()
            columns = {name: self.tensors[name] for name in TOKEN_TENSORS}
            columns["loss_mask"] = columns["loss_mask"].view(torch.bool)
            self._rows = list(zip(*(column.split_with_sizes(lengths) for column in columns.values()), strict=True))
        return self._rows

    def _lengths(self) -> Tensor:
        """[n] int64, tokens of every sample."""
        return self.tensors["offsets"].diff()

    def state_bytes(self, row: int) -> tuple[int, int]:
        """Offset and length, in bytes of the file, of what sample ``row`` stores as tap states."""
        states = self.tensors["tap_hidden"]
        begin, end = (offset * states.shape[1] * states.element_size() for offset in self.offsets[row : row + 2])
        return self._data_start + int(self._places["tap_hidden"]["data_offsets"][0]) + begin, end - begin

    def row(self) -> ShardRow:
        """The shard's index line; reads no states."""
        supervised = np.add.reduceat(self.tensors["loss_mask"].numpy(), self.offsets[:-1], dtype=np.int64)
        return ShardRow(
            shard=self.path.name,
            num_bytes=os.fstat(self.descriptor).st_size,
            header_sha256=self.header_sha256,
            sample_ids=self.sample_ids,
            num_tokens=self._lengths().tolist(),
            num_supervised=supervised.tolist(),
        )

    def check_content(self, on_bytes: Callable[[int], None] = _ignore) -> None:
        """Compare every byte with the digest that was taken before it was written.

        Raises:
            CacheIntegrityError: they differ.
        """
        algorithm = next((name for name in DIGESTS if name in self._metadata), None)
        if algorithm is None:
            raise self._damaged("no digest in its header")
        if content_digest(self.tensors, algorithm, on_bytes) != self._metadata[algorithm]:
            raise self._damaged("its bytes are not those that were written")
        if TAP_SCALE in self.tensors and fp8.has_nan(self.tensors["tap_hidden"]):
            raise self._damaged("tap states that are not numbers")

    def _check_layout(self) -> None:
        """Names, dtypes and shapes, so that a slice of any sample is what the format says."""
        float8, content = self.manifest.cache_dtype == FLOAT8, self.manifest.content
        tokens = len(self.tensors.get("input_ids", ()))
        wanted: dict[str, tuple[torch.dtype, list[int]]] = {
            "input_ids": (torch.int32, [tokens]),
            "loss_mask": (torch.uint8, [tokens]),
            "tap_hidden": (torch.float8_e4m3fn if float8 else torch.bfloat16, [tokens, self.manifest.tap_width]),
            "teacher_ids": (torch.int32, [tokens, content["teacher_top_k"]]),
            "teacher_logprobs": (torch.float16, [tokens, content["teacher_top_k"]]),
            "teacher_log_normaliser": (torch.float32, [tokens]),
            "offsets": (torch.int64, [len(self.sample_ids) + 1]),
        }
        if float8:
            wanted[TAP_SCALE] = (torch.float32, [tokens, self.manifest.num_taps])
        found = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in self.tensors.items()}
        if found != wanted or not self.sample_ids:
            wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise self._damaged(f"not the tensors of this cache: {', '.join(wrong) or 'no sample'}")

    def _damaged(self, why: str) -> CacheIntegrityError:
        return CacheIntegrityError(
            f"{self.path}: damaged ({why}). Run dflash2-gen-data stage=verify data.store.quarantine=true, "
            "then stage=capture, which makes it again."
        )
