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

from dflash2_train.model.norm import row_pieces


class _BlockConvolution(torch.autograd.Function):
    """``out[i] = sum_k (base[k] + delta[i, k]) * hidden[i - k]`` with fp32 arithmetic and an explicit backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, delta: Tensor, base: Tensor
    ) -> Tensor:  # [..., W, H], [..., W, Kc, G], [Kc, H]
        ctx.save_for_backward(hidden, delta, base)
        blocks, deltas = hidden.flatten(0, -3), delta.flatten(0, -4)  # [n, W, H], [n, W, Kc, G]
        out = torch.empty_like(blocks)
        for piece in row_pieces(blocks):
            grouped, kernel = _grouped(blocks[piece], deltas), _kernel(deltas[piece], base)
            total = kernel[0] * grouped  # [n, W, G, g]
            for offset in range(1, min(base.shape[0], hidden.shape[-2])):
                total[:, offset:].addcmul_(kernel[offset][:, offset:], grouped[:, :-offset])
            out[piece] = total.flatten(-2)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, delta, base = ctx.saved_tensors
        width = hidden.shape[-2]
        blocks, deltas, grad_out = hidden.flatten(0, -3), delta.flatten(0, -4), grads[0].flatten(0, -3)
        grad_blocks, grad_deltas = torch.empty_like(blocks), torch.zeros_like(deltas)
        grad_base = torch.zeros(base.shape, dtype=torch.float32, device=base.device)
        for piece in row_pieces(blocks):
            grouped, grad = _grouped(blocks[piece], deltas), _grouped(grad_out[piece], deltas)
            kernel = _kernel(deltas[piece], base)
            total = kernel[0] * grad
            for offset in range(min(base.shape[0], width)):
                late, early = grad[:, offset:], grouped[:, : width - offset]
                if offset:
                    total[:, :-offset].addcmul_(kernel[offset][:, offset:], late)
                product = late * early  # [n, W - offset, G, g]: the kernel's gradient, not yet reduced
                grad_deltas[piece, offset:, offset] = product.sum(-1)
                grad_base[offset] += product.flatten(-2).sum((0, 1))  # [H]
            grad_blocks[piece] = total.flatten(-2)
        return grad_blocks.view(hidden.shape), grad_deltas.view(delta.shape), grad_base.to(base.dtype)


def _grouped(blocks: Tensor, deltas: Tensor) -> Tensor:
    """fp32 copy of [n, W, H] as [n, W, G, g]."""
    return blocks.float().unflatten(-1, (deltas.shape[-1], -1))


def _kernel(deltas: Tensor, base: Tensor) -> list[Tensor]:
    """Per offset the whole kernel, fp32 [n, W, G, g]."""
    grouped_base = base.float().unflatten(-1, (deltas.shape[-1], -1))  # [Kc, G, g]
    grouped_delta = deltas.float().unsqueeze(-1)  # [n, W, Kc, G, 1]
    return [grouped_base[offset] + grouped_delta[:, :, offset] for offset in range(base.shape[0])]


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
    out = _BlockConvolution.apply(hidden, delta, base)
    assert isinstance(out, Tensor)
    return out
