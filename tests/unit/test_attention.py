"""Projections of the attention."""

from __future__ import annotations

import torch

from dflash2_train.model.attention import BlockAttention
from dflash2_train.model.rotation import rotation
from tests.drafters import tiny_shape


def test_context_keys_may_be_projected_piece_by_piece() -> None:
    shape = tiny_shape()
    attention = BlockAttention(shape)
    context = torch.randn(1, 9, shape.hidden_size)
    table = rotation(torch.arange(9)[None], shape.head_dim, shape.rope_theta)
    whole = attention.project_context(context, table)
    pieces = [
        attention.project_context(context[:, part], (table[0][:, part], table[1][:, part]))
        for part in (slice(0, 5), slice(5, 9))
    ]
    for index in range(2):
        joined = torch.cat([piece[index] for piece in pieces], 2)
        torch.testing.assert_close(joined, whole[index], atol=1e-6, rtol=1e-6)
        assert whole[index].shape == (1, shape.num_kv_heads, 9, shape.head_dim)
