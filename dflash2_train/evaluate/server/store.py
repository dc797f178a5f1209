"""A run's folder: finished measurements that a rerun takes over, raw records, results that are never overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash2_train.config import ConfigError
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.runs import Cell
from dflash2_train.evaluate.server.workload import RequestRecord
from dflash2_train.evaluate.tasks import Task
from dflash2_train.provenance import atomic_write_json, atomic_write_text, sha256_file, sha256_json

REPORT_NAME = "report.json"
PASSING_KEYS = ("warm_up", "tries", "timeout_s", "flags")  # of a protocol: they shape no figure, or only in words


def check_folder(folder: Path, protocol: dict[str, Any]) -> None:
    """Refuse to replace a result that was measured under other conditions.

    Raises:
        ConfigError: the label's folder holds such a one.
    """
    path = folder / REPORT_NAME
    if not path.is_file():
        return
    found = read_run(path).protocol
    changed = [key for key in protocol if key not in PASSING_KEYS and found.get(key) != protocol[key]]
    if changed:
        listed = ", ".join(f"{key} {found.get(key)!r} -> {protocol[key]!r}" for key in changed)
        raise ConfigError(
            f"eval.server.label={folder.name!r}: {path} holds a result under other conditions ({listed}). Name another "
            "label or another eval.output_dir, or remove that folder."
        )


class Store:
    """Finished measurements on disk, valid for one server process and one protocol.

    A server cannot be asked which drafter it loaded, so another process is another server. Where the start time is not
    told, nothing is taken over.
    """

    def __init__(self, folder: Path, protocol: dict[str, Any], url: str, started: float | None) -> None:
        self._folder, self._started = folder, started
        self._covered = {"protocol": protocol, "url": url, "started": started}

    def load(self, task: Task, concurrency: int) -> Cell | None:
        """The measurement, if it was finished under the same conditions."""
        path = self._path(task, concurrency)
        if self._started is None or not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        return Cell.from_json(value["cell"]) if value["fingerprint"] == self._fingerprint(task, concurrency) else None

    def save(self, task: Task, concurrency: int, cell: Cell, records: Sequence[RequestRecord]) -> None:
        """Write the raw records, then the cell, each whole or not at all."""
        lines = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        raw = self._folder / f"requests-{_file_name(task, concurrency)}.jsonl"
        atomic_write_text(raw, lines)
        value = {
            "fingerprint": self._fingerprint(task, concurrency),
            "requests_file": raw.name,
            "requests_sha256": sha256_file(raw),
            "cell": asdict(cell),
        }
        atomic_write_json(self._path(task, concurrency), value)

    def _path(self, task: Task, concurrency: int) -> Path:
        return self._folder / "cells" / f"{_file_name(task, concurrency)}.json"

    def _fingerprint(self, task: Task, concurrency: int) -> str:
        return sha256_json(
            {
                **self._covered,
                "task": task.name,
                "category": task.category,
                "concurrency": concurrency,
                "prompts": task.prompts_sha256,
            }
        )


def _file_name(task: Task, concurrency: int) -> str:
    parts = [part for part in (task.name, task.category) if part]
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', '-'.join(parts))}-c{concurrency}"
