"""Batches of sequences of like length, the one place where a backend without a scheduler of its own makes them."""

from __future__ import annotations

from collections.abc import Sequence


def length_batches(lengths: Sequence[int], *, max_rows: int, max_tokens: int, equal: bool) -> list[list[int]]:
    """Cut sequences into batches, the longest first, so that a batch that does not fit shows at once.

    Args:
        lengths: tokens of each sequence.
        max_rows: sequences of a batch.
        max_tokens: of a batch, padding included; a longer sequence gets a batch of its own.
        equal: put only sequences of equal length together, so that nothing is padded.

    Returns:
        Places in ``lengths``; each occurs once.
    """
    batches: list[list[int]] = []
    widest = 0  # length of the open batch's first, longest sequence
    for place in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        batch = batches[-1] if batches else None
        fits = batch is not None and len(batch) < max_rows and widest * (len(batch) + 1) <= max_tokens
        if batch is not None and fits and (not equal or lengths[place] == widest):
            batch.append(place)
        else:
            batches.append([place])
            widest = lengths[place]
    return batches
