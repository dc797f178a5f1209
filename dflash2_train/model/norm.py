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
    """RMSNorm by pieces; keeps the input and one number a row for the backward pass.

    With s = 1 / rms of a row of n elements x, and the gradient g of ``out = s x w``:
    grad_w = sum of s (g x) over rows,  grad_x = s (g w) - x s^3 / n  sum of (g x) w over the row.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])  # [n, size]
        (buffer,) = piece_buffers(rows, 1)
        out, wide_weight = torch.empty_like(rows), weight.to(buffer.dtype)
        scale = buffer.new_empty(len(rows), 1)  # 1 / root mean square
        floor = scale.new_tensor(eps)
        for part, factor, result in pieces(rows, scale, out):
            wide = widened(part, buffer)
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=factor)
            torch.addcmul(floor, factor, factor, value=1 / rows.shape[1], out=factor).rsqrt_()
            result.copy_(torch.mul(wide, factor, out=place(result, buffer)).mul_(wide_weight))
        ctx.save_for_backward(rows, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        wide_buffer, grad_buffer, buffer = piece_buffers(rows, 3)
        out, wide_weight = torch.empty_like(rows), weight.to(scale.dtype)
        grad_weight = torch.zeros_like(wide_weight)
        cube = scale.pow(3).div_(-rows.shape[1])
        for part, grad, factor, along, result in pieces(rows, grads[0].reshape(rows.shape), scale, cube, out):
            wide, grad = widened(part, wide_buffer), widened(grad, grad_buffer)
            product = torch.mul(grad, wide, out=buffer[: len(part)])
            grad_weight.addmv_(product.T, factor.squeeze(1))
            along.mul_(torch.mv(product, wide_weight).unsqueeze(1))
            unrounded = torch.mul(grad, wide_weight, out=place(result, buffer))
            result.copy_(unrounded.mul_(factor).addcmul_(wide, along))
        return out.view(grads[0].shape), grad_weight.to(weight.dtype), None
