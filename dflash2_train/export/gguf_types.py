"""Values to a storage type of ggml and back, and how far a stored value may lie from its own.

Plain types are cast by torch; blocks of 32 values are quantised and read by the ``gguf`` package, whose routines follow
ggml's reference code. A block type keeps a scale (and, in the ``_1`` types, an offset) in fp16 a block, so an error is
a share of the block's largest value, not of the value itself.

Letters: n rows, m values a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash2_train.config import UserError

if TYPE_CHECKING:
    import numpy

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALF_ULP = {"BF16": 2.0**-8, "F16": 2.0**-11}  # of round to nearest, relative to the value
_F16_FLOOR = 2.0**-25  # half the distance between the smallest fp16 numbers
# Scale of a block = its largest magnitude / steps. Rounded values lie half a step away at most; where the range is
# lopsided (-8 .. 7), the far end of the short side is clipped by up to a whole one.
_SYMMETRIC = {"Q8_0": (127, 0.5), "Q5_0": (16, 1.0), "Q4_0": (8, 1.0)}
_OFFSET = {"Q5_1": 31, "Q4_1": 15}  # scale = (largest - smallest) / steps


class GgufError(UserError, ValueError):
    """A drafter that cannot become a GGUF file, or a file that is none; the text says what to do."""


def gguf_package() -> Any:
    """The ``gguf`` package, which only this format needs.

    Raises:
        GgufError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise GgufError("GGUF files need the gguf package: pip install 'dflash2-train[gguf]'.") from error
    return gguf


def encode(values: Tensor, kind: str, name: str) -> numpy.ndarray[Any, Any]:
    """Rows in a storage type.

    Args:
        values: [n, m] float, finite; m a whole number of blocks.
        kind: key of ``gguf_layout.STORAGE_TYPES``.
        name: of the tensor, for the error.

    Returns:
        [n, bytes] uint8.

    Raises:
        GgufError: a value is too large for F16.
    """
    if kind in PLAIN:
        cast = values.to(PLAIN[kind])
        if kind == "F16" and not bool(cast.isfinite().all()):
            raise GgufError(f"{name}: a value of {float(values.abs().max()):.3g} does not fit F16. Choose BF16.")
        return cast.contiguous().view(torch.uint8).numpy()
    gguf = gguf_package()
    packed: numpy.ndarray[Any, Any] = gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType[kind])
    return packed


def decode(stored: numpy.ndarray[Any, Any], kind: str) -> Tensor:
    """Rows out of any storage type that the ``gguf`` package reads, float32 [n, m].

    Args:
        stored: [n, bytes] uint8, or [n, m] where the reader has typed it (F32, F16).
        kind: ggml's name of the type.

    Raises:
        GgufError: the package does not read this type.
    """
    raw = stored.copy().view("uint8")  # a mapped file is read-only, and torch would warn
    if kind in PLAIN:
        return torch.from_numpy(raw).view(PLAIN[kind]).float()
    gguf = gguf_package()
    try:
        return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    except NotImplementedError as error:
        raise GgufError(f"values of type {kind} cannot be read: {error}. Use a file of another type.") from error


def error_bound(values: Tensor, kind: str) -> Tensor:
    """The largest error that storing may make, per value, float32 [n, m] or broadcastable to it.

    Args:
        values: [n, m] as they were before.
        kind: key of ``gguf_layout.STORAGE_TYPES``.
    """
    exact = values.float()
    if kind == "F32":
        return torch.zeros_like(exact)
    if kind in _HALF_ULP:
        return exact.abs() * _HALF_ULP[kind] + (_F16_FLOOR if kind == "F16" else 0.0)
    blocks = exact.view(len(exact), -1, 32)  # [n, m / 32, 32]
    largest = blocks.abs().amax(-1, keepdim=True)
    if kind == "MXFP4":  # scale 2^e: the largest value lies in 4..8 scales, is clipped at 6, and 4 neighbours 6
        bound = largest / 4
    elif kind in _SYMMETRIC:
        steps, share = _SYMMETRIC[kind]
        bound = largest * (share / steps + _HALF_ULP["F16"]) + steps * _F16_FLOOR
    else:
        steps = _OFFSET[kind]
        extent = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)
        bound = extent * (0.5 / steps + _HALF_ULP["F16"]) + largest * _HALF_ULP["F16"] + (steps + 1) * _F16_FLOOR
    bound = bound * (1 + 2.0**-16) + 2.0**-100  # products and quotients in fp32 round too
    return bound.expand_as(blocks).reshape(exact.shape)
