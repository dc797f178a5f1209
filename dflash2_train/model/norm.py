"""RMSNorm with fp32 arithmetic, and the rule by which elementwise work on a CPU is cut into pieces.

Elementwise work is bound by memory. Done for all rows at once, each of its steps writes a fresh tensor of megabytes
that the next one reads back; done for a few rows at a time, what lies between stays in the cache. On a CPU that halves
the time of norms, convolutions and rotations, and their peak memory. A GPU has fused kernels and takes all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

PIECE_ELEMENTS = 1 << 17  # of one fp32 intermediate; several live at once in a second-level cache


def row_pieces(source: Tensor) -> Iterator[slice]:
    """Cuts of the first axis of ``source``; the whole of it unless it lies on a CPU."""
    count = len(source)
    step = max(1, PIECE_ELEMENTS // max(1, source[:1].numel())) if source.device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


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
        work = torch.promote_types(hidden.dtype, torch.float32)
        out, wide_weight = torch.empty_like(rows), weight.to(work)
        scale = rows.new_empty(len(rows), 1, dtype=work)  # 1 / root mean square
        for piece in row_pieces(rows):
            wide = rows[piece].to(work)
            scale[piece] = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            out[piece] = (wide * scale[piece]).mul_(wide_weight)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        grad_out = grads[0].reshape(rows.shape)
        grad_rows, wide_weight = torch.empty_like(rows), weight.to(scale.dtype)
        grad_weight = torch.zeros_like(wide_weight)
        for piece in row_pieces(rows):
            normed = rows[piece] * scale[piece]
            grad = grad_out[piece].to(scale.dtype)
            grad_weight += (grad * normed).sum(0)
            grad = grad * wide_weight
            along = (grad * normed).mean(-1, keepdim=True)
            grad_rows[piece] = grad.sub_(normed.mul_(along)).mul_(scale[piece])
        return grad_rows.view(grads[0].shape), grad_weight.to(weight.dtype), None
