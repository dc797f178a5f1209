"""The rows of a prompt source, whatever kind it is."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_gen.prompt_rows import Row, read_lines, source_files
from data_gen.prompt_tables import read_csv, read_parquet
from dflash2_train.config import ConfigError, PromptSourceConfig

_COMMIT = re.compile(r"[0-9a-f]{40}")


def source_label(config: PromptSourceConfig) -> str:
    """Short name of a source; of a local path the last part only, since reports are published."""
    if config.name:
        return config.name
    if config.kind == "starter":
        return f"starter {config.split}"
    name = config.path if config.from_hub else Path(config.path).name
    return " ".join(part for part in (name, config.subset, config.split, config.revision) if part)


class PromptSource:
    """The rows of one configured source, streamed in their own order."""

    def __init__(self, config: PromptSourceConfig) -> None:
        self.config = config
        self.label = source_label(config)
        self.revision = config.revision  # of a Hub data set that is not pinned: known once reading began

    def columns(self) -> set[str]:
        """Columns that the configuration names, and those that rows may name their source and licence in."""
        config = self.config
        named = (self._main_column, config.system_column, config.tools_column, *config.where)
        return {name for name in named if name} | {"source", "license"}

    @property
    def _main_column(self) -> str:
        return self.config.prompt_column or self.config.messages_column

    def rows(self) -> Iterator[Row]:
        """Every row with its place.

        Raises:
            ConfigError: the source cannot be read.
        """
        config = self.config
        if config.kind == "starter":
            resource = importlib.resources.files("data_gen.prompt_sets") / f"starter_{config.split}.jsonl"
            with importlib.resources.as_file(resource) as path:
                yield from read_lines(path)
        elif config.kind == "datasets":
            yield from self._read_dataset()
        else:
            for path in source_files(config):
                if config.kind == "jsonl":
                    yield from read_lines(path)
                elif config.kind == "csv":
                    yield from read_csv(path)
                else:
                    yield from read_parquet(path, self.columns(), self._main_column)

    def _read_dataset(self) -> Iterator[Row]:
        """Rows of a Hub data set or of a local folder of data files."""
        import datasets  # heavy; only this kind of source needs it

        config = self.config
        local = Path(config.path).expanduser()
        options: dict[str, Any] = {"columns": list(config.fetch_columns)} if config.fetch_columns else {}
        try:
            builder = datasets.load_dataset_builder(
                str(local.resolve()) if local.exists() else config.path,
                name=config.subset,
                revision=config.revision,
                **options,
            )
            if config.from_hub and _COMMIT.fullmatch(str(builder.hash)):
                self.revision = str(builder.hash)
            for number, row in enumerate(builder.as_streaming_dataset(split=config.split)):
                yield f"{self.label} row {number}", dict(row)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"prompt source path={config.path!r} split={config.split!r}: cannot be read ({first}). "
                "Check path, subset, split, revision, the connection and, if it is gated, access and login."
            ) from error
