"""Drafting one block: [anchor, mask x K] -> drafter -> unary top-C -> selector path.

The drafter's context is the projected tap state of every committed token *before* the anchor, kept as rotated keys
and values in buffers of the final size. A row enters once, when the target has committed its token; rows of rejected
tokens never do. Before each draft the context must therefore be exactly as long as the anchor's position, which is
asserted: a missing or stale row lowers acceptance without any other sign.

With K below block_size - 1 the block is simply shorter (1 + K slots), as servers run it.

Letters: S context tokens, T taps, H hidden, K drafted, C candidates, V vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dflash2_train.config import ConfigError
from dflash2_train.masks import ContextSpans, context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner.verify import DraftDistribution


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """K drafted tokens and what they were drawn from."""

    draft_ids: Tensor  # [K] int64
    distribution: DraftDistribution | None  # ([K, C], [K, C]); None = argmax proposals


class Proposer(Protocol):
    """What the decoding loop asks of a drafter on one prompt."""

    def observe(self, tap_hidden: Tensor) -> None:
        """Take the taps [n, T*H] of the n tokens that were committed next."""

    def propose(self, anchor_id: int, anchor_position: int) -> Proposal:
        """Draft the tokens after the anchor, which is the last committed token."""


class DraftContext:
    """Keys and values of the committed tokens, per drafter layer, in buffers allocated once.

    Args:
        num_layers: drafter layers.
        capacity: tokens that will ever be appended.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add n tokens: keys and values [1, Hkv, n, D] for every layer."""
        num_new = layers[0][0].shape[2]
        end = self.length + num_new
        assert end <= self.capacity, f"drafter context of {self.capacity} tokens cannot take {end}"
        for index, (keys, values) in enumerate(layers):
            buffer = self._buffers[index]
            if buffer is None:
                shape = (*keys.shape[:2], self.capacity, keys.shape[3])
                buffer = self._buffers[index] = (keys.new_empty(shape), values.new_empty(shape))
            buffer[0][:, :, self.length : end] = keys
            buffer[1][:, :, self.length : end] = values
        self.length = end

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, Hkv, length, D] a layer, without a copy."""
        filled = [buffer for buffer in self._buffers if buffer is not None]
        assert len(filled) == len(self._buffers), (
            "drafter context is empty: feed the prompt's taps before the first draft"
        )
        return [(keys[:, :, : self.length], values[:, :, : self.length]) for keys, values in filled]


class DraftProposer:
    """A drafter on one prompt (:class:`Proposer`).

    Args:
        drafter: in evaluation mode.
        embedding_weight: the target's input embedding [V, H].
        head_weight: the target's output head [V, H].
        num_drafted: K, 1..block_size - 1.
        capacity: context tokens at most.
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
        head_weight: Tensor,
        num_drafted: int,
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
        dtype = drafter.fc.weight.dtype
        if head_weight.dtype != dtype or embedding_weight.dtype != dtype:
            raise ConfigError(
                f"drafter dtype {dtype}, target embedding {embedding_weight.dtype} and head {head_weight.dtype} "
                "differ. Load both models in the same dtype."
            )
        self._drafter = drafter
        self._embedding_weight = embedding_weight
        self._head_weight = head_weight
        self._temperature = temperature
        self._generator = generator
        self._context = DraftContext(shape.num_layers, capacity)
        device = head_weight.device
        self._positions = torch.arange(capacity + shape.block_size, device=device)
        self._block_ids = torch.full((1, 1, num_drafted + 1), shape.mask_token_id, device=device)  # [B, A, W]
        self._one_document = torch.zeros(1, capacity, dtype=torch.long, device=device)
        self._valid = torch.ones(1, 1, dtype=torch.bool, device=device)

    @property
    def context_length(self) -> int:
        """Committed tokens that the drafter can see."""
        return self._context.length

    def observe(self, tap_hidden: Tensor) -> None:
        """Project the taps [n, T*H] of newly committed tokens and append them to the context."""
        start = self._context.length
        positions = self._positions[None, start : start + tap_hidden.shape[0]]  # [1, n]
        context = self._drafter.encode_context(tap_hidden[None].to(self._head_weight.dtype))  # [1, n, H]
        self._context.append(self._drafter.project_context(context, positions))

    def propose(self, anchor_id: int, anchor_position: int) -> Proposal:
        """Draft K tokens after the anchor."""
        hidden = self._block_hidden(anchor_id, anchor_position)[:, 1:]  # [1, K, H]; the anchor's row is not used
        unary, candidate_ids = self._candidates(hidden)
        path_ids, q = self._drafter.candidate_selector.walk(
            hidden,
            unary,
            candidate_ids,
            torch.tensor([anchor_id], device=hidden.device),
            temperature=self._temperature,
            generator=self._generator,
        )
        sampled = self._temperature > 0
        return Proposal(
            draft_ids=path_ids[0],
            distribution=DraftDistribution(candidate_ids[0], q[0]) if sampled else None,
        )

    def _block_hidden(self, anchor_id: int, anchor_position: int) -> Tensor:
        length = self._context.length
        assert length == anchor_position, (
            f"drafter context covers {length} tokens, but the anchor stands at position {anchor_position}: every "
            "committed token before the anchor must have been observed exactly once"
        )
        self._block_ids[0, 0, 0] = anchor_id
        block_size = self._block_ids.shape[-1]
        embeddings = self._drafter.embed_blocks(self._block_ids, self._embedding_weight)[
            :, 0
        ]  # [1, 1, W, H] -> [1, W, H]
        positions = self._positions[None, anchor_position : anchor_position + block_size]  # [1, W]
        return self._drafter.decode_block(embeddings, positions, self._context.views(), self._visible(block_size))

    def _visible(self, block_size: int) -> dict[str, ContextSpans] | None:
        """Which context keys each slot sees, per kind of layer; None = all, the usual case."""
        shape, length = self._drafter.shape, self._context.length
        if shape.sliding_window is None or length + block_size <= shape.sliding_window:
            return None
        return context_masks(
            shape.layer_types,
            shape.sliding_window,
            anchor_positions_local=self._positions[None, length : length + 1],  # [B=1, A=1]
            block_document_ids=self._one_document[:, :1],
            block_valid=self._valid,
            position_ids=self._positions[None, :length],
            document_ids=self._one_document[:, :length],
            block_size=block_size,
        )

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The C best unary logits of each slot, float32, and their ids: [1, K, H] -> [1, K, C] twice.

        Scale and soft cap are increasing functions, so they are applied to the C kept values alone.
        """
        shape = self._drafter.shape
        logits = functional.linear(hidden, self._head_weight)  # [1, K, V]
        unary, candidate_ids = logits.topk(shape.selector_top_k, dim=-1)
        unary = unary.float() * shape.output_multiplier
        cap = shape.final_logit_softcapping
        if cap is not None:
            unary = torch.tanh(unary / cap) * cap
        return unary, candidate_ids
