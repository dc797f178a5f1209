"""What several modules look at and none changes: a target with a cache, finished runs, a drafter that fits one text.

Tests give a training a folder of its own (:func:`tests.integration.trainings.variant`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash2_train.config import RunConfig
from tests.cases import tiny_run_config
from tests.integration.trainings import STEPS, run, variant
from tests.overfitted import Overfitted, overfit
from tests.tiny_target import save_tiny_llama, write_cache


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny target with a filled cache."""
    root = tmp_path_factory.mktemp("tiny")
    config = tiny_run_config(root)
    config.target.name = str(root / "target")
    config.target.dtype = "float32"
    config.data.teacher_top_k = 8
    config.data.attest.min_agreement = 0.05
    config.train.dtype = "float32"
    config.train.steps = STEPS
    config.train.row_tokens = 64
    config.train.rows = 2
    config.train.lr = 3e-3
    config.train.init_layers = []
    model = save_tiny_llama(root / "target", config)
    write_cache(model, config, samples=12, length=24)
    return config


@pytest.fixture(scope="session")
def straight(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run from the first step to the last."""
    config = variant(base, tmp_path_factory.mktemp("straight"))
    run(config)
    return config


@pytest.fixture(scope="session")
def on_two_ranks(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The same run on two ranks, each with a row of every window."""
    config = variant(base, tmp_path_factory.mktemp("ranks"), rows=1)
    run(config, ranks=2)
    return config


@pytest.fixture(scope="session")
def _overfitted(tmp_path_factory: pytest.TempPathFactory) -> Overfitted:
    root: Path = tmp_path_factory.mktemp("overfitted")
    return overfit(tiny_run_config(root), root / "target")


@pytest.fixture
def trained(_overfitted: Overfitted) -> Iterator[Overfitted]:
    """A drafter that knows the target's greedy answer to one prompt by heart; a test may change its weights."""
    kept = {name: tensor.clone() for name, tensor in _overfitted.drafter.state_dict().items()}
    yield _overfitted
    _overfitted.drafter.load_state_dict(kept)
