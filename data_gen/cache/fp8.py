"""Tap states in eight bits: e4m3 codes and one factor a token and tap.

e4m3 is a floating-point format, so its rounding is relative: at most 1/16 of a value down to 2^-6 of the unit, whatever
the factor. The factor only has to bring a tap's largest value under 448. It is the smallest power of two that does, for
two reasons: a power of two costs no accuracy that another factor would keep (it moves the range, 2^14 to 2^15 wide
at full accuracy, by less than one of its fifteen octaves), and both multiplications are then exact, so that bf16 holds
the factor and the product without a second rounding.
A channel a hundred times larger than the rest, as residual streams have, takes seven of the fifteen octaves; the rest
of the row keeps its full relative accuracy.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 448.0
LARGEST_VALUE = 2.0**126  # decode multiplies the factor by 2^8, which must stay finite
SMALLEST_EXPONENT = -110  # a factor that bf16 holds as a normal number, times the smallest code too
ROWS_AT_ONCE = 128  # the working set of decode stays in a core's second-level cache
NAN_CODE = 0x7F


def encode(states: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Codes and factors of tap states; nothing overflows and an all-zero tap stays zero.

    Args:
        states: [S, T*H] bf16, finite.
        num_taps: T.

    Returns:
        codes [S, T*H] float8_e4m3fn and factors [S, T] bf16.

    Raises:
        ValueError: a value is not finite, or beyond 2^126.
    """
    taps = states.reshape(len(states), num_taps, -1)  # [S, T, H]
    largest = taps.abs().amax(-1).float()  # [S, T]; nan if any value is
    if not bool((largest < LARGEST_VALUE).all()):
        raise ValueError("tap states that are not finite, or beyond 2^126")
    exponents = torch.frexp(largest / LARGEST_CODE).exponent.clamp_min(SMALLEST_EXPONENT)  # largest / 2^e < 448
    inverse = torch.ldexp(torch.ones_like(largest), -exponents).to(states.dtype)
    codes = (taps * inverse[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    return codes, torch.ldexp(torch.ones_like(largest), exponents).to(torch.bfloat16)


def decode(codes: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Tap states of codes: every product exact, so the only error is that of :func:`encode`.

    PyTorch's own conversion of e4m3 on a CPU handles about 0.25 G values a second; this one, by bits through
    float16 (same layout, three more mantissa bits, bias larger by 8), about ten times as many.

    Args:
        codes: [S, T*H] float8_e4m3fn without its NaN code, which would read as 480.
        factors: [S, T] bf16.
        out: where to put the states, [S, T*H] bf16; new memory without it.

    Returns:
        states [S, T*H] bf16.
    """
    states = torch.empty(codes.shape, dtype=torch.bfloat16) if out is None else out
    num_taps, bits = factors.shape[-1], codes.view(torch.int8)
    scale = factors.float()[..., None] * 2.0**8  # [S, T, 1]
    for start in range(0, len(codes), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        half = bits[rows].to(torch.int16)  # sign-extended: bits 7 to 15 hold the sign
        half = half.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # sign, then exponent and mantissa at bits 7 to 13
        wide = half.view(torch.float16).float()
        wide.view(len(wide), num_taps, -1).mul_(scale[rows])
        states[rows] = wide
    return states


def has_nan(codes: Tensor) -> bool:
    """Does e4m3's NaN, which :func:`encode` never writes, stand among the codes?"""
    return bool((codes.view(torch.uint8).bitwise_and(NAN_CODE) == NAN_CODE).any())
