"""Every start of a run leaves a record, and a later one lists what is no more as it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash2_train.config import RunConfig
from dflash2_train.run_records import last_attempt, write_run_record
from dflash2_train.run_state import Progress


def write(config: RunConfig, output: Path, *, attempt: int, world_size: int = 2) -> dict[str, Any]:
    data: Any = SimpleNamespace(manifest=SimpleNamespace(content={"target": "tiny"}))
    progress = Progress(attempt=attempt, run_id="tiny-1")
    write_run_record(config, output, data, progress, attested=None, deepspeed={}, world_size=world_size)
    name = "run.json" if attempt == 1 else f"run.attempt{attempt}.json"
    record: dict[str, Any] = json.loads((output / name).read_text())
    return record


def test_a_resume_lists_every_setting_that_is_no_more_as_at_the_first_start(
    tiny_config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert "changed" not in write(tiny_config, tmp_path, attempt=1)
    tiny_config.train.save_every, tiny_config.train.guard.end_margin_seconds = 7, 60.0
    record = write(tiny_config, tmp_path, attempt=2, world_size=1)
    assert record["changed"] == [
        "config.train.guard.end_margin_seconds: 300.0 -> 60.0",
        "config.train.save_every: 200 -> 7",
        "world_size: 2 -> 1",
    ]
    assert "changed since the first start: world_size: 2 -> 1" in caplog.text
    assert record["run_id"] == "tiny-1"


def test_a_resume_under_the_same_settings_lists_nothing(tiny_config: RunConfig, tmp_path: Path) -> None:
    write(tiny_config, tmp_path, attempt=1)
    assert write(tiny_config, tmp_path, attempt=2)["changed"] == []


def test_starts_that_saved_nothing_are_counted_too(tiny_config: RunConfig, tmp_path: Path) -> None:
    assert last_attempt(tmp_path) == 0
    write(tiny_config, tmp_path, attempt=1)
    assert last_attempt(tmp_path) == 1
    write(tiny_config, tmp_path, attempt=12)
    write(tiny_config, tmp_path, attempt=3)
    assert last_attempt(tmp_path) == 12
