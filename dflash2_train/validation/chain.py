"""Where a server would start its blocks.

It starts at the first token that the target writes, and each further block starts at the token that ended the round
before: with m drafts accepted behind anchor a, at a + m + 1. Given the accepted count of a block at every anchor, the
chain is a walk over positions and needs no further forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def served_blocks(anchors: Tensor, num_accepted: Tensor) -> Tensor:
    """Which blocks of a row a server would start, document after document.

    Where no block can start at the end of a round, an answer is over, and the next one begins at its first anchor. As
    anchors ascend and no round runs into another document, both are the first anchor at or behind that place.

    Args:
        anchors: [n] int64, every place of a row where a block can start, ascending.
        num_accepted: [n] int64, accepted drafts of a block there.

    Returns:
        [n] bool.
    """
    following = torch.searchsorted(anchors, anchors + num_accepted + 1).tolist()
    started = [False] * len(anchors)
    block = 0
    while block < len(started):
        started[block] = True
        block = following[block]
    return torch.tensor(started, dtype=torch.bool)
