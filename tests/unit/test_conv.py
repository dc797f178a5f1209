"""The dynamic convolution inside a block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.model import pieces
from dflash2_train.model.conv import BlockConv, _convolve

BLOCKS, WIDTH, HIDDEN, GROUP = 3, 5, 12, 4
GROUPS = HIDDEN // GROUP


def random_conv(kernel_size: int = 2, dtype: torch.dtype = torch.float32) -> BlockConv:
    conv = BlockConv(HIDDEN, kernel_size, GROUP).to(dtype)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return conv


def naive(conv: BlockConv, source: Tensor, hidden: Tensor, side: int) -> Tensor:
    """One output channel at a time, straight from the published layout of the weights."""
    weight, kernel_size = conv.kernel_projection.weight, conv.kernel_size
    out = torch.zeros_like(source)
    for block in range(source.shape[0]):
        for slot in range(source.shape[1]):
            for channel in range(HIDDEN):
                for offset in range(min(kernel_size, slot + 1)):
                    row = (side * kernel_size + offset) * GROUPS + channel // GROUP
                    dynamic = weight[row] @ hidden[block, slot]
                    kernel = conv.base_kernel[side, offset, channel] + dynamic
                    out[block, slot, channel] += kernel * source[block, slot - offset, channel]
    return out


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
def test_both_sides_equal_a_naive_loop(kernel_size: int) -> None:
    conv = random_conv(kernel_size)
    hidden, output = torch.randn(2, BLOCKS, WIDTH, HIDDEN)
    with torch.no_grad():
        prepared, delta = conv.prepare(hidden)
        torch.testing.assert_close(prepared, naive(conv, hidden, hidden, 0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(conv.finish(output, delta), naive(conv, output, hidden, 1), atol=1e-5, rtol=1e-5)


def test_values_and_gradients_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = random_conv()
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN, requires_grad=True)
    inputs = [hidden, *conv.parameters()]

    def run() -> tuple[Tensor, ...]:
        prepared, delta = conv.prepare(hidden)
        out = conv.finish(prepared.sin(), delta)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    whole = run()
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1)
    torch.testing.assert_close(run(), whole)


def test_published_parameter_names_and_shapes() -> None:
    found = {name: tuple(parameter.shape) for name, parameter in BlockConv(HIDDEN, 2, GROUP).named_parameters()}
    assert found == {"base_kernel": (2, 2, HIDDEN), "kernel_projection.weight": (2 * 2 * GROUPS, HIDDEN)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_convolution_returns_its_input_bit_for_bit(dtype: torch.dtype) -> None:
    conv = BlockConv(HIDDEN, 2, GROUP).to(dtype)
    hidden, output = torch.randn(2, BLOCKS, WIDTH, HIDDEN).to(dtype)
    prepared, delta = conv.prepare(hidden)
    assert torch.equal(prepared, hidden)
    assert torch.equal(conv.finish(output, delta), output)


def test_a_slot_never_sees_another_block_or_a_later_slot() -> None:
    conv = random_conv()
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN)
    changed = hidden.clone()
    changed[0] += 1.0  # the block before
    changed[1, 3] += 1.0  # a slot of the block itself
    with torch.no_grad():
        before, after = conv.prepare(hidden)[0], conv.prepare(changed)[0]
    assert torch.equal(before[1, :3], after[1, :3])
    assert not torch.equal(before[1, 3], after[1, 3]) and not torch.equal(before[1, 4], after[1, 4])
    assert torch.equal(before[2], after[2])


def test_one_slot_is_a_block_of_its_own() -> None:
    conv = random_conv(kernel_size=3)
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN)
    with torch.no_grad():
        alone, whole = conv.prepare(hidden[:, :1])[0], conv.prepare(hidden)[0]
    torch.testing.assert_close(alone, whole[:, :1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("piece", [1, 1 << 17])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 5])
def test_gradients_equal_finite_differences(kernel_size: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", piece)
    conv = random_conv(kernel_size, torch.float64)
    hidden, output = (torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both_sides(hidden: Tensor, output: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        prepared, delta = conv.prepare(hidden)
        return prepared, conv.finish(output, delta)

    assert torch.autograd.gradcheck(both_sides, [hidden, output, *conv.parameters()], fast_mode=True)


def test_bf16_gradients_are_rounded_once() -> None:
    conv = random_conv(dtype=torch.bfloat16)
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN).bfloat16().requires_grad_()
    delta = torch.randn(BLOCKS, WIDTH, 2, GROUPS).bfloat16().requires_grad_()
    inputs = [hidden, delta, conv.base_kernel]
    grad = torch.randn(BLOCKS, WIDTH, HIDDEN).bfloat16()
    found = torch.autograd.grad(conv.finish(hidden, delta), inputs, grad)
    wide = [value.detach().double().requires_grad_() for value in inputs]
    exact = torch.autograd.grad(_convolve(wide[0], wide[1], wide[2][1]), wide, grad.double())
    for value, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=2**-8)


def test_bf16_sums_in_fp32_and_rounds_once() -> None:
    conv = random_conv(dtype=torch.bfloat16)
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN).bfloat16()
    with torch.no_grad():
        delta = conv.kernel_projection(hidden).unflatten(-1, (2, 2, GROUPS))[..., 0, :, :]
        kernel = conv.base_kernel[0].float() + delta.float().repeat_interleave(GROUP, -1)
        shifted = torch.cat([torch.zeros(BLOCKS, 1, HIDDEN), hidden[:, :-1].float()], 1)
        expected = (kernel[..., 0, :] * hidden.float() + kernel[..., 1, :] * shifted).bfloat16()
        assert torch.equal(conv.prepare(hidden)[0], expected)


def test_a_group_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size=5"):
        BlockConv(HIDDEN, 2, 5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler itself
def test_a_compiler_traces_it_in_one_piece_with_its_gradients() -> None:
    conv = random_conv()
    hidden = torch.randn(BLOCKS, WIDTH, HIDDEN, requires_grad=True)
    inputs = [hidden, *conv.parameters()]

    def both_sides(hidden: Tensor) -> Tensor:
        prepared, delta = conv.prepare(hidden)
        return conv.finish(prepared, delta).square().sum()

    traced = torch.compile(both_sides, backend="aot_eager", fullgraph=True)(hidden)
    expected, found = (torch.autograd.grad(value, inputs) for value in (both_sides(hidden), traced))
    torch.testing.assert_close(found, expected)
