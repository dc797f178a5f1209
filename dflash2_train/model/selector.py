"""The candidate selector: re-scores the unary top C of each slot from the token before it.

    score(a -> b) = unary(b) + sum over r of predecessor[a, r] * (hidden_projection h)[r] * successor[b, r]

where ``a`` is the token chosen at the slot before (the anchor for the first) and ``h`` the slot's state after the
final norm. During training all slots are scored in parallel with the data's own predecessors; at decoding the path is
walked slot by slot, each choice being the predecessor of the next.

Scores are fp32. The successor codebook starts at zero, so an untrained selector adds exactly nothing; the other two
factors start random, since a product of zeros would have no gradient.

Letters: B rows, K drafted slots, C candidates, V vocabulary, R rank, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2_train.model.gathered import PIECE_ELEMENTS, gathered_dots, gathered_rows
from dflash2_train.shapes import padded_rows


class CandidateSelector(nn.Module):
    """Parameters as published: both codebooks are bare [V, R] parameters, ``hidden_projection.weight`` is [R, H]."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, *, initializer_range: float = 0.02) -> None:
        super().__init__()
        self.initializer_range = initializer_range
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """An exact no-op that can learn: successor zero, the rest normal."""
        self.predecessor_codebook.normal_(0.0, self.initializer_range)
        self.successor_codebook.zero_()
        self.hidden_projection.weight.normal_(0.0, self.initializer_range)

    def scores(self, hidden: Tensor, unary: Tensor, candidate_ids: Tensor, predecessor_ids: Tensor) -> Tensor:
        """Score the candidates of every slot, given the token before it.

        Args:
            hidden: [..., H] states after the final norm.
            unary: [..., C] fp32 logits of the candidates.
            candidate_ids: [..., C] int64.
            predecessor_ids: [...] int64, the token before each slot.

        Returns:
            [..., C] fp32.
        """
        predecessor = gathered_rows(self.predecessor_codebook, predecessor_ids.flatten())  # [M, R]
        query = predecessor.float() * self._gate(hidden).flatten(0, -2)
        dots = gathered_dots(query, self.successor_codebook, candidate_ids.flatten(0, -2))
        return unary + dots.view_as(unary)  # [M, C] -> [..., C]

    @torch.no_grad()
    def walk(
        self,
        hidden: Tensor,
        unary: Tensor,
        candidate_ids: Tensor,
        anchor_ids: Tensor,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose one candidate a slot, left to right.

        Args:
            hidden: [B, K, H] states after the final norm, the anchor's slot dropped.
            unary: [B, K, C] fp32 logits of the candidates.
            candidate_ids: [B, K, C] int64.
            anchor_ids: [B] int64, predecessor of the first slot.
            temperature: 0 takes the best candidate (first of equals), else one is drawn from softmax(score / T).
            generator: source of randomness when ``temperature`` > 0.

        Returns:
            path ids [B, K] int64, and q [B, K, C] fp32, the distribution over the candidates from which each id of
            the path was taken (one-hot at temperature 0).

        Raises:
            ValueError: a negative temperature.
        """
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must be at least 0.")
        inputs = (self._gate(hidden), unary, candidate_ids, anchor_ids)
        step = len(hidden)
        if not hidden.is_cuda:  # the successors of some rows, [rows, K, C, R], stay in a CPU's cache
            step = PIECE_ELEMENTS // max(1, candidate_ids[:1].numel() * self.successor_codebook.shape[1])
        pieces = zip(*(part.split(max(1, step)) for part in inputs), strict=True)
        walked = [self._walk(*piece, temperature=temperature, generator=generator) for piece in pieces]
        return torch.cat([path for path, _ in walked]), torch.cat([weights for _, weights in walked])

    def _walk(
        self,
        gates: Tensor,
        unary: Tensor,
        candidate_ids: Tensor,
        anchor_ids: Tensor,
        *,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`walk` for a few rows at once; ``gates`` [B, K, R]."""
        successors = F.embedding(candidate_ids, self.successor_codebook).float()  # [B, K, C, R]
        previous, path, weights = anchor_ids, [], []
        for slot, ids in enumerate(candidate_ids.unbind(1)):
            query = F.embedding(previous, self.predecessor_codebook).float() * gates[:, slot]  # [B, R]
            score = torch.baddbmm(unary[:, slot, :, None], successors[:, slot], query.unsqueeze(-1)).squeeze(-1)
            if temperature > 0:
                weights.append(torch.softmax(score / temperature, -1))
                choice = torch.multinomial(weights[-1], 1, generator=generator)  # [B, 1]
            else:
                choice = score.argmax(-1, keepdim=True)
                weights.append(torch.zeros_like(score).scatter_(1, choice, 1.0))
            previous = ids.gather(1, choice).squeeze(1)
            path.append(previous)
        return torch.stack(path, 1), torch.stack(weights, 1)

    def _gate(self, hidden: Tensor) -> Tensor:
        """The projected states [..., H] -> [..., R] fp32."""
        rows = hidden.flatten(0, -2)
        return self.hidden_projection(padded_rows(rows))[: len(rows)].float().unflatten(0, hidden.shape[:-1])
