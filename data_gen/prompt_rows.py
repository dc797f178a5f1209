"""Rows of prompt files: JSON lines, and the fault of a row that cannot be read.

A faulty row is yielded as a :class:`RowRejectedError` in its columns' place, so that the reader goes on and the report
can count it. A file that cannot be read at all is a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflash2_train.config import ConfigError, PromptSourceConfig, absolute

MAX_LINE_BYTES = 16 << 20  # a longer line is junk, and is skipped without being held in memory

# Reasons for rejecting a row; they are keys of the report.
NOT_JSON = "not JSON"
NOT_OBJECT = "a line must hold a JSON object"
NOT_UTF8 = "not UTF-8"
TOO_LONG = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"


class RowRejectedError(ValueError):
    """One row that cannot be a prompt: ``reason`` is what the report counts, the text adds detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail}")
        self.reason = reason


Row = tuple[str, dict[str, Any] | RowRejectedError]  # place for error texts, columns


def source_files(source: PromptSourceConfig) -> list[Path]:
    """The files that ``path`` names, sorted.

    Raises:
        ConfigError: there is none.
    """
    path = absolute(source.path)
    files = sorted(path.parent.glob(path.name)) if set("*?[") & set(path.name) else [path]
    if not files:
        raise ConfigError(
            f"prompt source path={source.path!r}: no such file. Name a {source.kind} file; only a file's "
            "name may hold a pattern."
        )
    for file in files:
        if not file.is_file():
            wrong = "is a folder" if file.is_dir() else "No such file"
            raise ConfigError(f"prompt source path={source.path!r}: {wrong}. Name a {source.kind} file.")
    return files


def read_lines(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file; blank lines are no rows.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield from _parse_lines(file, path.name)
    except OSError as error:
        raise ConfigError(f"prompt source {path}: {error.strerror}. Name a readable JSONL file.") from error


def _parse_lines(file: BinaryIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(_bounded_lines(file), start=1):
        place = f"{name}:{number}"
        if line is None:
            yield place, RowRejectedError(TOO_LONG)
        elif line.strip():
            yield place, _parse_line(line)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines; None for one beyond the limit, whose rest is read and dropped piece by piece."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if line.endswith(b"\n") or len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while (piece := file.readline(MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
            pass
        yield None


def _parse_line(line: bytes) -> dict[str, Any] | RowRejectedError:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return RowRejectedError(NOT_UTF8, f" ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:  # a RecursionError is thousands of opened brackets
        return RowRejectedError(NOT_JSON, f" ({error})")
    if not isinstance(row, dict):
        return RowRejectedError(NOT_OBJECT, f", not a {type(row).__name__}")
    return row
