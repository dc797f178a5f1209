"""A clean tiny export of every experiment's shape family, each part of it away from its neutral start."""

from __future__ import annotations

from pathlib import Path

from dflash2_train.config import RunConfig
from dflash2_train.export.hf import export_hf
from tests.cases import RECORD, make_drafter, make_target_info
from tests.families import family


def tiny_family(experiment: str, root: Path) -> RunConfig:
    """The experiment in miniature, with no more candidates than llama.cpp takes for its tiny hidden size."""
    config = family(experiment, root)
    config.drafter.selector_top_k = 4
    config.check()
    return config


def export_family(experiment: str, root: Path) -> Path:
    """An export of it, made as the trainer makes one."""
    config = tiny_family(experiment, root)
    return export_hf(make_drafter(config), config, make_target_info(config), root / "export", run_record=RECORD)
