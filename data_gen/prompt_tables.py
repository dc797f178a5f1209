"""Rows of prompt tables: CSV with a header line, and Parquet; read in pieces, never as a whole."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_gen.prompt_rows import NOT_UTF8, Row, RowRejectedError
from dflash2_train.config import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch  # type: ignore[import-untyped]

MAX_FIELD_CHARS = 16 << 20  # the csv module's own limit, 128 Ki, is less than a long prompt
BATCH_ROWS = 256

# Reasons for rejecting a row; they are keys of the report.
NOT_CSV = "not CSV"
FIELD_COUNT = "another number of fields than the header"


def read_csv(path: Path) -> Iterator[Row]:
    """Rows of a CSV file, every value as text; blank lines are no rows.

    Raises:
        ConfigError: the file cannot be read, or its header names a column twice.
    """
    csv.field_size_limit(MAX_FIELD_CHARS)
    try:
        # Bytes that are not UTF-8 become lone surrogates, which no prompt may hold: that row is rejected.
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(iter(lambda: file.readline(MAX_FIELD_CHARS), ""))
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ConfigError(f"prompt source {path}: its header {header} names a column twice. Rename one.")
            yield from _csv_rows(reader, header, path.name)
    except OSError as error:
        raise ConfigError(f"prompt source {path}: {error.strerror}. Name a readable CSV file.") from error
    except csv.Error as error:
        raise ConfigError(f"prompt source {path}: no CSV header ({error}). Name a CSV file.") from error


def _csv_rows(reader: Any, header: list[str], name: str) -> Iterator[Row]:
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{name}:{reader.line_num}", RowRejectedError(NOT_CSV, f" ({error})")
            continue
        if fields and len(fields) != len(header):
            detail = f": {len(fields)} instead of {len(header)}"
            yield f"{name}:{reader.line_num}", RowRejectedError(FIELD_COUNT, detail)
        elif fields:
            yield f"{name}:{reader.line_num}", dict(zip(header, fields, strict=True))


def read_parquet(path: Path, columns: Collection[str], needed: str) -> Iterator[Row]:
    """Rows of a Parquet file, with those of ``columns`` that it has.

    Raises:
        ConfigError: the file cannot be read, or lacks the column ``needed``.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if needed not in names:
                raise ConfigError(f"prompt source {path}: no column {needed!r}. Name one of {', '.join(names)}.")
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[name for name in names if name in columns]):
                for row in _batch_rows(batch):
                    yield f"{path.name} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"prompt source {path} row {number}: {first}. Name a whole Parquet file.") from error


def _batch_rows(batch: RecordBatch) -> list[dict[str, Any] | RowRejectedError]:
    """Rows of a batch; text that is not UTF-8 costs its own row only."""
    try:
        rows: list[dict[str, Any] | RowRejectedError] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_single_row(batch, index) for index in range(batch.num_rows)]
    return rows


def _single_row(batch: RecordBatch, index: int) -> dict[str, Any] | RowRejectedError:
    try:
        row: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowRejectedError(NOT_UTF8, f" ({error.reason})")
    return row
