"""Grouped dynamic causal convolution over the slots of one block.

A sublayer (attention or MLP) is wrapped by two convolutions, side 0 on its input (``prepare``) and side 1 on its
output (``finish``). Both take their dynamic part from ``h``, the normed sublayer input before convolution:

    delta                = kernel_projection(h), rows ordered (side, offset, group)
    out[i, channel]      = sum over offset k < kernel_size of
                           (base_kernel[side, k, channel] + delta[i, side, k, channel // g]) * input[i - k, channel]

with zeros before slot 0. So slot i sees slots i, i-1, ... of its own block and never the context. The input has the
slots of one block as its second-to-last axis, which makes a look into another block impossible by construction.

Identity start: base offset 0 is one, everything else zero, so that an untrained convolution returns its input bit for
bit. Sums run in fp32 and are rounded once, as the served kernel does: in bf16 arithmetic a kernel of 1 + 0.003 would
be a kernel of 1. The operation is one autograd function, because a chain of eager broadcasts costs twice its time,
and on a CPU it takes a few blocks at a time, which halves that again.

Letters: W block size, H hidden, g channels a group, G = H / g groups, Kc kernel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dflash2_train.model.pieces import piece_buffers, piece_rows, pieces, place, widened


class _BlockConvolution(torch.autograd.Function):
    """``out[i] = sum_k (base[k] + delta[i, k]) * hidden[i - k]`` in at least fp32, with an explicit backward.

    In here n blocks have shape [n, W, G, g] and their kernels, in fp32, [n, W, Kc, G, g].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, delta: Tensor, base: Tensor
    ) -> Tensor:  # [..., W, H], [..., W, Kc, G], [Kc, H]
        ctx.save_for_backward(hidden, delta, base)
        blocks, deltas, base, kernels = _operands(hidden, delta, base)
        wide_buffer, buffer = piece_buffers(blocks, 2)
        out = torch.empty_like(blocks)
        for part, delta_part, result in pieces(blocks, deltas, out):
            wide = widened(part, wide_buffer)
            kernel = torch.add(base, delta_part, out=kernels[: len(part)])
            total = torch.mul(kernel[:, :, 0], wide, out=place(result, buffer))
            for offset in range(1, min(len(base), hidden.shape[-2])):
                total[:, offset:].addcmul_(kernel[:, offset:, offset], wide[:, :-offset])
            result.copy_(total)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, delta, base = ctx.saved_tensors
        offsets = range(min(len(base), hidden.shape[-2]))
        blocks, deltas, wide_base, kernels = _operands(hidden, delta, base)
        wide_buffer, grad_buffer, buffer = piece_buffers(blocks, 3)
        out, grad_out = torch.empty_like(blocks), grads[0].reshape(blocks.shape)
        grad_deltas, grad_base = deltas.new_empty(deltas.shape[:-1]), torch.zeros_like(wide_base)
        for part, grad_part, delta_part, grad_delta, result in pieces(blocks, grad_out, deltas, grad_deltas, out):
            wide, grad = widened(part, wide_buffer), widened(grad_part, grad_buffer)
            kernel = torch.add(wide_base, delta_part, out=kernels[: len(part)])
            total = torch.mul(kernel[:, :, 0], grad, out=place(result, buffer))
            for offset in offsets[1:]:
                total[:, :-offset].addcmul_(kernel[:, offset:, offset], grad[:, offset:])
            result.copy_(total)
            products = kernel.zero_()  # a used kernel makes room for its gradient, not yet reduced
            for offset in offsets:
                products[:, offset:, offset].addcmul_(grad[:, offset:], wide[:, : hidden.shape[-2] - offset])
            torch.sum(products, -1, out=grad_delta)
            grad_base += products.sum((0, 1))
        return (
            out.view(hidden.shape),
            grad_deltas.view(delta.shape).to(delta.dtype),
            grad_base.view(base.shape).to(base.dtype),
        )


def _operands(hidden: Tensor, delta: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks [n, W, G, g]; in fp32 deltas [n, W, Kc, G, 1], base [Kc, G, g] and room for the kernels of a piece."""
    work, groups = torch.promote_types(hidden.dtype, torch.float32), (delta.shape[-1], -1)
    blocks = hidden.flatten(0, -3).unflatten(-1, groups)
    base = base.to(work).unflatten(-1, groups)
    kernels = base.new_empty(piece_rows(blocks), blocks.shape[1], *base.shape)
    return blocks, delta.flatten(0, -4).to(work).unsqueeze(-1), base, kernels


class BlockConv(nn.Module):
    """The two convolutions around one sublayer, parameters as published.

    ``base_kernel`` [2, Kc, H] = (side, offset, channel); ``kernel_projection.weight`` [2 * Kc * G, H] with row
    (side * Kc + offset) * G + group.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        if hidden_size % group_size:
            raise ValueError(f"group_size={group_size}: must divide hidden_size={hidden_size}.")
        self.kernel_size = kernel_size
        self.num_groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.num_groups, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Both sides become the identity."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0].fill_(1.0)
        self.kernel_projection.weight.zero_()

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the sublayer's input.

        Args:
            hidden: [..., W, H], the normed input of the sublayer; the W slots are one block.

        Returns:
            the convolved input [..., W, H] and the dynamic kernel [..., W, Kc, G] that :meth:`finish` takes.
        """
        sides = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, self.num_groups))
        delta_prepare, delta_finish = sides.unbind(-3)  # [..., W, Kc, G] each
        return _convolve(hidden, delta_prepare, self.base_kernel[0]), delta_finish

    def finish(self, output: Tensor, delta: Tensor) -> Tensor:
        """Convolve the sublayer's output [..., W, H] with the dynamic kernel that :meth:`prepare` returned."""
        return _convolve(output, delta, self.base_kernel[1])


def _convolve(hidden: Tensor, delta: Tensor, base: Tensor) -> Tensor:
    out: Tensor = _BlockConvolution.apply(hidden, delta, base)  # type: ignore[no-untyped-call]
    return out
