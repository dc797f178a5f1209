"""The acceptance rules: which drafted tokens the target keeps, and the token it adds itself. Pure functions.

Greedy: the longest prefix of the draft that equals the target's own argmax, then the target's argmax after it.

Sampled (speculative sampling, lossless): with p the target's and q the drafter's distribution at a slot,

    accept d with probability min(1, p(d) / q(d)); at the first rejection draw from max(p - q, 0), normalised;
    after K acceptances draw from the target's distribution at slot K + 1.

Then every emitted token is distributed as p whatever q is: q only decides how many are accepted. q must be what
the draft was really drawn from, so there are two forms: an argmax proposal has all its mass on the drafted
token (one-hot q), a selector sample has q on its C candidates and 0 elsewhere.

Letters: N independent rows, K drafted tokens, V vocabulary, C candidates. Probabilities are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NUCLEUS_SIZE = 512  # tokens tried first for top-p


class Verdict(NamedTuple):
    """What one verification commits in every row: the first ``num_accepted`` drafted tokens, then ``next_ids``."""

    num_accepted: Tensor  # [N] int64, 0..K
    next_ids: Tensor  # [N] int64


class DraftDistribution(NamedTuple):
    """The distribution a draft was drawn from: ``probabilities`` on ``candidate_ids``, 0 elsewhere."""

    candidate_ids: Tensor  # [..., K, C] int64, no id twice in a slot
    probabilities: Tensor  # [..., K, C] float32, each slot sums to 1


def target_probabilities(
    logits: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """The distribution that the target samples from: temperature, then min-p, then top-k, then top-p, as vLLM does.

    Args:
        logits: [..., V], any floating dtype.
        temperature: above 0; greedy decoding has no distribution, use :func:`verify_greedy`.
        top_p: the smallest set of most likely tokens whose mass reaches it is kept, in (0, 1]; 1 = off.
        top_k: tokens kept at most; 0 = off.
        min_p: tokens of less than this share of the best token's probability are dropped, in [0, 1); 0 = off.

    Returns:
        [..., V] float32, rows sum to 1.

    Raises:
        ValueError: a value outside its range.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: must be above 0. Use the greedy rule for temperature 0.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must lie in (0, 1]. Use 1.0 for off.")
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: must be 0 (off) or positive. Use 0.")
    if not 0 <= min_p < 1:
        raise ValueError(f"min_p={min_p}: must lie in [0, 1). Use 0.0 for off.")
    scores = logits.float() / temperature  # [..., V]
    if min_p > 0:
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), float("-inf"))
    if 0 < top_k < scores.shape[-1]:
        kept = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, kept.indices, kept.values)
    probabilities = scores.softmax(dim=-1)
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    return probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with a mass of at least ``top_p``: [..., V] -> [..., V].

    That set is nearly always small, so the best :data:`NUCLEUS_SIZE` tokens are tried before the whole
    vocabulary is sorted; the result is the same.
    """
    ordered, order = probabilities.topk(min(NUCLEUS_SIZE, probabilities.shape[-1]), dim=-1)
    if bool((ordered.sum(dim=-1) < top_p).any()):
        ordered, order = probabilities.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(mass_before >= top_p, 0.0)
    kept = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def sample_ids(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw a row. ``probabilities`` [N, V] need not be normalised; returns [N] int64."""
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)  # [N, 1] -> [N]


def verify_greedy(draft_ids: Tensor, target_logits: Tensor) -> Verdict:
    """Keep the prefix that plain greedy decoding would have written.

    Args:
        draft_ids: [N, K] int64.
        target_logits: [N, K + 1, V]; row i is the target's prediction after the anchor and i drafted tokens.
            Ties go the way of ``torch.argmax``, as they do in plain decoding.
    """
    chosen = target_logits.argmax(dim=-1)  # [N, K + 1]
    agrees = draft_ids == chosen[:, :-1]  # [N, K]
    num_accepted = agrees.long().cumprod(dim=-1).sum(dim=-1)  # [N]
    return Verdict(num_accepted, chosen.gather(-1, num_accepted[:, None]).squeeze(-1))


def verify_sampled(
    draft_ids: Tensor,
    draft: DraftDistribution | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Lossless rejection sampling.

    Args:
        draft_ids: [N, K] int64.
        draft: the distribution that ``draft_ids`` were drawn from, [N, K, C] each, given the prefix that was
            drafted; None means argmax proposals (one-hot q).
        target_probs: [N, K + 1, V] float32, row i given the anchor and i drafted tokens.
        generator: source of all randomness, on the tensors' device.
    """
    num_rows, num_drafted = draft_ids.shape
    p = target_probs[:, :-1].gather(-1, draft_ids[..., None]).squeeze(-1)  # [N, K, 1] -> [N, K]
    if draft is None:
        q = torch.ones_like(p)
    else:
        is_drafted = draft.candidate_ids == draft_ids[..., None]  # [N, K, C]
        q = (draft.probabilities * is_drafted).sum(dim=-1)  # [N, K]
    uniform = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype)  # [N, K] in [0, 1)
    accepts = uniform * q < p  # u < p / q without the division
    num_accepted = accepts.long().cumprod(dim=-1).sum(dim=-1)  # [N]

    rows = torch.arange(num_rows, device=p.device)
    final = target_probs[rows, num_accepted]  # [N, V], a copy
    slot = num_accepted.clamp(max=num_drafted - 1)  # where a rejecting row stopped
    if draft is None:
        rejected_ids = draft_ids[rows, slot][:, None]  # [N, 1]
        rejected_mass = torch.ones_like(rejected_ids, dtype=final.dtype)
    else:
        rejected_ids = draft.candidate_ids[rows, slot]  # [N, C]
        rejected_mass = draft.probabilities[rows, slot]
    rejected_mass = rejected_mass * (num_accepted < num_drafted)[:, None]  # nothing to take off after K acceptances
    residual = final.scatter_add(-1, rejected_ids, -rejected_mass).clamp_min(0)
    # p == q up to rounding leaves no residual; then any draw from p is right.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, final)
    return Verdict(num_accepted, sample_ids(residual, generator))
