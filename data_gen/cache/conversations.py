"""Conversations on disk: ``conversations/manifest.json`` and Parquet shards written through ``datasets``.

A row is one answer to one prompt, with prompt and completion *ids* as the engine returned them, why it ended, every
sampling field and its seed, and the target that wrote it. Text is kept for reading only and is never tokenised again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data_gen.cache.format import MANIFEST_FILE, CacheIntegrityError, read_json_object, refuse_differences
from dflash2_train.provenance import atomic_write_json, publish, sha256_json

FORMAT_VERSION = 1
CONVERSATIONS = "conversations"


class ConversationStore:
    """The ``conversations`` folder: manifest and Parquet shards."""

    def __init__(self, root: Path) -> None:
        self.folder = root / CONVERSATIONS

    def open(self, content: dict[str, Any]) -> None:
        """Create the folder, or check that it was made with the same settings.

        Raises:
            CacheIntegrityError: it was not; the differences are listed.
        """
        path = self.folder / MANIFEST_FILE
        if path.exists():
            refuse_differences(path, read_json_object(path).get("content", {}), content, "conversations")
            for leftover in self.folder.glob(".*.tmp"):
                leftover.unlink()
            return
        if any(self.folder.glob("shard-*.parquet")):
            raise CacheIntegrityError(
                f"{self.folder} holds shards but no {MANIFEST_FILE}. Restore it or use another data.root."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"format_version": FORMAT_VERSION, "fingerprint": sha256_json(content), "content": content}
        atomic_write_json(path, record)

    def content(self) -> dict[str, Any]:
        """Settings of the conversations on disk."""
        content: dict[str, Any] = read_json_object(self.folder / MANIFEST_FILE)["content"]
        return content

    def shards(self) -> list[int]:
        """Numbers of the shards on disk."""
        return sorted(int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.parquet"))

    def path(self, index: int) -> Path:
        """File of one shard."""
        return self.folder / f"shard-{index:05d}.parquet"

    def read(self, index: int, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Rows of one shard.

        Raises:
            CacheIntegrityError: the file is no whole Parquet file.
        """
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]

        try:
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(self.path(index), columns=columns).to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise CacheIntegrityError(
                f"{self.path(index)}: not a whole Parquet file ({error}). Remove it and run stage=regenerate again."
            ) from error
        return rows

    def write(self, index: int, rows: list[dict[str, Any]]) -> None:
        """Store rows as shard ``index``, whole or not at all."""
        import datasets

        datasets.disable_progress_bars()
        path = self.path(index)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            table = datasets.Dataset.from_list(rows, features=_features())
            with open(temporary, "wb") as file:
                table.to_parquet(file)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _features() -> Any:
    from datasets import Features, List, Value

    text, number, real = Value("string"), Value("int64"), Value("float64")
    return Features(
        {
            "row_id": text,
            "prompt_id": text,
            "repeat": number,
            "messages": text,  # JSON
            "source": text,
            "license": text,
            "prompt_ids": List(Value("int32")),
            "completion_ids": List(Value("int32")),
            "completion_text": text,  # for reading; ids are what counts
            "finish_reason": text,
            "dropped": text,  # reason for leaving the row out of the capture, or empty
            "seed": number,
            "temperature": real,
            "top_p": real,
            "top_k": number,
            "min_p": real,
            "presence_penalty": real,
            "frequency_penalty": real,
            "repetition_penalty": real,
            "max_tokens": number,
            "stop_ids": List(Value("int32")),
            "target": text,
            "revision": text,
            "target_hash": text,
            "enable_thinking": Value("bool"),
        }
    )
