"""Grouped-query attention of blocks: projections, norms and rotation around one of the attention paths.

Queries, keys and values of the block come from the convolved, normed block state. Context keys and values come from
the encoded taps alone: no input norm, no convolution, so they can be made once and kept over decoding rounds. Query
heads of one key head lie side by side, so that nothing is repeated for grouped-query attention.

Letters: B rows, A blocks a row, W block size, S context tokens, H hidden, N query heads, M key heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dflash2_train.model.attend_dense import Attend, KeysValues
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.norm import RMSNorm
from dflash2_train.model.pieces import piece_buffers, pieces, place, widened

Rotation = tuple[Tensor, Tensor]  # cos and sin, fp32 [..., 1, D / 2]


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
    out: Tensor = _Rotation.apply(heads, *table, scale)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.scale = scale
        return _rotated(heads, cos, sin, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin, ctx.scale), None, None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """[..., heads, D] by [..., 1, D / 2], a few rows at a time on a CPU."""
    rows = heads.flatten(0, -3)  # [n, heads, D]
    cos, sin = ((part.expand(*heads.shape[:-2], -1, -1) * scale).flatten(0, -3) for part in (cos, sin))
    wide_buffer, buffer = piece_buffers(rows, 2)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    half = heads.shape[-1] // 2
    for part, cosine, sine, minus, result in pieces(rows, torch.cat([cos, cos], -1), sin, -sin, out):
        wide = widened(part, wide_buffer)
        turned = torch.mul(wide, cosine, out=place(result, buffer))
        first, second = wide.split(half, -1)
        turned[..., :half].addcmul_(second, minus)
        turned[..., half:].addcmul_(first, sine)
        result.copy_(turned)
    return out.view(heads.shape)


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
