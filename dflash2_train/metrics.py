"""Additive sums behind every reported figure, and acceptance counted from ids.

A metric is a pair (numerator, denominator) of sums over the same mask. Pairs of micro-steps, accumulation steps and
ranks add up; the quotient is formed once, at the end. So no figure depends on how the batch was split, and none is
reduced twice. Means over blocks or tokens made this way are *pooled* means.

Acceptance of a block is the length of its first run of hits, ``sum_k prod_{i <= k} hit_i``. It is averaged over blocks,
never built from per-position hit rates: positions of a block are correlated, so their product is biased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

RATE_TOLERANCE = 1e-6  # rounding of sums that a rate may show outside [0, 1]


@dataclass
class MetricSums:
    """Named pairs (numerator, denominator), each a [2] fp64 tensor, on any one device.

    Tensors stay where they were made, so that adding does not wait for a GPU. ``rate_names`` holds the metrics
    declared as shares; they are checked to lie in [0, 1] when read.
    """

    pairs: dict[str, Tensor] = field(default_factory=dict)
    rate_names: frozenset[str] = frozenset()

    def add(self, name: str, numerator: Tensor | float, denominator: Tensor | float, *, rate: bool = False) -> None:
        """Add one pair of sums to ``name``; values are copied, so the caller's tensors may change later.

        Args:
            name: metric.
            numerator: sum, a scalar.
            denominator: count or sum of weights over the same mask, a scalar.
            rate: the quotient is a share; must be the same at every call for a name.
        """
        pair = torch.stack([_scalar(name, numerator, denominator), _scalar(name, denominator, numerator)])
        self._add_pair(name, pair, rate=rate)

    def add_each(self, names: Sequence[str], numerators: Tensor, denominators: Tensor, *, rate: bool = False) -> None:
        """:meth:`add` for several metrics at once.

        Args:
            names: of the metrics, n.
            numerators: [n] sums.
            denominators: [n] over the same masks.
            rate: as in :meth:`add`, for all of them.
        """
        if not (len(names),) == numerators.shape == denominators.shape:
            raise ValueError(
                f"{len(names)} names, numerators {tuple(numerators.shape)}, denominators {tuple(denominators.shape)}: "
                "one of each a metric is needed."
            )
        pairs = torch.stack([numerators.detach().double(), denominators.detach().double()], dim=1)  # [n, 2]
        for name, pair in zip(names, pairs.unbind(), strict=True):
            self._add_pair(name, pair, rate=rate)

    def _add_pair(self, name: str, pair: Tensor, *, rate: bool) -> None:
        if name in self.pairs and rate != (name in self.rate_names):
            raise ValueError(f"metric {name!r}: declared as a rate in one place and not in another. Declare it alike.")
        self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair
        if rate:
            self.rate_names = self.rate_names | {name}

    def __add__(self, other: MetricSums) -> MetricSums:
        """The sums of both; names of either side are kept."""
        shared = self.pairs.keys() & other.pairs.keys()
        differing = sorted(name for name in shared if (name in self.rate_names) != (name in other.rate_names))
        if differing:
            raise ValueError(f"metrics {differing}: rates on one side and not on the other. Declare them alike.")
        pairs = {**self.pairs, **other.pairs}
        pairs.update({name: self.pairs[name] + other.pairs[name] for name in shared})
        return MetricSums(pairs, self.rate_names | other.rate_names)

    def names(self) -> list[str]:
        """Metric names in the order of :meth:`to_flat`."""
        return sorted(self.pairs)

    def to_flat(self) -> Tensor:
        """All pairs as one new fp64 tensor [2 * metrics], in the order of :meth:`names`, to be all-reduced once."""
        if not self.pairs:
            return torch.zeros(0, dtype=torch.float64)
        devices = {pair.device for pair in self.pairs.values()}
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        return torch.cat([self.pairs[name].to(device) for name in self.names()])

    def from_flat(self, flat: Tensor) -> MetricSums:
        """These names with the sums of ``flat`` [2 * metrics], as :meth:`to_flat` laid them out."""
        if flat.shape != (2 * len(self.pairs),):
            raise ValueError(
                f"flat sums have shape {tuple(flat.shape)}, {len(self.pairs)} metrics need ({2 * len(self.pairs)},). "
                "Every rank must add the same metric names."
            )
        rows = flat.to(torch.float64).reshape(-1, 2)  # [metrics, 2]
        return MetricSums(dict(zip(self.names(), rows.unbind(), strict=True)), self.rate_names)

    def reduced(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> MetricSums:
        """The sums over all ranks in one collective. Every rank must hold the same names, with 0 / 0 where it has none.

        Args:
            all_reduce_sum: adds a tensor over the ranks and returns it; it may work in place.
        """
        return self.from_flat(all_reduce_sum(self.to_flat())) if self.pairs else self

    def sums(self) -> dict[str, tuple[float, float]]:
        """Raw (numerator, denominator) of every metric."""
        values = self.to_flat().reshape(-1, 2).tolist()  # one transfer for all metrics
        return {name: (pair[0], pair[1]) for name, pair in zip(self.names(), values, strict=True)}

    def rates(self) -> dict[str, float]:
        """Numerator / denominator of every metric whose denominator is not 0.

        Raises:
            ValueError: a metric declared as a rate lies outside [0, 1], so its two sums are not over the same mask.
        """
        quotients = {}
        for name, (numerator, denominator) in self.sums().items():
            if denominator == 0.0:
                continue
            value = numerator / denominator
            if name in self.rate_names and not -RATE_TOLERANCE <= value <= 1.0 + RATE_TOLERANCE:
                raise ValueError(
                    f"metric {name!r} is a rate but {numerator:g} / {denominator:g} = {value:g}: must lie in [0, 1]. "
                    "Take numerator and denominator over the same mask and reduce them once."
                )
            quotients[name] = value
        return quotients

    @classmethod
    def empty(cls) -> MetricSums:
        """No metrics: the neutral element of ``+``."""
        return cls()

    @classmethod
    def from_pairs(
        cls, pairs: Mapping[str, tuple[Tensor | float, Tensor | float]], *, rates: Sequence[str] = ()
    ) -> MetricSums:
        """Sums from a plain mapping; ``rates`` names the metrics that are shares."""
        sums = cls()
        for name, (numerator, denominator) in pairs.items():
            sums.add(name, numerator, denominator, rate=name in rates)
        return sums


def slot_names(metric: str, num_slots: int) -> list[str]:
    """Names of a metric at the slots 1..K."""
    return [f"{metric}/slot{slot}" for slot in range(1, num_slots + 1)]


def slot_sums(rows: Tensor, supervised: Tensor) -> Tensor:
    """Sums of per-row figures at each slot, fp64 [n, K].

    Args:
        rows: [n, N], n figures of the N supervised slots in their flat order.
        supervised: [..., K] bool, N of them set.
    """
    slot = supervised.nonzero()[:, -1]  # [N], counted from 0
    if slot.shape != rows.shape[1:]:
        raise ValueError(f"rows {tuple(rows.shape)} must be [n, N] with N={len(slot)} supervised slots.")
    sums = torch.zeros(len(rows), supervised.shape[-1], dtype=torch.float64, device=rows.device)
    return sums.index_add_(1, slot, rows.double())


class PrefixAcceptance(NamedTuple):
    """Sums over blocks, all fp64 and additive."""

    accepted_sum: Tensor  # [] accepted draft tokens of all counted blocks
    num_blocks: Tensor  # [] blocks with at least one supervised slot
    accepted_per_position: Tensor  # [K] blocks accepted through slot k
    reached_per_position: Tensor  # [K] blocks accepted through slot k - 1 whose slot k is supervised


def prefix_acceptance(path_ids: Tensor, target_ids: Tensor, supervised: Tensor) -> PrefixAcceptance:
    """Greedy acceptance of proposed ids against the text, block by block.

    A block's run ends at the first miss or the first unsupervised slot, whichever comes first: a block cut by the end
    of its document can accept no more than the slots it has. Blocks without a first supervised slot are not counted.
    ``accepted_sum / num_blocks`` is the pooled mean of num_accepted, ``accepted_per_position / num_blocks`` the plain
    and ``accepted_per_position / reached_per_position`` the conditional rate of each slot.

    Args:
        path_ids: [..., K] proposed ids.
        target_ids: [..., K] ids of the text.
        supervised: [..., K] bool.
    """
    if not path_ids.shape == target_ids.shape == supervised.shape:
        raise ValueError(
            f"path_ids {tuple(path_ids.shape)}, target_ids {tuple(target_ids.shape)} and supervised "
            f"{tuple(supervised.shape)} must have one shape, [..., K]."
        )
    num_drafted = path_ids.shape[-1]
    served = supervised.reshape(-1, num_drafted).long().cumprod(-1)  # [blocks, K]
    hits = (path_ids == target_ids).reshape(-1, num_drafted).long()  # [blocks, K]
    accepted = (hits * served).cumprod(-1)  # [blocks, K]
    through_previous = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=-1)  # [blocks, K]
    return PrefixAcceptance(
        accepted.sum().double(),
        served[:, 0].sum().double(),
        accepted.sum(0).double(),
        (through_previous * served).sum(0).double(),
    )


def acceptance_length(num_accepted: float, num_rounds: float) -> float:
    """Pooled committed tokens a verify step, ``num_accepted / num_rounds + 1``: the accepted and the target's own.

    The prefill token belongs to no round and is not counted.
    """
    if num_rounds <= 0 or num_accepted < 0:
        raise ValueError(
            f"num_accepted={num_accepted}, num_rounds={num_rounds}: counts of at least one round are needed."
        )
    return num_accepted / num_rounds + 1.0


def acceptance_rate(num_accepted: float, num_proposed: float) -> float:
    """Accepted share of all proposed tokens, in [0, 1]."""
    if num_proposed <= 0 or not 0 <= num_accepted <= num_proposed:
        raise ValueError(f"num_accepted={num_accepted}, num_proposed={num_proposed}: accepted must lie in 0..proposed.")
    return num_accepted / num_proposed


def _scalar(name: str, value: Tensor | float, beside: Tensor | float) -> Tensor:
    """A detached fp64 copy of ``value`` on the device of whichever of the two is a tensor."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"metric {name!r}: sums are scalars, got shape {tuple(value.shape)}. Sum before adding.")
        return value.detach().to(torch.float64, copy=True)
    device = beside.device if isinstance(beside, Tensor) else None
    return torch.tensor(value, dtype=torch.float64, device=device)
