"""RMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash2_train.model import pieces
from dflash2_train.model.norm import RMSNorm


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


@pytest.mark.parametrize("piece", [1, 30, 1 << 17])
def test_values_and_gradients_do_not_depend_on_the_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", piece)
    module = RMSNorm(10, 1e-3).double()
    with torch.no_grad():
        module.weight.normal_()
    hidden = torch.randn(2, 4, 10, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 4, 10, dtype=torch.float64)
    inputs = [hidden, module.weight]
    expected = F.rms_norm(hidden, (10,), module.weight, 1e-3)
    found = module(hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))


def test_bf16_gradients_are_rounded_once() -> None:
    module = RMSNorm(24, 1e-3).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
    inputs, grad = [torch.randn(5, 24).bfloat16().requires_grad_(), module.weight], torch.randn(5, 24).bfloat16()
    wide = [value.detach().double().requires_grad_() for value in inputs]
    exact = torch.autograd.grad(F.rms_norm(wide[0], (24,), wide[1], 1e-3), wide, grad.double())
    for value, expected in zip(torch.autograd.grad(module(inputs[0]), inputs, grad), exact, strict=True):
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=2**-8)


def test_the_backward_pass_keeps_the_input_and_one_number_a_row() -> None:
    hidden, kept = torch.randn(6, 10, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        RMSNorm(10, 1e-3)(hidden)
    assert sorted(kept) == [6, 10, 60]
