"""The one rule of what a block may see of its context.

Slot i of a block anchored at position a of document d sees context key j if and only if

    document(j) == d   and   position(j) < a   and   (full attention, or (a + i) - position(j) < window)

Positions are counted in the document. The anchor's own target state is not yet known when it is drafted from, hence
strictly before. The window counts the current token, as servers do. Among block keys there is nothing to mask: a block
sees all of itself, in both directions (the window is at least the block size), and no other block.

Padding has document -1 and padding blocks see no context at all.

A packed row holds its documents one after the other with positions that ascend by one, so the keys that a slot sees
are a run of neighbours. That run, :class:`ContextSpans`, is all that attention needs to know: [A, W] numbers in place
of an [A, W, S] mask. Every attention path is built from it, and so is the dense mask of the reference.

Letters: B rows, A blocks a row, W block size, S context tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ContextSpans:
    """Which context keys each slot of each block sees: those at ``first <= index < stop`` of its row.

    A block that sees nothing has ``first == stop``; padding blocks have both at 0.
    """

    first: Tensor  # [B, A, W] int64, or [B, A, 1] where all slots see the same keys; ascending over slots
    stop: Tensor  # [B, A] int64
    num_keys: int  # S

    def dense(self) -> Tensor:
        """The mask as such, bool [B, A, W | 1, S]; True = visible."""
        keys = torch.arange(self.num_keys, device=self.first.device)
        return (keys >= self.first.unsqueeze(-1)) & (keys < self.stop[..., None, None])


def context_spans(
    anchor_positions_local: Tensor,
    block_document_ids: Tensor,
    block_valid: Tensor,
    position_ids: Tensor,
    document_ids: Tensor,
    block_size: int,
    sliding_window: int | None,
) -> ContextSpans:
    """Which context keys each slot of each block sees, in rows that pass :func:`check_packing`.

    Args:
        anchor_positions_local: [B, A] position of the anchor in its document; may lie behind the row's last token.
        block_document_ids: [B, A] document of the anchor.
        block_valid: [B, A] bool; False = padding, sees nothing.
        position_ids: [B, S] position in the document.
        document_ids: [B, S], padding -1.
        block_size: W.
        sliding_window: None for full attention.
    """
    start, count = _locate(block_document_ids, document_ids)  # [B, A] each
    count = count.masked_fill(~block_valid | (block_document_ids < 0), 0)
    start = start.masked_fill(count == 0, 0)
    shift = _gather(position_ids, start) - start  # position = index + shift inside the document
    stop = torch.minimum(anchor_positions_local - shift, start + count).clamp_min(start)
    first = start.unsqueeze(-1)  # [B, A, 1]
    if sliding_window is not None:
        slots = torch.arange(block_size, device=position_ids.device)
        # the first j with (a + i) - position(j) < window
        nearest = (anchor_positions_local - shift).unsqueeze(-1) + slots - (sliding_window - 1)
        first = torch.maximum(first, nearest)  # [B, A, W]
    return ContextSpans(first=torch.minimum(first, stop.unsqueeze(-1)), stop=stop, num_keys=position_ids.shape[1])


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
) -> dict[str, ContextSpans]:
    """:func:`context_spans` for every layer type that occurs, keyed as ``Drafter.forward`` takes them.

    Raises:
        ValueError: a sliding layer without a window, or a row that is not packed as above.
    """
    check_packing(position_ids, document_ids)
    masks: dict[str, ContextSpans] = {}
    for kind in sorted(set(layer_types)):
        sliding = kind == "sliding_attention"
        if sliding and sliding_window is None:
            raise ValueError("sliding_window=None: a sliding_attention layer needs a window.")
        masks[kind] = context_spans(
            anchor_positions_local,
            block_document_ids,
            block_valid,
            position_ids,
            document_ids,
            block_size,
            sliding_window if sliding else None,
        )
    return masks


def check_packing(position_ids: Tensor, document_ids: Tensor) -> None:
    """Refuse rows in which the keys of a document are no run of neighbours: spans would be wrong without an error.

    Raises:
        ValueError: names the first row that breaks the rule.
    """
    joined = document_ids[:, 1:] == document_ids[:, :-1]  # [B, S - 1]
    real = document_ids[:, 1:] >= 0
    steps = position_ids[:, 1:] - position_ids[:, :-1]
    ordered = document_ids.sort(dim=1).values
    runs = (~joined & real).sum(1)
    documents = ((ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1)
    # Where the row opens with padding, the first run is not counted above but its document is, and the reverse.
    opening = (document_ids[:, :1] >= 0).sum(1) - (ordered[:, :1] >= 0).sum(1)
    broken = (joined & real & (steps != 1)).any(1) | (runs + opening != documents)
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        raise ValueError(
            f"row {row}: the tokens of a document must be neighbours with positions that ascend by one. "
            "Pack whole documents one after the other."
        )


def _locate(block_document_ids: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first token of each block's document, and its number of tokens; [B, A] each."""
    ordered, order = document_ids.sort(dim=1, stable=True)
    wanted = block_document_ids.contiguous()
    left = torch.searchsorted(ordered, wanted)
    right = torch.searchsorted(ordered, wanted, right=True)
    return _gather(order, left), right - left


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """``source[b, index[b, a]]`` with the index held inside the row; zeros for a row without tokens."""
    if source.shape[1] == 0:
        return torch.zeros_like(index)
    return source.gather(1, index.clamp(0, source.shape[1] - 1))
