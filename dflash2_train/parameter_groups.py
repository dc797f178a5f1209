"""Which optimizer group a parameter belongs to, by its name; the table stands at the top of ``optimizer.py``.

Without torch, so that a plan can count the groups: each one is a flat buffer in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash2_train.config import TrainConfig

GAINS = ("norm.weight", "base_kernel")  # elementwise factors; "norm.weight" ends every norm's name
GROUPS = ("matrices", "conv", "selector", "codebooks", "gains", "mask_embedding")
DECAYING = ("matrices", "conv", "selector")


def group_of(name: str) -> str:
    """The group that a parameter's name belongs to."""
    if name.endswith("mask_embedding"):
        return "mask_embedding"
    if name.endswith(GAINS):
        return "gains"
    if name.endswith("_codebook"):
        return "codebooks"
    if name.endswith("candidate_selector.hidden_projection.weight"):
        return "selector"
    return "conv" if name.endswith("kernel_projection.weight") else "matrices"


def rate_scales(train: TrainConfig) -> dict[str, float]:
    """Factor on the learning rate of each group."""
    return {
        "matrices": 1.0,
        "conv": train.conv_lr_scale,
        "selector": train.selector_lr_scale,
        "codebooks": train.selector_lr_scale,
        "gains": train.gain_lr_scale,
        "mask_embedding": train.mask_lr_scale,
    }


def grouped(names: Iterable[str], train: TrainConfig) -> dict[str, list[str]]:
    """Names by group, in the order of the table; projections with factor 1 are among the matrices, empty groups out."""
    scales = rate_scales(train)
    members: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in names:
        group = group_of(name)
        plain = group in DECAYING and scales[group] == 1.0
        members["matrices" if plain else group].append(name)
    return {group: chosen for group, chosen in members.items() if chosen}
