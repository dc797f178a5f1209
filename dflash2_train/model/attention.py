"""Grouped-query attention of blocks: projections, norms and rotation around one of the attention paths.

Queries, keys and values of the block come from the convolved, normed block state. Context keys and values come from
the encoded taps alone: no input norm, no convolution, so they can be made once and kept over decoding rounds. Query
heads of one key head lie side by side, so that nothing is repeated for grouped-query attention.

Letters: B rows, A blocks a row, W block size, S context tokens, H hidden, N query heads, M key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2_train.model.attend_dense import Attend, KeysValues
from dflash2_train.model.drafter_config import DrafterShape

Rotation = tuple[Tensor, Tensor]  # cos and sin, fp32 [..., 1, D / 2]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32 inside, rounded once; plain weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Unit weight."""
        self.weight.fill_(1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> same shape and dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def rotation(position_ids: Tensor, head_dim: int, theta: float) -> Rotation:
    """Cosine and sine of every position's angles, with a head axis to broadcast over.

    Made afresh from the positions: a stored table would be rounded whenever the module is cast to bf16.

    Args:
        position_ids: [...] integer positions in the document.
        head_dim: D.
        theta: rotary base.

    Returns:
        two fp32 tensors [..., 1, D / 2].
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angle = position_ids.float()[..., None, None] * (1.0 / theta**exponent)  # [..., 1, D / 2]
    return angle.cos(), angle.sin()


def rotate(heads: Tensor, table: Rotation, scale: float = 1.0) -> Tensor:
    """Rotate the (first half, second half) pairs of [..., heads, D] by ``table``, times ``scale``, rounded once."""
    cos, sin = (table[0] * scale, table[1] * scale) if scale != 1.0 else table
    first, second = heads.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


class BlockAttention(nn.Module):
    """Projections as published (``q_proj`` ... ``k_norm``) around an ``Attend``."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.initializer_range = shape.initializer_range
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal projections, unit norms."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.weight.normal_(0.0, self.initializer_range)
        self.q_norm.reset_parameters()
        self.k_norm.reset_parameters()

    def project_context(self, context: Tensor, table: Rotation) -> KeysValues:
        """Keys (normed, rotated) and values of the context.

        Args:
            context: [B, S, H] from ``Drafter.encode_context``.
            table: rotation of the context's positions, [B, S, 1, D / 2].

        Returns:
            keys and values, [B, M, S, D] each, contiguous.
        """
        keys = self.k_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim))  # [B, S, M, D]
        values = self.v_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim))
        keys = rotate(self.k_norm(keys), table)
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()

    def forward(self, hidden: Tensor, table: Rotation, context: KeysValues, attend: Attend) -> Tensor:
        """Attend from every slot of every block.

        Args:
            hidden: [B, A, W, H], convolved and normed block states.
            table: rotation of the blocks' positions, [B, A, W, 1, D / 2].
            context: keys and values of the row's context, [B, M, S, D].
            attend: how; it knows what each slot sees.

        Returns:
            [B, A, W, H].
        """
        queries, keys, values = self._project_block(hidden, table)
        mixed = attend(queries, context, (keys, values))  # [B, M, A, W, N / M, D]
        return self.o_proj(mixed.permute(0, 2, 3, 1, 4, 5).flatten(3))  # [B, A, W, N * D]

    def _project_block(self, hidden: Tensor, table: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, M, A, W, N / M, D], already scaled by 1 / sqrt(D); keys and values [B, M, A, W, D]."""
        queries = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, A, W, N, D]
        keys = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, A, W, M, D]
        values = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        queries = rotate(self.q_norm(queries), table, self.head_dim**-0.5)
        keys = rotate(self.k_norm(keys), table)
        queries = queries.unflatten(3, (self.num_kv_heads, -1))  # [B, A, W, M, N / M, D]
        return (
            queries.permute(0, 3, 1, 2, 4, 5).contiguous(),
            keys.permute(0, 3, 1, 2, 4).contiguous(),
            values.permute(0, 3, 1, 2, 4).contiguous(),
        )
