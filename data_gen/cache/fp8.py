"""Tap states in eight bits: e4m3 codes and one factor a token and tap.

The factor takes a tap's largest value to 448, the largest code. e4m3 is a floating-point format, so its rounding is
relative: at most 1/16 of a value, wherever it lies in the upper fifteen octaves of the tap's range. A channel a hundred
times larger than the rest, as residual streams have, takes seven of these; the rest of the row keeps its full relative
accuracy, and the largest value, which carries most of such a row's norm, is exact. (A power of two as factor would save
two bytes and a rounding, and give that up: on SmolLM2's taps the error of whole rows grows by a third to twofold.) The
factor is fp32, so that dividing by it and multiplying again adds next to nothing; it costs 4 bytes beside H codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 448.0
LARGEST_VALUE = 2.0**126  # decode multiplies the factor by 2^8, and nothing on the way may overflow
SMALLEST_FACTOR = 2.0**-110  # far from fp32's subnormals, which some libraries switch off in the whole process
VALUES_AT_ONCE = 1 << 19  # the 3 MiB of intermediate values of decode stay in a core's cache
NAN_CODE = 0x7F


def largest_magnitudes(states: Tensor, num_taps: int) -> Tensor:
    """Largest absolute value of each token's tap, [S, T] bf16; nan or inf if one of its values is.

    Two reductions that read the states once each: isfinite() and abs() over bf16 write whole intermediate tensors and
    are ten to fifty times slower, too slow to look at everything that is captured.
    """
    taps = states.reshape(len(states), num_taps, -1)  # [S, T, H]
    return torch.maximum(taps.amax(-1), -taps.amin(-1))


def encode(states: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Codes and factors of tap states; nothing overflows and an all-zero tap stays zero.

    Args:
        states: [S, T*H] bf16, finite.
        num_taps: T.

    Returns:
        codes [S, T*H] float8_e4m3fn and factors [S, T] fp32.

    Raises:
        ValueError: a value is not finite, or beyond 2^126.
    """
    taps = states.reshape(len(states), num_taps, -1)  # [S, T, H]
    largest = largest_magnitudes(states, num_taps).float()  # [S, T]
    if not bool((largest < LARGEST_VALUE).all()):
        raise ValueError("tap states that are not finite, or beyond 2^126")
    factors = (largest / LARGEST_CODE).clamp_min(SMALLEST_FACTOR)
    inverse = factors.reciprocal()[..., None]
    codes = torch.empty(taps.shape, dtype=torch.float8_e4m3fn)
    piece = _rows_at_once(states)
    buffer = torch.empty(piece, *taps.shape[1:])
    for start in range(0, len(states), piece):
        rows = slice(start, start + piece)
        scaled = buffer[: len(taps[rows])].copy_(taps[rows]).mul_(inverse[rows])
        codes[rows] = scaled.clamp_(-LARGEST_CODE, LARGEST_CODE)  # the division's last bit may lie beyond
    return codes.flatten(1), factors


def decode(codes: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Tap states of codes.

    PyTorch's own conversion of e4m3 on a CPU handles about 0.25 G values a second; this one, by bits through
    float16 (same layout, three more mantissa bits, bias larger by 8), about ten times as many.

    Args:
        codes: [S, T*H] float8_e4m3fn without its NaN code, which would read as 480.
        factors: [S, T] fp32.
        out: where to put the states, [S, T*H] bf16; new memory without it.

    Returns:
        states [S, T*H] bf16.
    """
    states = torch.empty(codes.shape, dtype=torch.bfloat16) if out is None else out
    num_taps, bits = factors.shape[-1], codes.view(torch.int8)
    scale = factors[..., None] * 2.0**8  # [S, T, 1]
    piece = _rows_at_once(codes)
    halves = torch.empty(piece, codes.shape[-1], dtype=torch.int16)
    wides = torch.empty(piece, codes.shape[-1], dtype=torch.float32)
    for start in range(0, len(codes), piece):
        rows = slice(start, start + piece)
        half, wide = halves[: len(bits[rows])], wides[: len(bits[rows])]
        half.copy_(bits[rows])  # sign-extended: bits 7 to 15 hold the sign
        half.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # sign, then exponent and mantissa at bits 7 to 13
        wide.copy_(half.view(torch.float16))
        wide.view(len(wide), num_taps, -1).mul_(scale[rows])
        states[rows] = wide
    return states


def has_nan(codes: Tensor) -> bool:
    """Does e4m3's NaN, which :func:`encode` never writes, stand among the codes?"""
    piece, bits = _rows_at_once(codes), codes.view(torch.uint8)
    starts = range(0, len(codes), piece)
    return any(int((bits[start : start + piece] << 1).amax()) == NAN_CODE << 1 for start in starts)  # without the sign


def _rows_at_once(states: Tensor) -> int:
    return min(max(1, VALUES_AT_ONCE // states.shape[-1]), len(states))
