"""Norm, rotation and the two-part attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2_train.model.attention import BlockAttention, RMSNorm, attend, rotate, rotation, score_bias
from tests.drafters import tiny_shape

ROWS, BLOCKS, WIDTH, KEYS, KEY_HEADS, PER_KEY, SIZE = 2, 3, 4, 7, 2, 3, 8


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    queries = torch.randn(ROWS, KEY_HEADS, BLOCKS, WIDTH, PER_KEY, SIZE).to(dtype)
    context = tuple(torch.randn(ROWS, KEY_HEADS, KEYS, SIZE).to(dtype) for _ in range(2))
    block = tuple(torch.randn(ROWS, KEY_HEADS, BLOCKS, WIDTH, SIZE).to(dtype) for _ in range(2))
    return queries, context, block  # type: ignore[return-value]


@pytest.mark.parametrize("slots", [1, WIDTH])
def test_attention_equals_one_softmax_over_context_and_own_block(slots: int) -> None:
    queries, context, block = problem()
    visible = torch.rand(ROWS, BLOCKS, slots, KEYS) > 0.5
    visible[0, 0] = False  # a block without context
    out = attend(queries, context, block, score_bias(visible, torch.float32))
    for row in range(ROWS):
        for index in range(BLOCKS):
            keys, values = (
                torch.cat([context[part][row], block[part][row, :, index]], 1).repeat_interleave(PER_KEY, 0)
                for part in range(2)
            )
            own = queries[row, :, index].transpose(1, 2).flatten(0, 1)  # [heads, W, D]
            mask = torch.cat([visible[row, index].expand(WIDTH, -1), torch.ones(WIDTH, WIDTH, dtype=torch.bool)], 1)
            expected = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=1.0)
            found = out[row, :, index].transpose(1, 2).flatten(0, 1)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_a_mask_every_context_key_is_seen() -> None:
    queries, context, block = problem()
    everything = score_bias(torch.ones(ROWS, BLOCKS, 1, KEYS, dtype=torch.bool), torch.float32)
    assert torch.equal(attend(queries, context, block, None), attend(queries, context, block, everything))


def test_a_block_without_any_context_attends_to_itself_alone() -> None:
    queries, context, block = problem()
    hidden = score_bias(torch.zeros(ROWS, BLOCKS, 1, KEYS, dtype=torch.bool), torch.float32)
    empty = (context[0][:, :, :0], context[1][:, :, :0])
    out = attend(queries, context, block, hidden)
    assert out.isfinite().all()
    torch.testing.assert_close(out, attend(queries, empty, block, None))


def test_a_hidden_key_has_exactly_no_weight_and_no_gradient() -> None:
    queries, context, block = problem()
    visible = torch.ones(ROWS, BLOCKS, 1, KEYS, dtype=torch.bool)
    visible[..., 4:] = False
    bias = score_bias(visible, torch.float32)
    keys, values = (tensor.clone().requires_grad_() for tensor in context)
    out = attend(queries, (keys, values), block, bias)
    out.square().sum().backward()
    assert keys.grad is not None and values.grad is not None
    assert (keys.grad[:, :, 4:] == 0).all() and (values.grad[:, :, 4:] == 0).all()
    assert (keys.grad[:, :, :4] != 0).any()
    with torch.no_grad():
        keys[:, :, 4:] = 1e4
        values[:, :, 4:] = -1e4
        assert torch.equal(attend(queries, (keys, values), block, bias), out)


def test_softmax_of_bf16_scores_computes_in_fp32() -> None:
    scores = (torch.randn(16, 500) * 3).bfloat16()
    assert torch.equal(scores.softmax(-1), scores.float().softmax(-1).bfloat16())


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
