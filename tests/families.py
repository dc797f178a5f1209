"""Every experiment of conf/ in miniature: its layers, taps, block, window pattern and ratios, with small sizes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_dir

from dflash2_train.app import register_schema
from dflash2_train.config import RunConfig, load_config

if TYPE_CHECKING:
    from dflash2_train.model.drafter import Drafter

CONF = Path(__file__).resolve().parents[1] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
HIDDEN, VOCAB, WINDOW, POSITIONS = 64, 128, 24, 256


def load(*overrides: str) -> RunConfig:
    """What the commands compose; the caller's own to change."""
    return deepcopy(_composed(*overrides))


@cache
def _composed(*overrides: str) -> RunConfig:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_config(compose("config", list(overrides)))


def family(experiment: str, root: Path) -> RunConfig:
    """The experiment's configuration with folders under ``root`` and sizes for a test; checked."""
    config = load(f"+experiment={experiment}", f"run_dir={root}")
    drafter = config.drafter
    heads_per_key = drafter.num_heads // drafter.num_kv_heads
    config.target = replace(config.target, name="tiny", hidden_size=HIDDEN, vocab_size=VOCAB)
    config.drafter = replace(
        drafter,
        num_heads=2 * heads_per_key,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        mask_token_id=VOCAB - 1,
        sliding_window=None if drafter.sliding_window is None else WINDOW,
        selector_rank=8,
        max_position_embeddings=POSITIONS,
    )
    config.train.init_layers = []
    config.train.warm_start = None
    config.check()
    return config


def randomised(drafter: Drafter, seed: int, noise: float = 0.05) -> Drafter:
    """Move every parameter, by little in the layers: rounding must not grow from one to the next.

    With weights of unit gain, eight layers of multiplied kernels carry rounding of 1e-7 to 1e-4, in any implementation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            strong = "codebook" in name or name in ("mask_embedding", "candidate_selector.hidden_projection.weight")
            scale = 0.5 if strong else 0.15 if parameter.dim() != 2 else noise
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return drafter
