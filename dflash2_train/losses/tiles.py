"""The sweep in plain PyTorch: some rows by a tile of the vocabulary at a time, joined through their log-normalisers.

A softmax over V is known only after its last logit, but every tile has one of its own, and tiles add up as chunks of
keys do in attention. With ``Z_t`` a tile's normaliser and ``q_t`` its softmax,

    log Z = log sum_t Z_t        sum_V q_v head_v = sum_t (Z_t / Z) (q_t . head_t)

So each tile of logits is made once, turned into its softmax, multiplied back and forgotten. On a CPU that is what lets
256 rows share a pass over the head within a small part of [N, V]: products of few rows run at half the rate of these.

The gold token and the teacher's ids are left out of the tiles' products. Their part of the gradient is added from
their own rows of the head, with factors in fp32: near a good drafter q - p is small against both, and a rounded
q would lose it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2_train.losses.candidates import CandidateSearch
from dflash2_train.losses.divergence import teacher_terms
from dflash2_train.losses.products import raw_logits, states_gradient
from dflash2_train.losses.sweep import RowResults, Rows, SweepSettings, Workspace, concatenated, tile_plan
from dflash2_train.model.gathered import gathered_sums
from dflash2_train.shapes import padded_rows


@torch.no_grad()
def tiled_sweep(
    rows: Rows, head_weight: Tensor, settings: SweepSettings, *, budget: int, with_gradient: bool, workspace: Workspace
) -> tuple[RowResults, Tensor | None]:
    """Results of all N > 0 rows, and the gradient [N, H] of each row's loss by its state, against a stored top-T.

    Arguments as :func:`~dflash2_train.losses.sweep.sweep`; ``budget`` in bytes.
    """
    count = len(rows.hidden)
    hidden = padded_rows(rows.hidden)  # the padding goes through the products alone
    tiles = _Tiles(settings, head_weight, len(hidden), budget, workspace)
    gradient = torch.empty_like(rows.hidden, memory_format=torch.contiguous_format) if with_gradient else None
    parts = []
    for start in range(0, count, tiles.plan.rows):
        span = slice(start, min(start + tiles.plan.rows, count))
        chunk = _Chunk(tiles, hidden[start : start + tiles.plan.rows], rows.piece(span), with_gradient)
        parts.append(chunk.run(None if gradient is None else gradient[span]))
    return concatenated(parts), gradient


class _Tiles:
    """What all chunks of a sweep share: the plan, the head and the buffers."""

    def __init__(
        self, settings: SweepSettings, head_weight: Tensor, padded_count: int, budget: int, workspace: Workspace
    ) -> None:
        self.settings, self.head, self.workspace = settings, head_weight, workspace
        self.dtype = torch.promote_types(head_weight.dtype, torch.float32)
        self.plan = tile_plan(head_weight, padded_count, budget, capped=settings.shaping.cap is not None)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See :meth:`~dflash2_train.losses.sweep.Workspace.take`."""
        return self.workspace.take(name, shape, self.head, dtype)


class _Chunk:
    """M rows over all tiles; ``states`` [>= M, H] with their padding."""

    def __init__(self, tiles: _Tiles, states: Tensor, rows: Rows, with_gradient: bool) -> None:
        self._tiles, self._states, self._rows, self._with_gradient = tiles, states, rows, with_gradient
        gold = rows.target_ids[:, None]
        self._present = rows.teacher_logprobs > -torch.inf  # [M, T]
        # Absent entries may hold any id: they stand for the gold token, which has a place of its own.
        self._places = torch.cat([gold, torch.where(self._present, rows.teacher_ids, gold)], 1)  # [M, 1 + T]
        self._raw_at = states.new_zeros(self._places.shape)  # raw products at the places
        self._search = CandidateSearch(tiles.settings.top_k)
        self._log_normaliser = states.new_full((len(gold),), -torch.inf, dtype=tiles.dtype)
        self._sum = tiles.take("sum", tuple(states.shape), tiles.dtype)[: len(gold)] if with_gradient else None

    def run(self, gradient: Tensor | None) -> RowResults:
        """Results; the gradient by the states is written to ``gradient`` [M, H]."""
        for columns in self._tiles.plan.tiles(len(self._tiles.head)):
            self._run_tile(columns)
        settings, rows, dtype = self._tiles.settings, self._rows, self._tiles.dtype
        raw_best, candidate_ids = self._search.best()
        logits = settings.shaping.apply(self._raw_at)
        log_q = logits - self._log_normaliser[:, None]  # [M, 1 + T]
        terms = teacher_terms(log_q[:, 1:], rows.teacher_logprobs.to(dtype), settings.kl_kind)
        if gradient is not None:
            scale = settings.ce_weight + settings.kl_weight * terms.row_scale  # [M], of every q
            self._finish(gradient, scale, self._factors(log_q.exp(), scale, terms.corrections), logits)
        return RowResults(
            -log_q[:, 0],
            terms.kl,
            candidate_ids,
            settings.shaping.apply(raw_best),
            self._log_normaliser,
            candidate_ids[:, 0] == rows.target_ids,
            terms.sum_min_pq,
        )

    def _run_tile(self, columns: slice) -> None:
        tiles, size = self._tiles, len(self._places)
        head = tiles.head[columns]
        raw = raw_logits(self._states, head, tiles.workspace)
        own = raw[:size]
        rows, places = ((self._places >= columns.start) & (self._places < columns.stop)).nonzero(as_tuple=True)
        here = rows, self._places[rows, places] - columns.start  # of this tile
        self._raw_at[rows, places] = own[here]
        top = self._search.add(own, columns.start)
        log_normaliser = self._softmax(own, top)
        joined = torch.logaddexp(self._log_normaliser, log_normaliser)
        if self._sum is not None:
            own[here] = 0.0
            part = states_gradient(raw, head, tiles.take("part", tuple(self._states.shape)))[:size]
            if columns.start == 0:
                self._sum.copy_(part)
            else:
                self._sum.lerp_(part.to(tiles.dtype), (log_normaliser - joined).exp()[:, None])
        self._log_normaliser = joined

    def _softmax(self, raw: Tensor, top: Tensor) -> Tensor:
        """Log-normalisers [M] of a tile whose largest raw products are ``top`` [M]; the products become their softmax.

        A soft cap's slope is multiplied in. On a CPU a few rows at a time, whose fp32 copy stays in the cache.
        """
        tiles, shaping = self._tiles, self._tiles.settings.shaping
        largest = torch.empty_like(self._log_normaliser)
        in_place = raw.dtype == tiles.dtype
        step = tiles.plan.block_rows
        for block, top_q in zip(raw.split(step), largest.split(step), strict=True):
            shape = tuple(block.shape)
            logits = shaping.apply_(block if in_place else tiles.take("work", shape, tiles.dtype).copy_(block))
            slope = None
            if shaping.cap is not None and self._with_gradient:
                slope = shaping.slope(logits, tiles.take("slope", shape, tiles.dtype))
            torch.softmax(logits, -1, out=logits)
            torch.amax(logits, -1, out=top_q)
            if slope is not None:
                logits.mul_(slope)
            if self._with_gradient and not in_place:
                block.copy_(logits)
        return shaping.apply(top) - largest.log()

    def _factors(self, q: Tensor, scale: Tensor, corrections: Tensor) -> Tensor:
        """Gradient by the logits at the places [M, 1 + T], the share of q included, once for each id."""
        settings = self._tiles.settings
        gold_is_among = ((self._places[:, 1:] == self._places[:, :1]) & self._present).any(1)  # [M]
        gold = torch.where(gold_is_among, 0.0, scale * q[:, 0]) - settings.ce_weight
        teacher = scale[:, None] * q[:, 1:] + settings.kl_weight * corrections
        return torch.cat([gold[:, None], torch.where(self._present, teacher, 0.0)], 1)

    def _finish(self, gradient: Tensor, scale: Tensor, factors: Tensor, logits: Tensor) -> None:
        """The joined sum of all other ids, weighted, and the places' own part."""
        assert self._sum is not None
        shaping, head = self._tiles.settings.shaping, self._tiles.head
        if shaping.cap is None:
            scale = scale * shaping.multiplier  # a soft cap's slope holds it already
        places = gathered_sums(factors * shaping.slope(logits), head, self._places)
        torch.addcmul(places, self._sum, scale[:, None], out=places)
        gradient.copy_(places)
