"""Capture into a cache by several processes of one machine, started by the command itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from data_gen.cache.conversations import ConversationStore
from data_gen.cli import gen_data
from dflash2_train.config import RunConfig
from dflash2_train.launching.environment import module_command
from dflash2_train.launching.shards import run_shards
from tests.unit.test_capture import config, contents, folder, write_conversations  # noqa: F401 - fixtures


def settings(config: RunConfig, root: Path, workers: int) -> RunConfig:  # noqa: F811
    """The stage with so many workers, into ``root``, where four shards of conversations lie."""
    data = dataclasses.replace(config.data, root=str(root / "data"), max_num_seqs=1)
    launch = dataclasses.replace(config.launch, ranks=workers)
    changed = dataclasses.replace(config, stage="capture", run_dir=str(root), data=data, launch=launch)
    write_conversations(changed, rows=7)
    return changed


def capture(config: RunConfig) -> int:  # noqa: F811
    """The command's exit code."""
    return run_shards("dflash2-gen-data", gen_data, module_command("data_gen.cli", ["--as-member"]), config)


def test_two_workers_write_what_one_writes(config: RunConfig, tmp_path: Path) -> None:  # noqa: F811
    one, two = (settings(config, tmp_path / str(workers), workers) for workers in (1, 2))
    assert [capture(one), capture(two)] == [0, 0]
    logs = sorted(path.name for path in (tmp_path / "2" / "logs" / "gen-data").glob("shard*"))
    assert logs == ["shard0", "shard1"]
    assert contents(two) == contents(one)
    assert len(contents(one)) == 4


def test_a_worker_that_dies_ends_the_stage_with_its_cause_and_the_others_write_their_share(
    config: RunConfig,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    two = settings(config, tmp_path, 2)
    store = ConversationStore(Path(two.data.root))
    rows = store.read(1)
    store.path(1).unlink()
    store.write(1, [{**row, "completion_ids": []} for row in rows])  # which kills the worker that meets it
    assert capture(two) not in (0, 143)
    error = capfd.readouterr().err
    assert "error: shard 1 of 2 failed" in error
    assert "no completion" in error
    assert sorted(contents(two)) == ["shard-00000.safetensors", "shard-00002.safetensors"]
