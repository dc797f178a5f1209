"""What a GPU could do at best: dense bf16 tensor operations a second, as its maker states them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense bf16 peak of the GPUs whose name holds all these words."""

    words: tuple[str, ...]
    tflops: float  # 1e12 operations a second, without sparsity


# Data sheets of the maker; figures stated with sparsity are halved. More special names come first.
PEAKS = (
    Peak(words=("GB300",), tflops=2500.0),
    Peak(words=("GB200",), tflops=2500.0),
    Peak(words=("B300",), tflops=2250.0),
    Peak(words=("B200",), tflops=2250.0),
    Peak(words=("GH200",), tflops=989.5),
    Peak(words=("H200", "NVL"), tflops=835.5),
    Peak(words=("H200",), tflops=989.5),
    Peak(words=("H100", "NVL"), tflops=835.5),
    Peak(words=("H100", "PCIe"), tflops=756.5),
    Peak(words=("H100",), tflops=989.5),
    Peak(words=("A100",), tflops=312.0),
    Peak(words=("L40S",), tflops=362.0),
)


def named_peak(gpu: str) -> float | None:
    """Dense bf16 peak of a GPU by the name that its driver gives, 1e12 operations a second; None if not listed."""
    words = set(re.split(r"[\s\-]+", gpu))
    return next((peak.tflops for peak in PEAKS if words.issuperset(peak.words)), None)


def peak_tflops(device: torch.device, dtype: torch.dtype, stated: float | None) -> float | None:
    """Peak of one device, 1e12 operations a second, or None where nothing is known.

    Args:
        device: that a rank trains on.
        dtype: of training; the table speaks of bf16 alone.
        stated: ``train.peak_tflops``, which goes before the table.
    """
    if stated is not None:
        return stated
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return named_peak(torch.cuda.get_device_name(device))
