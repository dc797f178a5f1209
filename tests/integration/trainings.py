"""Tiny trainings as processes, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dflash2_train.config import RunConfig, load_config, to_plain
from dflash2_train.tracker import read_metrics
from tests.cases import without_clock
from tests.integration.forked import RankProcess, finish, fork_ranks_of

STEPS = 6


def variant(base: RunConfig, folder: Path, **train: object) -> RunConfig:
    """The same experiment with output of its own and other ``train.*``."""
    config = load_config(OmegaConf.create(to_plain(base)))
    config.train.output_dir, config.export.output_dir = str(folder / "train"), str(folder / "export")
    for key, value in train.items():
        setattr(config.train, key, value)
    return config


def start(config: RunConfig, *words: str, ranks: int = 1) -> list[RankProcess]:
    path = Path(config.train.output_dir).parent / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_plain(config)))
    return fork_ranks_of("tests.integration.run_training", [str(path), *words], ranks)


def run(config: RunConfig, *, ranks: int = 1, expect: int = 0) -> str:
    return finish(start(config, ranks=ranks), expect=expect)


def weights(config: RunConfig, step: int = STEPS) -> dict[str, torch.Tensor]:
    """The drafter that was saved behind a step."""
    return load_file(Path(config.train.output_dir) / f"step{step:06d}" / "drafter.safetensors")


def curve(config: RunConfig, *, whole: bool = False) -> list[dict[str, float]]:
    """The log, without what hangs on the clock unless ``whole``."""
    rows = read_metrics(Path(config.train.output_dir) / "metrics.jsonl")
    return rows if whole else [without_clock(row) for row in rows]
