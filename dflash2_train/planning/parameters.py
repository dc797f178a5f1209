"""Trained parameters by part of the drafter and by optimizer group."""

from __future__ import annotations

import math

from dflash2_train.config import TrainConfig
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.published import published_tensors
from dflash2_train.parameter_groups import grouped

MASK_PARAMETER = "mask_embedding"  # learned, and exported in a file of its own


def parameter_sizes(shape: DrafterShape) -> dict[str, int]:
    """Elements of every parameter of ``model.drafter.Drafter``, by name."""
    sizes = {name: math.prod(size) for name, size in published_tensors(shape).items()}
    return {MASK_PARAMETER: shape.hidden_size, **sizes}


def count_parameters(shape: DrafterShape) -> int:
    """P."""
    return sum(parameter_sizes(shape).values())


def largest_parameter(shape: DrafterShape) -> int:
    """Elements of the largest single parameter."""
    return max(parameter_sizes(shape).values())


def parameters_by_part(shape: DrafterShape) -> dict[str, int]:
    """P by what a reader of the architecture looks for; parts in the order of a forward pass."""
    parts = dict.fromkeys(
        ("fusion of taps", "attention", "MLP", "convolutions", "selector", "norms, mask embedding"), 0
    )
    for name, size in parameter_sizes(shape).items():
        parts[_part(name)] += size
    return parts


def _part(name: str) -> str:
    if name == "fc.weight":
        return "fusion of taps"
    if name.startswith("candidate_selector."):
        return "selector"
    if "_conv." in name:
        return "convolutions"
    if ".mlp." in name:
        return "MLP"
    return "attention" if "_proj." in name else "norms, mask embedding"


def optimizer_groups(shape: DrafterShape, train: TrainConfig, ranks: int) -> dict[str, int]:
    """Elements of each optimizer group's flat buffer: its parameters, filled up to a multiple of two a rank."""
    sizes, multiple = parameter_sizes(shape), 2 * ranks
    return {
        group: -(-sum(sizes[name] for name in names) // multiple) * multiple
        for group, names in grouped(sizes, train).items()
    }
