"""Tiny exports of the shape families that the experiments train, each with every part away from its neutral start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2_train.config import RunConfig
from dflash2_train.export.hf import export_hf
from tests.cases import RECORD, make_drafter, make_target_info, tiny_run_config

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What tells one experiment's drafter from another's, whatever its sizes."""

    target_layers: int
    taps: tuple[int, ...]
    layer_types: tuple[str, ...]
    block_size: int = 8
    proposals: int | None = None  # served with fewer than block_size - 1
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def config(self, root: Path) -> RunConfig:
        """The family's tiny configuration under ``root``; checked."""
        config = tiny_run_config(root)
        drafter = config.drafter
        config.target.num_layers = self.target_layers
        drafter.target_layer_ids = list(self.taps)
        drafter.layer_types = list(self.layer_types)
        drafter.num_layers = len(self.layer_types)
        drafter.sliding_window = 16 if SLIDING in self.layer_types else None
        drafter.block_size = self.block_size
        drafter.rope_theta, drafter.rms_norm_eps = self.rope_theta, self.rms_norm_eps
        drafter.selector_top_k = 4  # C * (C + 1) within the tiny hidden size, as llama.cpp needs it
        config.check()
        return config

    def export(self, root: Path) -> Path:
        """An export of the family, made as the trainer makes it."""
        config = self.config(root)
        return export_hf(make_drafter(config), config, make_target_info(config), root / "export", run_record=RECORD)


FAMILIES = {
    "smollm2": Family(target_layers=30, taps=(9, 19, 28), layer_types=(FULL,) * 2, rope_theta=100000.0),
    "glm53_flash": Family(
        target_layers=45, taps=(5, 9, 14, 19, 24, 28, 33, 38, 42), layer_types=(FULL,) * 8
    ),
    "glm53_flash_swa": Family(target_layers=45, taps=(5, 14, 24, 33, 42), layer_types=(SLIDING,) * 5),
    "glm53": Family(
        target_layers=78,
        taps=(1, 20, 38, 56, 75),
        layer_types=(*(SLIDING,) * 4, FULL),
        block_size=12,
        proposals=8,
    ),
    "qwen3_8b": Family(
        target_layers=36, taps=(1, 9, 17, 25, 33), layer_types=(FULL,) * 5, rope_theta=1e6, rms_norm_eps=1e-6
    ),
}
