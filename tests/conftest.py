"""What every test may use: the tree's root, a tiny configuration, and surroundings that cannot reach out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash2_train.config import RunConfig
from tests.cases import RECORD, make_drafter, make_target_info, tiny_run_config

# Before any library reads them: no downloads, no tracker, one thread a process (tests run beside each other).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout's root folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Torch's global generator starts every test in the same state, where torch is loaded at all."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def tiny_config(tmp_path: Path) -> RunConfig:
    """A whole configuration with the smallest sizes that exercise every rule; checked."""
    return tiny_run_config(tmp_path)


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny drafter's export, made once for all modules; tests edit copies."""
    from dflash2_train.export.hf import export_hf

    root = tmp_path_factory.mktemp("export")
    config = tiny_run_config(root)
    return export_hf(make_drafter(config), config, make_target_info(config), root / "out", run_record=RECORD)
