"""Attention of blocks in one piece: the reference of the other paths, and what decodes a single block.

One softmax spans [context | own block]. Its two parts are computed apart, because their keys are shared differently:
all blocks of a row look at the same S context keys, one large matrix product, while each block has W keys of its own,
one small product a block. So there is never an [A * W, A * W] mask of which all but the diagonal is empty.

    scores  = [ q k_context^T | q k_block^T ],   context part masked by what the slot may see
    output  = softmax(scores) [ v_context | v_block ]

A block always sees itself, so no softmax row is ever empty, whatever the context mask says.

Letters: B rows, A blocks a row, W block size, S context tokens, N query heads, M key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]  # keys and values; context [B, M, S, D] each, own block [B, M, A, W, D] each

# (queries [B, M, A, W, N / M, D] contiguous and scaled, context, own block) -> [B, M, A, W, N / M, D]
Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]


def score_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Visibility [B, A, W | 1, S] as an additive bias (0 or -inf) laid out for the scores: [B, 1, A, W | 1, 1, S]."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return bias[:, None, :, :, None, :]


class DenseAttend:
    """All scores at once.

    Args:
        visible: [B, A, W | 1, S] bool, or None where every slot sees every key.
    """

    def __init__(self, visible: Tensor | None) -> None:
        self._visible = visible
        self._bias: Tensor | None = None

    def __call__(self, queries: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        if self._visible is not None and (self._bias is None or self._bias.dtype != queries.dtype):
            self._bias = score_bias(self._visible, queries.dtype)
        return attend_dense(queries, context, block, self._bias)


def attend_dense(queries: Tensor, context: KeysValues, block: KeysValues, bias: Tensor | None) -> Tensor:
    """One softmax over context and own block.

    Args:
        queries: [B, M, A, W, N / M, D], contiguous, scaled.
        context: keys and values [B, M, S, D].
        block: keys and values [B, M, A, W, D].
        bias: [B, 1, A, W | 1, 1, S] or None.

    Returns:
        [B, M, A, W, N / M, D].
    """
    num_context, width = context[0].shape[2], block[0].shape[3]
    scores = queries.flatten(2, 4) @ context[0].transpose(-1, -2)  # [B, M, A * W * N/M, S]
    scores = scores.unflatten(2, queries.shape[2:5])  # [B, M, A, W, N/M, S]
    if bias is not None:
        scores = scores + bias
    own = queries.flatten(3, 4) @ block[0].transpose(-1, -2)  # [B, M, A, W * N/M, W]
    # Softmax of a bf16 tensor computes in fp32 and rounds its result, on CPU and GPU alike.
    joint = torch.softmax(torch.cat([scores, own.unflatten(3, queries.shape[3:5])], -1), -1)  # [..., S + W]
    on_context, on_block = joint.split([num_context, width], -1)
    mixed = (on_context.flatten(2, 4) @ context[1]).view_as(queries)
    return mixed + (on_block.flatten(3, 4) @ block[1]).view_as(queries)
