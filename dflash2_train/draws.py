"""Random numbers that belong to things, not to the order in which they are asked for.

A draw is a function of a seed, a purpose, a sample id and a few counters (a position, a slot, a step). So it is the
same on any rank, in any batch, packed or alone, and after a resume. Sample ids enter through SHA-256; counters through
the finaliser of SplitMix64, which is plain integer arithmetic on tensors.

Letters: B rows, D documents a row at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def document_keys(
    sample_ids: Sequence[Sequence[str]], *, seed: int, purpose: str, device: torch.device | str = "cpu"
) -> Tensor:
    """One 63-bit key per document, [B, D] int64; 0 where a row has fewer documents.

    Args:
        sample_ids: of each row's documents.
        seed: of the run.
        purpose: what is drawn; draws for different purposes are independent.
        device: of the result.
    """
    width = max((len(row) for row in sample_ids), default=0)
    rows = [[_key(f"{purpose}/{seed}/{name}") for name in row] + [0] * (width - len(row)) for row in sample_ids]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(sample_ids), width)


def uniform(keys: Tensor, *counters: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), fp64, one for each combination of a key and its counters (broadcast together)."""
    state = _mix(keys)
    for counter in counters:
        counter = torch.as_tensor(counter, dtype=torch.int64, device=keys.device)
        state = _mix(state + (counter + 1) * _GOLDEN)  # int64 arithmetic wraps around, as the hash wants
    return _shifted(state, 11).double() * 2.0**-53


def gumbel(keys: Tensor, *counters: Tensor | int) -> Tensor:
    """Gumbel noise, fp64: adding it to scores makes their argmax a draw from softmax(scores)."""
    return -torch.log(-torch.log(uniform(keys, *counters).clamp(2.0**-53, 1.0 - 2.0**-53)))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: a signed number


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)
