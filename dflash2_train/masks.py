"""The one rule of what a block may see of its context.

Slot i of a block anchored at position a of document d sees context key j if and only if

    document(j) == d   and   position(j) < a   and   (full attention, or (a + i) - position(j) < window)

Positions are counted in the document. The anchor's own target state is not yet known when it is drafted from, hence
strictly before. The window counts the current token, as servers do. Among block keys there is nothing to mask: a block
sees all of itself, in both directions (the window is at least the block size), and no other block.

Padding has document -1 and padding blocks see no context at all.

Letters: B rows, A blocks a row, W block size, S context tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def context_mask(
    anchor_positions_local: Tensor,
    block_document_ids: Tensor,
    block_valid: Tensor,
    position_ids: Tensor,
    document_ids: Tensor,
    block_size: int,
    sliding_window: int | None,
) -> Tensor:
    """Which context keys each slot of each block sees.

    Args:
        anchor_positions_local: [B, A] position of the anchor in its document.
        block_document_ids: [B, A] document of the anchor.
        block_valid: [B, A] bool; False = padding, sees nothing.
        position_ids: [B, S] position in the document.
        document_ids: [B, S], padding -1.
        block_size: W.
        sliding_window: None for full attention.

    Returns:
        bool, [B, A, 1, S] for full attention (all slots see the same keys), else [B, A, W, S]. True = visible.
    """
    anchors = anchor_positions_local.unsqueeze(-1)  # [B, A, 1]
    keys = position_ids.unsqueeze(1)  # [B, 1, S]
    same_document = block_document_ids.unsqueeze(-1) == document_ids.unsqueeze(1)  # [B, A, S]
    visible = (same_document & (keys < anchors) & block_valid.unsqueeze(-1)).unsqueeze(2)  # [B, A, 1, S]
    if sliding_window is None:
        return visible
    slots = torch.arange(block_size, device=position_ids.device)[:, None]  # [W, 1]
    # (a + i) - j < window, with the [B, A, S] difference made once
    return visible & ((anchors - keys).unsqueeze(2) < sliding_window - slots)  # [B, A, W, S]


def context_masks(
    layer_types: Iterable[str],
    sliding_window: int | None,
    *,
    anchor_positions_local: Tensor,
    block_document_ids: Tensor,
    block_valid: Tensor,
    position_ids: Tensor,
    document_ids: Tensor,
    block_size: int,
) -> dict[str, Tensor]:
    """:func:`context_mask` for every layer type that occurs, keyed as ``Drafter.forward`` takes them.

    Raises:
        ValueError: a sliding layer without a window.
    """
    masks: dict[str, Tensor] = {}
    for kind in set(layer_types):
        sliding = kind == "sliding_attention"
        if sliding and sliding_window is None:
            raise ValueError("sliding_window=None: a sliding_attention layer needs a window.")
        masks[kind] = context_mask(
            anchor_positions_local,
            block_document_ids,
            block_valid,
            position_ids,
            document_ids,
            block_size,
            sliding_window if sliding else None,
        )
    return masks
