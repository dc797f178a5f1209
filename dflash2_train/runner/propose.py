"""Drafting blocks: [anchor, mask x K] a row -> drafter -> unary top-C -> selector path.

The drafter's context is the projected tap state of every committed token *before* the anchor, kept as rotated keys
and values in buffers of the final size. A token counts once the target has committed it; what was stored of rejected
ones lies beyond the row's length, is seen by nobody and written over by the next round. Before each draft the context
must be exactly as long as the anchor's position, which is asserted: a missing or stale token lowers acceptance without
any other sign.

With K below block_size - 1 the block is simply shorter (1 + K slots), as servers run it.

Letters: B rows, S context tokens, W = 1 + K, T taps, H hidden, K drafted, C candidates, V vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash2_train.config import ConfigError
from dflash2_train.masks import ContextSpans
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner.verify import DraftDistribution


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """K drafted tokens a row and what they were drawn from."""

    draft_ids: Tensor  # [B, K] int64
    distribution: DraftDistribution | None  # ([B, K, C], [B, K, C]); None = argmax proposals


class Proposer(Protocol):
    """What the decoding loop asks of a drafter on a batch of prompts."""

    def start(self, row: int, tap_hidden: Tensor) -> None:
        """Take the taps [S, T*H] of the whole prompt of an empty row."""

    def observe(self, tap_hidden: Tensor, num_kept: Sequence[int]) -> None:
        """Take the taps [B, n, T*H] of the last block, of which ``num_kept`` tokens were committed, per row."""

    def propose(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int]) -> Proposal:
        """Draft the tokens after the anchors, which are the last committed tokens."""

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Drop all rows but ``indices``, ascending."""


class DraftContext:
    """Keys and values of the committed tokens, per drafter layer, in buffers allocated once.

    Args:
        num_layers: drafter layers.
        num_rows: B.
        capacity: tokens that a row will hold at most, the rejected ones of its last block included.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * num_rows
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def write(self, rows: Sequence[int], positions: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store n tokens behind each of ``rows``.

        Args:
            rows: which.
            positions: [len(rows), n] int64, from each row's length on.
            layers: keys and values [len(rows), Hkv, n, D] of every layer.
        """
        ends = [self.lengths[row] + positions.shape[1] for row in rows]
        assert max(ends) <= self.capacity, f"drafter context of {self.capacity} tokens cannot take {max(ends)}"
        row_ids = torch.tensor(rows, device=positions.device)[:, None]  # [rows, 1]
        for index, (keys, values) in enumerate(layers):
            buffer = self._buffers[index]
            if buffer is None:
                shape = (len(self.lengths), keys.shape[1], self.capacity, keys.shape[3])
                buffer = self._buffers[index] = (keys.new_zeros(shape), values.new_zeros(shape))
            for store, new in zip(buffer, (keys, values), strict=True):
                if len(rows) == 1:  # a prompt, or one row alone: one slice
                    store[rows[0], :, self.lengths[rows[0]] : ends[0]] = new[0]
                else:
                    store[row_ids, :, positions] = new.transpose(1, 2)  # [rows, n, Hkv, D]

    def commit(self, row: int, num_tokens: int) -> None:
        """Count the first ``num_tokens`` of what was stored last behind ``row``."""
        self.lengths[row] += num_tokens

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, longest row, D] a layer, without a copy."""
        filled = [buffer for buffer in self._buffers if buffer is not None]
        assert len(filled) == len(self._buffers), (
            "drafter context is empty: feed the prompt's taps before the first draft"
        )
        longest = max(self.lengths)
        return [(keys[:, :, :longest], values[:, :, :longest]) for keys, values in filled]

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Drop all rows but ``indices``."""
        self.lengths = [self.lengths[index] for index in indices]
        self._buffers = [None if pair is None else (pair[0][indices], pair[1][indices]) for pair in self._buffers]


class DraftProposer:
    """A drafter on a batch of prompts (:class:`Proposer`).

    Args:
        drafter: in evaluation mode.
        embedding_weight: the target's input embedding [V, H].
        head: the target's output head, [..., H] -> [..., V] logits.
        num_drafted: K, 1..block_size - 1.
        num_rows: B.
        capacity: tokens of context and block that a row holds at most.
        temperature: 0 walks the selector greedily; above 0 samples the path and reports its q.
        generator: randomness of the sampled walk.

    Raises:
        ConfigError: K outside its range, or weights of another dtype than the drafter's.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        embedding_weight: Tensor,
        head: nn.Module,
        num_drafted: int,
        num_rows: int = 1,
        capacity: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        shape = drafter.shape
        if not 1 <= num_drafted <= shape.block_size - 1:
            raise ConfigError(
                f"num_drafted={num_drafted}: a drafter of block_size {shape.block_size} (anchor included) proposes 1 "
                f"to {shape.block_size - 1} tokens a round. Lower it, or train with a larger block."
            )
        check_dtypes(drafter, embedding_weight, head)
        self._drafter = drafter
        self._embedding_weight = embedding_weight
        self._head = head
        self._head_device = next(head.parameters()).device
        self._num_drafted = num_drafted
        self._temperature = temperature
        self._generator = generator
        self._context = DraftContext(shape.num_layers, num_rows, capacity)
        self._device = drafter.fc.weight.device
        self._slots = torch.arange(num_drafted + 1, device=self._device)  # [W]

    @property
    def context_lengths(self) -> list[int]:
        """Committed tokens that the drafter can see, per row."""
        return self._context.lengths

    def start(self, row: int, tap_hidden: Tensor) -> None:
        """See :class:`Proposer`."""
        assert self._context.lengths[row] == 0, f"row {row} of the drafter context is not empty"
        self._store([row], tap_hidden[None])
        self._context.commit(row, tap_hidden.shape[0])

    def observe(self, tap_hidden: Tensor, num_kept: Sequence[int]) -> None:
        """See :class:`Proposer`."""
        self._store(list(range(len(num_kept))), tap_hidden[:, : max(num_kept)])
        for row, kept in enumerate(num_kept):
            self._context.commit(row, kept)

    def _store(self, rows: Sequence[int], tap_hidden: Tensor) -> None:
        """Project taps [len(rows), n, T*H] and store them behind ``rows``."""
        starts = torch.tensor([self._context.lengths[row] for row in rows], device=self._device)
        positions = starts[:, None] + torch.arange(tap_hidden.shape[1], device=self._device)  # [B, n]
        taps = tap_hidden.to(self._device, self._drafter.fc.weight.dtype)
        context = self._drafter.encode_context(taps)  # [B, n, H]
        self._context.write(rows, positions, self._drafter.project_context(context, positions))

    def propose(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int]) -> Proposal:
        """See :class:`Proposer`."""
        hidden = self._block_hidden(anchor_ids, anchor_positions)[:, 1:]  # [B, K, H]; the anchor's row is not used
        unary, candidate_ids = self._candidates(hidden)
        path_ids, q = self._drafter.candidate_selector.walk(
            hidden,
            unary,
            candidate_ids,
            torch.tensor(anchor_ids, device=self._device),
            temperature=self._temperature,
            generator=self._generator,
        )
        sampled = self._temperature > 0
        return Proposal(draft_ids=path_ids, distribution=DraftDistribution(candidate_ids, q) if sampled else None)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """See :class:`Proposer`."""
        self._context.keep_rows(list(indices))

    def _block_hidden(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int]) -> Tensor:
        lengths = self._context.lengths
        assert list(anchor_positions) == lengths, (
            f"drafter context covers {lengths} tokens, but the anchors stand at positions {list(anchor_positions)}: "
            "every committed token before an anchor must have been observed exactly once"
        )
        starts = torch.tensor(lengths, device=self._device)[:, None]  # [B, 1]
        return self._drafter.decode_block(
            self._block_embeddings(anchor_ids),
            starts + self._slots,  # [B, W]
            self._context.views(),
            self._visible(starts),
        )

    def _block_embeddings(self, anchor_ids: Sequence[int]) -> Tensor:
        """[B, W, H]: the anchor's embedding row, looked up where the target keeps it, then K mask vectors."""
        mask = self._drafter.mask_embedding
        ids = torch.tensor(anchor_ids, device=self._embedding_weight.device)
        rows = functional.embedding(ids, self._embedding_weight).to(mask.device)  # [B, H]
        is_mask = (ids == self._drafter.shape.mask_token_id)[:, None].to(mask.device)
        embeddings = mask.expand(len(anchor_ids), self._num_drafted + 1, -1).clone()
        embeddings[:, 0] = torch.where(is_mask, mask, rows)
        return embeddings

    def _visible(self, starts: Tensor) -> dict[str, ContextSpans] | None:
        """Which context keys each slot sees, per kind of layer; None = all, the usual case for one row."""
        shape, lengths = self._drafter.shape, self._context.lengths
        longest, window = max(lengths), shape.sliding_window
        if min(lengths) == longest and (window is None or longest + len(self._slots) <= window):
            return None
        kinds: dict[str, ContextSpans] = {}
        for kind in set(shape.layer_types):
            first = torch.zeros_like(starts)  # [B, 1]
            if kind == "sliding_attention":
                assert window is not None  # the shape is checked
                # the first j with (a + i) - j < window, as in masks.context_spans
                first = (starts + self._slots - (window - 1)).clamp_min(0)  # [B, W]
            first = torch.minimum(first, starts)
            kinds[kind] = ContextSpans(first=first[:, None], stop=starts, num_keys=longest)
        return kinds

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The C best unary logits of each slot, float32, and their ids: [B, K, H] -> [B, K, C] twice.

        Scale and soft cap are increasing functions, so they are applied to the C kept values alone.
        """
        shape = self._drafter.shape
        logits = self._head(hidden.to(self._head_device))  # [B, K, V]
        unary, candidate_ids = (one.to(self._device) for one in logits.topk(shape.selector_top_k, dim=-1))
        unary = unary.float() * shape.output_multiplier
        cap = shape.final_logit_softcapping
        if cap is not None:
            unary = torch.tanh(unary / cap) * cap
        return unary, candidate_ids


def check_dtypes(drafter: Drafter, embedding_weight: Tensor, head: nn.Module) -> None:
    """Refuse weights of unlike dtypes.

    Raises:
        ConfigError: names the three dtypes.
    """
    dtype, head_dtype = drafter.fc.weight.dtype, next(head.parameters()).dtype
    if head_dtype != dtype or embedding_weight.dtype != dtype:
        raise ConfigError(
            f"drafter dtype {dtype}, target embedding {embedding_weight.dtype} and head {head_dtype} differ. Load both "
            "models in the same dtype."
        )
