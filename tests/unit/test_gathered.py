"""Products with chosen table rows equal those with all of them gathered at once, and so do their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash2_train.model.gathered import gathered_dots, gathered_rows
from dflash2_train.model.table_gradient import table_gradient

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
    monkeypatch.setattr("dflash2_train.model.table_gradient.PIECE_ELEMENTS", piece)
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


def test_gathered_rows_and_their_gradient_are_those_of_an_embedding() -> None:
    _, table, ids = problem(torch.float64)
    flat = ids.flatten()
    rows = gathered_rows(table, flat)
    assert torch.equal(rows, table[flat])
    slope = torch.arange(rows.numel(), dtype=torch.float64).view_as(rows).cos()
    expected = torch.autograd.grad(table[flat], table, slope)
    torch.testing.assert_close(torch.autograd.grad(rows, table, slope), expected)


def test_the_gradient_of_a_row_that_many_slots_share_is_rounded_once() -> None:
    """Sums in bf16 would stand still where a term is less than half a unit of the last place."""
    table = torch.zeros(V, H, dtype=torch.bfloat16)
    states = torch.full((1000, H), 1.0 + 2.0**-7).bfloat16()
    gradient = table_gradient(table, torch.full((1000, 1), 3), states)
    assert torch.equal(gradient[3], states.double().sum(0).bfloat16())
    assert not gradient[torch.arange(V) != 3].any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's count of resident pages")
def test_rows_without_a_gradient_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    table = torch.empty(100_000, 256)  # never written, so it takes none either
    before = resident()
    gradient = table_gradient(table, torch.tensor([[7], [99_999]]), torch.ones(2, 256))
    assert resident() - before < gradient.numel() * gradient.element_size() // 4
    assert float(gradient[7].sum()) == 256.0
