"""Capture into a cache by several processes of one machine, started by the command itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from data_gen.cli import gen_data
from dflash2_train.config import RunConfig
from dflash2_train.launching.environment import module_command
from dflash2_train.launching.shards import run_shards
from tests.unit.test_capture import config, folder, write_conversations  # noqa: F401 - fixtures


def capture(settings: RunConfig, root: Path, workers: int) -> int:
    """The stage with so many workers, into ``root``; the exit code."""
    data = dataclasses.replace(settings.data, root=str(root / "data"))
    launch = dataclasses.replace(settings.launch, ranks=workers)
    here = dataclasses.replace(settings, stage="capture", run_dir=str(root), data=data, launch=launch)
    write_conversations(here, rows=7)
    return run_shards("dflash2-gen-data", gen_data, module_command("data_gen.cli", ["--as-member"]), here)


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "data" / "capture").glob("shard-*")}


def test_two_workers_write_what_one_writes(config: RunConfig, tmp_path: Path) -> None:  # noqa: F811
    assert [capture(config, tmp_path / str(workers), workers) for workers in (1, 2)] == [0, 0]
    logs = sorted(path.name for path in (tmp_path / "2" / "logs" / "gen-data").glob("shard*"))
    assert logs == ["shard0", "shard1"]
    assert shards(tmp_path / "2") == shards(tmp_path / "1")
    assert len(shards(tmp_path / "1")) == 4


def test_a_worker_that_dies_ends_the_stage_with_its_cause_and_the_others_keep_what_they_wrote(
    config: RunConfig,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "data" / "conversations" / "shard-00001.parquet"
    write = write_conversations

    def write_broken(settings: RunConfig, rows: int) -> None:
        write(settings, rows)
        broken.write_bytes(b"not Parquet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.write_conversations", write_broken)
        assert capture(config, tmp_path, 2) == 2
    assert "shard-00001.parquet" in capfd.readouterr().err
