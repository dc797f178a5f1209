"""Norm, rotation and projections of the attention."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.model.attention import BlockAttention, RMSNorm, rotate, rotation
from tests.drafters import tiny_shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_computes_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, 1e-3).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
    hidden = (torch.randn(5, 24) * 0.1).to(dtype)
    wide = hidden.float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.float()
    torch.testing.assert_close(
        norm(hidden), expected.to(dtype), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2
    )


def test_rotation_turns_pairs_of_the_two_halves_by_position_times_frequency() -> None:
    theta, size = 100.0, 8
    heads = torch.randn(3, 2, size)  # [tokens, heads, D]
    out = rotate(heads, rotation(torch.tensor([0, 1, 5]), size, theta))
    assert torch.equal(out[0], heads[0])
    for token, position in enumerate((0, 1, 5)):
        for pair in range(size // 2):
            angle = torch.tensor(position * theta ** (-2 * pair / size))
            first, second = heads[token, :, pair], heads[token, :, pair + size // 2]
            torch.testing.assert_close(out[token, :, pair], first * angle.cos() - second * angle.sin())
            torch.testing.assert_close(out[token, :, pair + size // 2], second * angle.cos() + first * angle.sin())


def test_scores_depend_on_the_distance_of_positions_alone() -> None:
    query, key = torch.randn(2, 1, 1, 8)
    near, far = (
        (
            rotate(query, rotation(torch.tensor([at + 3]), 8, 1e4)) * rotate(key, rotation(torch.tensor([at]), 8, 1e4))
        ).sum()
        for at in (0, 500)
    )
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_rotation_tables_stay_fp32_in_a_bf16_module() -> None:
    cos, sin = rotation(torch.arange(4), 8, 1e4)
    assert cos.dtype == sin.dtype == torch.float32
    heads = torch.randn(4, 2, 8).bfloat16()
    expected = rotate(heads.float(), (cos, sin)).bfloat16()
    assert torch.equal(rotate(heads, (cos, sin)), expected)


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
