"""Rotation of attention heads, alone and with the norm before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.model import pieces
from dflash2_train.model.norm import RMSNorm
from dflash2_train.model.rotation import Rotation, norm_and_rotate, rotate, rotation

ROWS, TOKENS, KEY_HEADS, QUERIES, SIZE = 2, 3, 2, 3, 8
SHAPE = (ROWS, TOKENS, KEY_HEADS, QUERIES, SIZE)
EPS, SCALE = 1e-3, 0.7


def random_norm(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(SIZE, EPS).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
    return norm


def table_of(positions: int, dtype: torch.dtype = torch.float32) -> Rotation:
    cos, sin = rotation(torch.randint(0, positions, (ROWS, TOKENS)), SIZE, 1e2)
    return cos.to(dtype), sin.to(dtype)


def naive(heads: Tensor, norm: RMSNorm, table: Rotation) -> Tensor:
    """The formula, in fp64."""
    wide, weight = heads.double(), norm.weight.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    cos, sin = (part.double()[:, :, None, None] for part in table)
    first, second = normed.chunk(2, -1)
    return (torch.cat([first * cos - second * sin, second * cos + first * sin], -1) * SCALE).transpose(1, 2)


def at(position: int, head: Tensor) -> Tensor:
    """One head [D] rotated to a position."""
    return rotate(head.view(1, 1, 1, 1, -1), rotation(torch.tensor([[position]]), len(head), 1e4)).flatten()


def test_rotation_turns_pairs_of_the_two_halves_by_position_times_frequency() -> None:
    theta, positions = 100.0, (0, 1, 5)
    heads = torch.randn(1, 3, 1, 2, SIZE)
    out = rotate(heads, rotation(torch.tensor([positions]), SIZE, theta))
    assert torch.equal(out[:, 0], heads[:, 0])
    for token, position in enumerate(positions):
        for pair in range(SIZE // 2):
            angle = torch.tensor(position * theta ** (-2 * pair / SIZE))
            first, second = heads[0, token, 0, :, pair], heads[0, token, 0, :, pair + SIZE // 2]
            turned = out[0, token, 0]
            torch.testing.assert_close(turned[:, pair], first * angle.cos() - second * angle.sin())
            torch.testing.assert_close(turned[:, pair + SIZE // 2], second * angle.cos() + first * angle.sin())


def test_the_gradient_of_a_rotation_equals_finite_differences() -> None:
    table = table_of(11, torch.float64)
    heads = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, table, SCALE), [heads])


def test_scores_depend_on_the_distance_of_positions_alone() -> None:
    query, key = torch.randn(2, SIZE)
    near, far = (at(start + 3, query) @ at(start, key) for start in (0, 500))
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_rotation_tables_stay_fp32_in_a_bf16_module() -> None:
    table = table_of(4)
    assert table[0].dtype == table[1].dtype == torch.float32
    heads = torch.randn(SHAPE).bfloat16()
    assert torch.equal(rotate(heads, table), rotate(heads.float(), table).bfloat16())


@pytest.mark.parametrize("piece", [1, 30, 1 << 17])
def test_norm_and_rotation_in_one_equal_the_two_in_turn(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", piece)
    norm, table = random_norm(torch.float64), table_of(500, torch.float64)
    heads = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    inputs, grad = [heads, norm.weight], torch.randn(SHAPE, dtype=torch.float64).transpose(1, 2)
    expected, found = rotate(norm(heads), table, SCALE).transpose(1, 2), norm_and_rotate(heads, norm, table, SCALE)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))


def test_gradients_of_norm_and_rotation_equal_finite_differences() -> None:
    norm, table = random_norm(torch.float64), table_of(11, torch.float64)
    heads = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda heads, _: norm_and_rotate(heads, norm, table, SCALE), [heads, norm.weight])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_and_their_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    norm, table = random_norm(dtype), table_of(500)
    heads = torch.randn(SHAPE).to(dtype).requires_grad_()
    inputs, found, exact = [heads, norm.weight], norm_and_rotate(heads, norm, table, SCALE), naive(heads, norm, table)
    grad = torch.randn(exact.shape).to(dtype)
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)
    for value, wide in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(exact, inputs, grad.double()), strict=True
    ):
        torch.testing.assert_close(value, wide, atol=1e-5, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)


def test_the_backward_pass_keeps_the_heads_one_number_each_and_the_angles() -> None:
    norm, table, kept = random_norm(torch.float32), table_of(5), []
    heads = torch.randn(SHAPE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        norm_and_rotate(heads, norm, table)
    heads_each, angles = heads.numel() // SIZE, ROWS * TOKENS * SIZE // 2
    assert sorted(kept) == sorted([SIZE, angles, angles, heads_each, heads.numel()])
