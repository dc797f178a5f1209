"""Rows of a prompt source, and the messages of a row.

What cannot be read at all (file, JSON, column) is a ConfigError with file and line. What is wrong with the
content of one row is a :class:`RowRejectedError`, whose text is the reason that the report counts.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_gen.overlap import Message
from dflash2_train.config import ConfigError, PromptSourceConfig, absolute

SOURCE_KINDS = ("starter", "jsonl", "datasets")
STARTER_SPLITS = ("train", "holdout")
ROLES = ("system", "user", "assistant")

# Reasons for rejecting a row; they are keys of the report.
NO_MESSAGES = "no messages"
NOT_TEXT = "content is not text"
EMPTY_CONTENT = "empty content"
UNKNOWN_ROLE = "unknown role"
NO_USER_END = "does not end in a user turn"

Row = tuple[str, dict[str, Any]]  # place for error texts, columns


class RowRejectedError(ValueError):
    """One row that cannot be a prompt; the text is the reason."""


def check_source(source: PromptSourceConfig, key: str) -> None:
    """Raise ConfigError for the first field of a source that cannot be right; ``key`` names the source."""

    def require(condition: bool, name: str, rule: str, next_step: str) -> None:
        if not condition:
            raise ConfigError(f"{key}.{name}={getattr(source, name)!r}: {rule}. {next_step}")

    starter = source.kind == "starter"
    require(source.kind in SOURCE_KINDS, "kind", f"must be one of {SOURCE_KINDS}", "Pick one.")
    require(not starter or source.split in STARTER_SPLITS, "split", f"must be one of {STARTER_SPLITS}", "Pick one.")
    require(starter or source.path != "", "path", f"a {source.kind} source needs one", "Name the file or data set.")
    require(
        source.kind != "datasets" or source.split != "", "split", "a datasets source needs one", "Name it, as in train."
    )
    require(
        source.max_prompts is None or source.max_prompts > 0,
        "max_prompts",
        "must be positive",
        "Leave it null for all rows.",
    )


def source_label(source: PromptSourceConfig) -> str:
    """Short name of a source; of a local path the last part only, since reports are published."""
    if source.kind == "starter":
        return f"starter {source.split}"
    local = source.kind == "jsonl" or Path(source.path).expanduser().exists()
    name = Path(source.path).name if local else source.path
    return " ".join(part for part in (name, source.subset, source.split, source.revision) if part)


def read_rows(source: PromptSourceConfig) -> Iterator[Row]:
    """Every row of a source, in its own order.

    Raises:
        ConfigError: the source, or a line of it, cannot be read.
    """
    if source.kind == "starter":
        resource = importlib.resources.files("data_gen.prompt_sets") / f"starter_{source.split}.jsonl"
        with resource.open("rb") as file:
            yield from _read_lines(file, resource.name)
    elif source.kind == "jsonl":
        try:
            file = open(absolute(source.path), "rb")
        except OSError as error:
            raise ConfigError(f"prompt source path={source.path!r}: {error.strerror}. Name a JSONL file.") from error
        with file:
            yield from _read_lines(file, source.path)
    else:
        yield from _read_dataset(source)


def messages_of(row: dict[str, Any], source: PromptSourceConfig, place: str) -> list[Message]:
    """The conversation of a row, ending in a user turn, with role and content alone.

    Raises:
        ConfigError: the row lacks the configured column.
        RowRejectedError: the content cannot be a prompt.
    """
    column = source.prompt_column or source.messages_column
    if column not in row:
        key = "prompt_column" if source.prompt_column else "messages_column"
        raise ConfigError(
            f"{place}: no column {column!r}, which {key} names. Set {key} to one of {', '.join(sorted(row)) or 'none'}."
        )
    if source.prompt_column:
        return [{"role": "user", "content": _content(row[column])}]
    turns = row[column]
    if not isinstance(turns, list) or not turns:
        raise RowRejectedError(NO_MESSAGES)
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            raise RowRejectedError(UNKNOWN_ROLE)
        messages.append({"role": str(turn["role"]), "content": _content(turn.get("content"))})
    if messages[-1]["role"] != "user":
        raise RowRejectedError(NO_USER_END)
    return messages


def _content(value: object) -> str:
    if not isinstance(value, str):
        raise RowRejectedError(NOT_TEXT)
    if not value.strip():
        raise RowRejectedError(EMPTY_CONTENT)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer takes
        raise RowRejectedError(NOT_TEXT) from error
    return value


def _read_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Rows of a JSONL file; blank lines are no rows."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # also text that is not UTF-8
            raise ConfigError(f"{place}: not JSON ({error}). Repair or delete the line.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: a line must hold a JSON object, not a {type(row).__name__}. Repair the line.")
        yield place, row


def _read_dataset(source: PromptSourceConfig) -> Iterator[Row]:
    """Rows of a Hub data set or of a local folder of data files, streamed."""
    import datasets  # heavy; only this kind of source needs it

    local = Path(source.path).expanduser()
    try:
        rows = datasets.load_dataset(
            str(local.resolve()) if local.exists() else source.path,
            name=source.subset,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        for number, row in enumerate(rows):
            yield f"{source_label(source)} row {number}", dict(row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"prompt source path={source.path!r} split={source.split!r}: cannot be read ({first}). "
            "Check path, subset, split, revision and the connection."
        ) from error
