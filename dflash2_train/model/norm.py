"""RMSNorm with fp32 arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dflash2_train.model.pieces import piece_buffers, pieces, place, widened


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
        if hidden.is_cuda:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RowNorm.apply(hidden, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _RowNorm(torch.autograd.Function):
    """RMSNorm by pieces; keeps the input and one number a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])  # [n, size]
        (buffer,) = piece_buffers(rows, 1)
        out, wide_weight = torch.empty_like(rows), weight.to(buffer.dtype)
        scale = buffer.new_empty(len(rows), 1)  # 1 / root mean square
        for part, factor, result in pieces(rows, scale, out):
            wide = widened(part, buffer)
            inverse_rms(wide, eps, out=factor)
            result.copy_(torch.mul(wide, factor, out=place(result, buffer)).mul_(wide_weight))
        ctx.save_for_backward(rows, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        wide_buffer, grad_buffer, buffer = piece_buffers(rows, 3)
        out, grad_out = torch.empty_like(rows), grads[0].reshape(rows.shape)
        wide_weight = weight.to(scale.dtype)
        grad_weight = torch.zeros_like(wide_weight)
        for part, grad_part, factor, result in pieces(rows, grad_out, scale, out):
            wide, grad = widened(part, wide_buffer), widened(grad_part, grad_buffer)
            room, into = buffer[: len(part)], place(result, grad_buffer)
            result.copy_(norm_gradient(wide, grad, factor, wide_weight, grad_weight, room=room, out=into))
        return out.view(grads[0].shape), grad_weight.to(weight.dtype), None


def inverse_rms(wide: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last axis of [..., size], written to [..., 1]."""
    torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=out)
    return out.square_().mul_(1 / wide.shape[-1]).add_(eps).rsqrt_()


def norm_gradient(
    wide: Tensor, grad: Tensor, scale: Tensor, weight: Tensor, grad_weight: Tensor, *, room: Tensor, out: Tensor
) -> Tensor:
    """Gradients of ``y = x s w`` with ``s = 1 / rms(x)``, for ``g`` that by ``y``; rows have ``size`` elements.

    by w:  sum over rows of s (g x)
    by x:  s (g w) - x s^3 / size * sum over the row of (g x) w

    Args:
        wide: x [..., size], in the dtype of the arithmetic like all others.
        grad: g [..., size].
        scale: s [..., 1].
        weight: w [size].
        grad_weight: [size]; the gradient by w is added to it.
        room: [..., size], contiguous, for g x.
        out: [..., size] for the gradient by x; may be ``grad``.

    Returns:
        ``out``.
    """
    size = wide.shape[-1]
    product = torch.mul(grad, wide, out=room).view(-1, size)
    grad_weight.addmv_(product.T, scale.view(-1))
    along = torch.mv(product, weight).view_as(scale).mul_(scale.pow(3).mul_(-1 / size))
    return torch.mul(grad, weight, out=out).mul_(scale).addcmul_(wide, along)
