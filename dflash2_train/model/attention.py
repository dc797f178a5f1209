"""Grouped-query attention of blocks: projections, norms and rotation around one of the attention paths.

Queries, keys and values of the block come from the convolved, normed block state. Context keys and values come from
the encoded taps alone: no input norm, no convolution, so they can be made once and kept over decoding rounds. Query
heads of one key head lie side by side, so that nothing is repeated for grouped-query attention.

Letters: B rows, A blocks a row, W block size, S context tokens, H hidden, N query heads, M key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash2_train.model.attend_dense import Attend, KeysValues
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.norm import RMSNorm
from dflash2_train.model.rotation import Rotation, norm_and_rotate


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
            table: rotation of the context's positions, [B, S, D / 2].

        Returns:
            keys and values, [B, M, S, D] each, contiguous.
        """
        keys = norm_and_rotate(self._heads(self.k_proj, context), self.k_norm, table)  # [B, M, S, 1, D]
        values = self._heads(self.v_proj, context)
        return keys.squeeze(3), values.squeeze(3).transpose(1, 2).contiguous()

    def forward(self, hidden: Tensor, table: Rotation, context: KeysValues, attend: Attend) -> Tensor:
        """Attend from every slot of every block.

        Args:
            hidden: [B, A, W, H], convolved and normed block states.
            table: rotation of the blocks' positions, [B, A, W, D / 2].
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
        blocks, table = hidden.shape[1:3], (table[0].flatten(1, 2), table[1].flatten(1, 2))
        queries = norm_and_rotate(self._heads(self.q_proj, hidden), self.q_norm, table, self.head_dim**-0.5)
        keys = norm_and_rotate(self._heads(self.k_proj, hidden), self.k_norm, table)
        values = self._heads(self.v_proj, hidden).transpose(1, 2).contiguous()
        return (
            queries.unflatten(2, blocks),
            keys.squeeze(3).unflatten(2, blocks),
            values.squeeze(3).unflatten(2, blocks),
        )

    def _heads(self, projection: nn.Linear, hidden: Tensor) -> Tensor:
        """[B, ..., H] -> [B, T, M, R, D]: R = N / M heads a key head of queries, 1 of keys and values."""
        return projection(hidden).unflatten(-1, (self.num_kv_heads, -1, self.head_dim)).flatten(1, -4)
