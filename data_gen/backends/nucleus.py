"""Top-p filtering without sorting the vocabulary.

The nucleus of a row is the smallest set of most probable tokens whose mass reaches ``top_p``: a token stays
if the tokens ranked above it hold less than ``top_p``. Sorting 49,152 logits a row costs several times the
forward pass of a small target on a CPU. The nucleus is nearly always a few hundred tokens, so the rule is
applied to the top ``FIRST_WIDTH`` probabilities; rows whose mass there falls short are done again with a
wider cut and in the end with the whole vocabulary. The result is the same set at every width, because the
probabilities are those of the full softmax.
"""

from __future__ import annotations

import torch

FIRST_WIDTH = 256  # tokens looked at in the first pass; a wider pass follows for the rows that need it
WIDEN = 8  # factor between passes


def keep_nucleus_(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the logits outside each row's nucleus to -inf, in place.

    Args:
        logits: [N, V] float32, temperature applied.
        top_p: [N] float32 in (0, 1]; rows with 1 are left as they are.

    Returns:
        ``logits``.
    """
    rows = torch.nonzero(top_p < 1.0).flatten()  # [M]
    if rows.numel() == 0:
        return logits
    everything = rows.numel() == logits.shape[0]
    probabilities = (logits if everything else logits[rows]).softmax(dim=-1, dtype=torch.float32)  # [M, V]
    width = FIRST_WIDTH
    while rows.numel():
        width = min(width, logits.shape[1])
        values, ids = probabilities.topk(width, dim=-1)  # [M, width], descending
        above = values.cumsum(dim=-1) - values  # mass ranked before each token
        keep = above < top_p[rows, None]
        keep[:, 0] = True
        done = ~keep[:, -1] | (width == logits.shape[1])
        _write_rows(logits, rows[done], ids[done], keep[done])
        rows, probabilities = rows[~done], probabilities[~done]
        width *= WIDEN
    return logits


def _write_rows(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor) -> None:
    """Leave only the kept ids of ``rows``; ``ids`` and ``keep`` are [len(rows), width]."""
    if rows.numel() == 0:
        return
    kept = logits[rows[:, None], ids].masked_fill_(~keep, -torch.inf)
    logits[rows] = -torch.inf
    logits[rows[:, None], ids] = kept
