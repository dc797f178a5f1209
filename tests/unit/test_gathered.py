"""Products with chosen table rows equal those with all of them gathered at once, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.model.gathered import gathered_dots

N, C, V, H = 7, 3, 11, 4


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    table = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(V, (N, C), generator=generator)
    ids[0], ids[3] = 5, 5  # a table row that many slots share collects all their gradients
    return states, table, ids


@pytest.mark.parametrize("piece", [1, C * H * 2, 1 << 20])
def test_dots_and_both_gradients_are_those_of_the_formula(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2_train.model.gathered.PIECE_ELEMENTS", piece)
    states, table, ids = problem(torch.float64)
    expected = (table[ids] * states.unsqueeze(1)).sum(-1)
    dots = gathered_dots(states, table, ids)
    torch.testing.assert_close(dots, expected)
    slope = torch.arange(N * C, dtype=torch.float64).view(N, C).cos()
    for found, wanted in zip(
        torch.autograd.grad(dots, (states, table), slope),
        torch.autograd.grad(expected, (states, table), slope),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_a_frozen_table_gets_no_gradient_and_sixteen_bits_give_fp32_dots() -> None:
    states, table, ids = problem(torch.bfloat16)
    dots = gathered_dots(states, table.detach(), ids)
    assert dots.dtype == torch.float32
    (gradient,) = torch.autograd.grad(dots.sum(), states)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), table[ids].float().sum(1), rtol=1e-2, atol=1e-2)


def test_single_precision_states_meet_a_table_of_sixteen_bits() -> None:
    states, table, ids = problem(torch.bfloat16)
    wide = states.detach().float().requires_grad_()
    dots = gathered_dots(wide, table, ids)
    torch.testing.assert_close(dots, (table[ids].float() * wide.unsqueeze(1)).sum(-1))
    by_states, by_table = torch.autograd.grad(dots.sum(), (wide, table))
    assert (by_states.dtype, by_table.dtype) == (torch.float32, torch.bfloat16)


def test_no_row_is_no_error() -> None:
    states, table, _ = problem(torch.float32)
    dots = gathered_dots(states[:0], table, torch.zeros(0, C, dtype=torch.int64))
    assert dots.shape == (0, C)
    assert not bool(torch.autograd.grad(dots.sum(), table)[0].any())
