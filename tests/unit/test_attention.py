"""Rotation and projections of the attention."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.model import pieces
from dflash2_train.model.attention import BlockAttention, rotate, rotation
from tests.drafters import tiny_shape


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


@pytest.mark.parametrize("piece", [1, 1 << 17])
def test_the_gradient_of_a_rotation_equals_finite_differences(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", piece)
    cos, sin = rotation(torch.tensor([[0, 3, 11]]), 4, 1e2)
    table = (cos.double(), sin.double())
    heads = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, table, 0.7), [heads])


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
