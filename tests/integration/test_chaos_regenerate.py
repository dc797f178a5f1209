"""Whatever is killed, started twice or answers nonsense: every row once, and right (``tests.chaos.regenerate``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_gen import regenerate as stage
from data_gen.prepare import PreparedPrompts, prepare
from dflash2_train.config import RunConfig
from tests.chaos.regenerate import REAL_OPEN, chaos_config, killed_runs, stormy_servers

Prepared = tuple[RunConfig, PreparedPrompts]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    config = chaos_config(tmp_path_factory.mktemp("chaos"))
    return config, prepare(config)


@pytest.fixture(autouse=True)
def real_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "open_generator", REAL_OPEN)


@pytest.mark.parametrize("seed", range(7))
def test_a_stage_killed_at_random_moments_ends_with_every_row_once(
    prepared: Prepared, tmp_path: Path, seed: int
) -> None:
    killed_runs(prepared[1], prepared[0], tmp_path / "data", seed)


@pytest.mark.parametrize("seed", range(3))
def test_servers_that_die_hang_and_answer_garbage_end_with_every_row_once(
    prepared: Prepared, tmp_path: Path, seed: int
) -> None:
    assert stormy_servers(prepared[1], prepared[0], tmp_path / "data", seed) > 0


@pytest.mark.slow
def test_the_same_over_many_seeds(prepared: Prepared, tmp_path: Path) -> None:
    config, prompts = prepared
    kills = sum(killed_runs(prompts, config, tmp_path / f"killed-{seed}", seed) for seed in range(100, 250))
    assert kills > 150, "most runs were killed at least once"
    for seed in range(100, 150):
        stormy_servers(prompts, config, tmp_path / f"servers-{seed}", seed)
