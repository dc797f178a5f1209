"""What a capture cache looks like on disk: manifest, shard, index.

``capture/`` holds ``manifest.json`` (what shaped the content), ``shard-00000.safetensors`` and so on (N tokens of
n samples, one after the other), ``index.jsonl`` (one line a shard) and ``quarantine/`` (shards found damaged, each
with the reasons). Of a shard's tensors

===========================  ==============  ========  ====================================================
``input_ids``                [N]             int32     prompt and completion, as the engine saw them
``loss_mask``                [N]             uint8     1 on completion tokens
``tap_hidden``               [N, T*H]        bf16      residual stream after each tap, ascending along features;
                                                       e4m3 codes in a cache of ``cache_dtype`` float8_e4m3
``tap_scale``                [N, T]          float32   only with the codes: their factor, of a token's tap
``teacher_ids``              [N, k]          int32     the target's k most probable next tokens, descending
``teacher_logprobs``         [N, k]          float16   their log probability under the full softmax
``teacher_log_normaliser``   [N]             float32   raw logit = log probability + normaliser
``offsets``                  [n + 1]         int64     sample r is tokens offsets[r] to offsets[r + 1]
===========================  ==============  ========  ====================================================

row i of the teacher is the target's distribution of token i + 1. It is filled where token i or i + 1 is a completion
token; elsewhere ids are 0, log probabilities -inf, the normaliser 0.

A shard's header names its samples and holds a digest of its tensors; the index holds a digest of that header. So the
index can be rebuilt from the shards, and one pass over a shard proves it whole. A published shard is never opened for
writing again.

Letters: S tokens of a sample, T taps, H hidden size, k = teacher_top_k.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import UserError
from dflash2_train.provenance import sha256_json

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1: bf16 only, sha256 digests, and an index that is now rebuilt from the shards
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.jsonl"
TEACHER_NORM = "final norm applied once, then the output head"
BFLOAT16, FLOAT8 = "bfloat16", "float8_e4m3"  # values of ``cache_dtype``
TOKEN_TENSORS = (
    "input_ids",
    "loss_mask",
    "tap_hidden",
    "teacher_ids",
    "teacher_logprobs",
    "teacher_log_normaliser",
)
TAP_SCALE = "tap_scale"


class CacheIntegrityError(UserError, RuntimeError):
    """A cache, or a file of it, that must not be used."""


@dataclass(frozen=True, kw_only=True)
class CapturedSample:
    """One conversation with the target's states; shapes and dtypes in the module docstring, the mask as bool."""

    sample_id: str
    input_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] bool
    tap_hidden: Tensor  # [S, T*H] bf16
    teacher_ids: Tensor  # [S, k] int32
    teacher_logprobs: Tensor  # [S, k] float16
    teacher_log_normaliser: Tensor  # [S] float32

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """Where a sample lies and how long it is."""

    sample_id: str
    shard: str  # file name
    row: int  # place within the shard
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, kw_only=True)
class ShardRow:
    """A whole shard: its file and, sample by sample, what it holds."""

    shard: str  # file name
    num_bytes: int
    header_sha256: str  # of the file's header, which holds a digest of the tensors
    sample_ids: list[str] = field(repr=False)
    num_tokens: list[int] = field(repr=False)
    num_supervised: list[int] = field(repr=False)

    @property
    def num_samples(self) -> int:
        """Samples of the shard."""
        return len(self.sample_ids)

    def sample(self, row: int) -> IndexRow:
        """The index entry of one sample."""
        return IndexRow(
            sample_id=self.sample_ids[row],
            shard=self.shard,
            row=row,
            num_tokens=self.num_tokens[row],
            num_supervised=self.num_supervised[row],
        )


@dataclass(frozen=True, kw_only=True)
class CaptureManifest:
    """Everything that shapes the content of a cache, and its fingerprint."""

    content: dict[str, Any]
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over version and content."""
        return sha256_json({"format_version": self.format_version, "content": self.content})

    @property
    def cache_dtype(self) -> str:
        """How tap states are stored."""
        return str(self.content.get("cache_dtype", BFLOAT16))

    @property
    def num_taps(self) -> int:
        """T."""
        return len(self.content["target_layer_ids"])

    @property
    def tap_width(self) -> int:
        """T * H."""
        return self.num_taps * int(self.content["hidden_size"])

    def to_dict(self) -> dict[str, Any]:
        """As written to ``manifest.json``."""
        return {"format_version": self.format_version, "fingerprint": self.fingerprint, "content": self.content}

    @classmethod
    def read(cls, path: Path) -> CaptureManifest:
        """Load and check a manifest file.

        Raises:
            CacheIntegrityError: it is missing, not JSON, of another format version, or edited by hand.
        """
        stored = read_json_object(path)
        version = stored.get("format_version")
        if version not in READABLE_VERSIONS:
            raise CacheIntegrityError(
                f"{path}: format_version {version!r}, this program reads {READABLE_VERSIONS}. "
                "Use the version that wrote the cache, or capture again into another data.root."
            )
        manifest = cls(content=stored.get("content", {}), format_version=version)
        if stored.get("fingerprint") != manifest.fingerprint:
            raise CacheIntegrityError(
                f"{path}: content and fingerprint do not belong together, so it was edited or damaged. "
                "Restore it, or capture again into another data.root."
            )
        return manifest


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the cache.

    Raises:
        CacheIntegrityError: no file, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CacheIntegrityError(
            f"{path}: no such file, so there is no finished data here. Run dflash2-gen-data with this experiment first."
        ) from error
    except ValueError as error:
        raise CacheIntegrityError(f"{path}: not readable as JSON ({error}). Restore it or generate again.") from error
    if not isinstance(value, dict):
        raise CacheIntegrityError(
            f"{path}: holds a {type(value).__name__}, not an object. Restore it or generate again."
        )
    return value


def shard_name(index: int) -> str:
    """File name of capture shard ``index``."""
    return f"shard-{index:05d}.safetensors"


def shard_index(name: str) -> int:
    """Number of a shard from its file name."""
    return int(name.removeprefix("shard-").split(".")[0])


def list_differences(stored: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """``key: stored -> wanted`` for every value that differs; long lists are told by their length."""
    lines: list[str] = []
    for key in sorted(stored.keys() | wanted.keys()):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += list_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {_short(old)} -> {_short(new)}")
    return lines


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 16:
        return f"list of {len(value)}"
    return repr(value)


def refuse_differences(path: Path, stored: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Raise CacheIntegrityError with the list of differing fields, if any.

    Args:
        path: the manifest that holds ``stored``.
        stored: content on disk.
        wanted: content that the present configuration would make.
        what: names the data, as in ``conversations``.
    """
    lines = list_differences(stored, wanted)
    if lines:
        listed = "\n  ".join(lines)
        raise CacheIntegrityError(
            f"{path.parent} holds {what} made with other settings (stored -> now):\n  {listed}\n"
            "Set them back to continue it, or choose another data.root (or run_dir) for new data."
        )
