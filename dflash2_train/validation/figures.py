"""Additive sums behind every figure of a validation: the quotients are formed once, after all rows and ranks are in.

Along the served chain (of the path in question):

    acceptance_length, acceptance_length_unary, acceptance_length_oracle
        (accepted + rounds) / rounds, pooled, of the selector's path, the unary one, and the best one there could be
    accepted/slotk, conditional/slotk
        rounds accepted through slot k, by all rounds and by those that reached it
    lost_top1/slotk, lost_ranked/slotk, lost_missed/slotk
        rounds that reached slot k and ended there: though the best unary logit was right, though the token was among
        the candidates, because it was not. With conditional/slotk they add up to 1. Without a slot: shares of all
        lost tokens

Over every position of every answer:

    acceptance_length_uniform
        as acceptance_length, from blocks at all positions alike
    recall, recall/slotk, top1/slotk
        the data token is among the candidates, has the best unary logit
    confidence_gap/slotk
        mean probability that the drafter gives its best token, less top1/slotk: above 0 it promises too much
    overlap, overlap/slotk and overlap_bound, overlap_bound/slotk
        sum of min(p, q), teacher and drafter, from below and above: the acceptance of a draft sampled at temperature 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2_train.metrics import MetricSums, prefix_acceptance
from dflash2_train.validation.chain import served_blocks
from dflash2_train.validation.slots import BlockTable

LENGTH = "acceptance_length"
LOSSES = ("lost_top1", "lost_ranked", "lost_missed")


def row_figures(table: BlockTable) -> tuple[MetricSums, Tensor]:
    """Sums of one row, and which of its blocks a server would start, [n] bool."""
    sums = MetricSums()
    paths = {LENGTH: table.selector, f"{LENGTH}_unary": table.unary, f"{LENGTH}_oracle": table.oracle}
    served = {name: served_blocks(table.anchors, accepted_drafts(hits)) for name, hits in paths.items()}
    for name, hits in paths.items():
        _add_length(sums, name, hits[served[name]], table.supervised[served[name]])
    _add_length(sums, f"{LENGTH}_uniform", table.selector, table.supervised)
    _add_rounds(sums, table.kept(served[LENGTH]))
    _add_slots(sums, table)
    return sums, served[LENGTH]


def accepted_drafts(hits: Tensor) -> Tensor:
    """Length of the first run of hits of each block, [n, K] bool -> [n] int64."""
    return hits.long().cumprod(-1).sum(-1)


def _add_length(sums: MetricSums, name: str, hits: Tensor, supervised: Tensor) -> None:
    """Acceptance length of blocks whose drafts equal the text at ``hits`` [n, K], where there is a text."""
    walk = prefix_acceptance(hits, torch.ones_like(hits), supervised)
    sums.add(name, walk.accepted_sum + walk.num_blocks, walk.num_blocks)


def _add_rounds(sums: MetricSums, rounds: BlockTable) -> None:
    """Slot by slot, what became of the rounds of the served chain."""
    hits = rounds.selector
    walk = prefix_acceptance(hits, torch.ones_like(hits), rounds.supervised)
    before = torch.cat([torch.ones_like(hits[:, :1]), hits[:, :-1]], 1).long().cumprod(-1).bool()
    lost = before & rounds.supervised & ~hits  # [n, K], at most one a round
    kinds = dict(zip(LOSSES, (rounds.unary, rounds.oracle & ~rounds.unary, ~rounds.oracle), strict=True))
    for k, reached in enumerate(walk.reached_per_position, start=1):
        accepted = walk.accepted_per_position[k - 1]
        sums.add(at_slot("accepted", k), accepted, walk.num_blocks, rate=True)
        sums.add(at_slot("conditional", k), accepted, reached, rate=True)
        for name, kind in kinds.items():
            sums.add(at_slot(name, k), (lost & kind)[:, k - 1].sum(), reached, rate=True)
    for name, kind in kinds.items():
        sums.add(name, (lost & kind).sum(), lost.sum(), rate=True)


def _add_slots(sums: MetricSums, table: BlockTable) -> None:
    """How good each slot is by itself, at every position."""
    count, judged = table.supervised.sum(0), table.judged.sum(0)  # [K]
    recalled, first = table.oracle.sum(0), table.unary.sum(0)
    confidence, overlap, bound = (x.double().sum(0) for x in (table.confidence, table.overlap, table.overlap_bound))
    for place in range(len(count)):
        k, total = place + 1, count[place]
        sums.add(at_slot("recall", k), recalled[place], total, rate=True)
        sums.add(at_slot("top1", k), first[place], total, rate=True)
        sums.add(at_slot("confidence_gap", k), confidence[place] - first[place], total)
        sums.add(at_slot("overlap", k), overlap[place], judged[place], rate=True)
        sums.add(at_slot("overlap_bound", k), bound[place], judged[place], rate=True)
    sums.add("recall", recalled.sum(), count.sum(), rate=True)
    sums.add("overlap", overlap.sum(), judged.sum(), rate=True)
    sums.add("overlap_bound", bound.sum(), judged.sum(), rate=True)


def at_slot(name: str, k: int) -> str:
    """Name of a figure at slot ``k`` of a block, 1..K."""
    return f"{name}/slot{k}"


def no_rows(num_drafted: int) -> MetricSums:
    """The names of :func:`row_figures` with nothing in them, for a rank without rows."""
    flags = torch.zeros(0, num_drafted, dtype=torch.bool)
    numbers = torch.zeros(0, num_drafted)
    table = BlockTable(
        anchors=torch.zeros(0, dtype=torch.int64),
        supervised=flags,
        selector=flags,
        unary=flags,
        oracle=flags,
        confidence=numbers,
        judged=flags,
        overlap=numbers,
        overlap_bound=numbers,
    )
    return row_figures(table)[0]
