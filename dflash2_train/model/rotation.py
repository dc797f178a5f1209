"""Rotary positions of attention heads, and the norm that comes before.

    y = scale * R(position) (x / rms(x) * weight),   R turning the pairs (x[i], x[i + D / 2]) by the position's angles

A GPU has a fused norm, so there the rotation follows it. On a CPU both are one function by pieces, which rounds once.

Letters: B rows, T tokens, M key heads, R query heads a key head (1 for keys), D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.model.norm import RMSNorm, inverse_rms, norm_gradient
from dflash2_train.model.pieces import piece_buffers, pieces, place, widened

Rotation = tuple[Tensor, Tensor]  # cos and sin, fp32 [..., D / 2]


def rotation(position_ids: Tensor, head_dim: int, theta: float) -> Rotation:
    """Cosine and sine of every position's angles.

    Made afresh from the positions: a stored table would be rounded whenever the module is cast to bf16.

    Args:
        position_ids: [...] integer positions in the document.
        head_dim: D.
        theta: rotary base.

    Returns:
        two fp32 tensors [..., D / 2].
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angle = position_ids.float().unsqueeze(-1) * (1.0 / theta**exponent)
    return angle.cos(), angle.sin()


def norm_and_rotate(heads: Tensor, norm: RMSNorm, table: Rotation, scale: float = 1.0) -> Tensor:
    """Norm every head, then rotate it.

    Args:
        heads: [B, T, M, R, D].
        norm: over D.
        table: rotation of the tokens' positions, [B, T, D / 2].
        scale: of the result.

    Returns:
        [B, M, T, R, D], contiguous.
    """
    if heads.is_cuda:
        turned = rotate(norm(heads), table, scale)
    else:
        turned = _NormedRotation.apply(heads, norm.weight, *table, norm.eps, scale)  # type: ignore[no-untyped-call]
    return turned.transpose(1, 2).contiguous()


def rotate(heads: Tensor, table: Rotation, scale: float = 1.0) -> Tensor:
    """Rotate [B, T, M, R, D] by ``table`` [B, T, D / 2], times ``scale``, rounded once; all of it at once."""
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
    """[B, T, M, R, D] by [B, T, D / 2]."""
    cos, sin = ((part * scale)[..., None, None, :] for part in (cos, sin))
    first, second = heads.to(cos.dtype).chunk(2, -1)
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    half = heads.shape[-1] // 2
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


class _NormedRotation(torch.autograd.Function):
    """Norm and rotation by pieces; keeps the heads, one number each and the angles for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float
    ) -> Tensor:  # [B, T, M, R, D]
        rows = heads.flatten(0, 1)
        wide_buffer, buffer = piece_buffers(rows, 2)
        factors = buffer.new_empty(*rows.shape[:-1], 1)  # 1 / root mean square
        out = torch.empty_like(rows)
        tables = _tables(cos, sin, *(weight.to(buffer.dtype) * scale).chunk(2))
        for part, factor, *table, result in pieces(rows, factors, *tables, out):
            wide = widened(part, wide_buffer)
            normed = torch.mul(wide, inverse_rms(wide, eps, out=factor), out=wide_buffer[: len(part)])
            result.copy_(_turned(normed, *table, out=place(result, buffer)))
        ctx.save_for_backward(rows, weight, cos, sin, factors)
        ctx.scale = scale
        return out.view(heads.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, cos, sin, factors = ctx.saved_tensors
        grad_out = grads[0].contiguous().flatten(0, 1)
        wide_buffer, grad_buffer, buffer = piece_buffers(rows, 3)
        out, wide_weight = torch.empty_like(rows), weight.to(buffer.dtype)
        grad_weight = torch.zeros_like(wide_weight)
        tables = _tables(cos, -sin, ctx.scale, ctx.scale)  # the rotation back
        for part, factor, *table, grad, result in pieces(rows, factors, *tables, grad_out, out):
            wide, turned = widened(part, wide_buffer), buffer[: len(part)]
            _turned(widened(grad, grad_buffer), *table, out=turned)
            room, into = grad_buffer[: len(part)], place(result, buffer)
            result.copy_(norm_gradient(wide, turned, factor, wide_weight, grad_weight, room=room, out=into))
        return out.view(grads[0].shape), grad_weight.to(weight.dtype), None, None, None, None


def _tables(cos: Tensor, sin: Tensor, first: Tensor | float, second: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of what is turned, of its second and of its first half, for halves weighted by ``first`` and ``second``.

    [B, T, D / 2] -> [B * T, 1, 1, D], [B * T, 1, 1, D / 2] twice.
    """
    cos, sin = (part.flatten(0, 1)[:, None, None] for part in (cos, sin))
    return torch.cat([cos * first, cos * second], -1), sin * -second, sin * first


def _turned(source: Tensor, cosine: Tensor, minus: Tensor, plus: Tensor, *, out: Tensor) -> Tensor:
    """Rotate ``source`` [t, M, R, D] into ``out``."""
    torch.mul(source, cosine, out=out)
    for into, other, factor in zip(out.chunk(2, -1), reversed(source.chunk(2, -1)), (minus, plus), strict=True):
        into.addcmul_(other, factor)
    return out
