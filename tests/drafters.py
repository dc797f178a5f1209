"""Tiny drafters for the tests, with every part of them away from its neutral start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape

TINY_SHAPE = DrafterShape(
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=64,
    target_layer_ids=(0, 2, 4),
    num_target_layers=6,
    block_size=4,
    mask_token_id=63,
    layer_types=("full_attention", "sliding_attention", "full_attention"),
    sliding_window=6,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=5,
    selector_top_k=6,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=128,
)


def tiny_shape(**changes: Any) -> DrafterShape:
    """``TINY_SHAPE`` with some fields changed; ``num_layers`` alone gives full attention everywhere."""
    if "num_layers" in changes and "layer_types" not in changes:
        changes |= {"layer_types": ("full_attention",) * changes["num_layers"], "sliding_window": None}
    return replace(TINY_SHAPE, **changes)


@torch.no_grad()
def randomise(drafter: Drafter, seed: int = 0) -> Drafter:
    """Move every parameter by noise large enough to show in the output: norms, kernels, codebooks, mask vector."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        scale = 0.5 if "codebook" in name or name == "mask_embedding" else 0.15
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return drafter


def random_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """A randomised drafter of :func:`tiny_shape`."""
    return randomise(Drafter(tiny_shape(**changes)), seed)


def as_head(weight: torch.Tensor) -> torch.nn.Linear:
    """An output head [V, H] as the module that a target has."""
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head
