"""The acceptance rules: greedy prefixes, and losslessness of the sampled rule whatever the drafter does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.model.selector import CandidateSelector
from dflash2_train.runner.verify import (
    DraftDistribution,
    sample_ids,
    target_probabilities,
    verify_greedy,
    verify_sampled,
)

VOCAB = 5
NUM_RUNS = 20_000
NUM_CANDIDATES = 3
TEMPERATURES = (0.7, 1.0)
LARGEST_DISTANCE = 0.02  # total variation of the first two tokens


def tables(seed: int, temperature: float) -> tuple[Tensor, Tensor]:
    """p of the first token [V] and of the second given the first [V, V]."""
    logits = 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    probabilities = target_probabilities(logits, temperature=temperature)
    return probabilities[0], probabilities[1:]


def draw_path(q: list[tuple[Tensor, Tensor]], generator: torch.Generator) -> tuple[Tensor, DraftDistribution]:
    """Sample paths [N, K] from per-slot functions of the predecessor, given as (candidates, q by predecessor)."""
    predecessor = torch.zeros(NUM_RUNS, dtype=torch.long)
    ids, candidates, probabilities = [], [], []
    for candidate_table, q_table in q:
        row_candidates, row_q = candidate_table[predecessor], q_table[predecessor]  # [N, C]
        predecessor = row_candidates.gather(-1, sample_ids(row_q, generator)[:, None])[:, 0]
        ids.append(predecessor)
        candidates.append(row_candidates)
        probabilities.append(row_q)
    return torch.stack(ids, 1), DraftDistribution(torch.stack(candidates, 1), torch.stack(probabilities, 1))


def first_two_tokens(
    draft_ids: Tensor, draft: DraftDistribution | None, first: Tensor, second: Tensor, generator: torch.Generator
) -> Tensor:
    """One verification of K = 1 or 2 drafts; rows that committed one token get their second from the target: [N, 2]."""
    num_drafted = draft_ids.shape[1]
    rows = [first.expand(NUM_RUNS, -1), *(second[draft_ids[:, slot]] for slot in range(num_drafted))]
    num_accepted, next_ids = verify_sampled(draft_ids, draft, torch.stack(rows, dim=1), generator)
    committed = torch.cat([draft_ids, next_ids[:, None]], dim=1)  # [N, K + 1]
    committed[torch.arange(NUM_RUNS), num_accepted] = next_ids
    tokens = committed[:, :2]
    rejected = num_accepted == 0
    tokens[rejected, 1] = sample_ids(second[next_ids[rejected]], generator)
    return tokens


def distance(tokens: Tensor, first: Tensor, second: Tensor) -> float:
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB).float()
    exact = (first[:, None] * second).flatten()
    return 0.5 * float((counts / NUM_RUNS - exact).abs().sum())


@pytest.mark.parametrize("num_drafted", [1, 2])  # with 1 the second token is the one the target adds
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_argmax_proposals_leave_the_joint_distribution_of_two_tokens_unchanged(
    temperature: float, num_drafted: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = tables(2, temperature)
    draft_ids = torch.tensor([[1, 3]])[:, :num_drafted].expand(NUM_RUNS, -1)
    tokens = first_two_tokens(draft_ids, None, first, second, generator)
    assert distance(tokens, first, second) < LARGEST_DISTANCE
    assert len({tuple(row) for row in tokens.tolist()}) > 10, "all mass on few pairs would test nothing"


@pytest.mark.parametrize("num_drafted", [1, 2])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sampled_paths_with_their_true_q_leave_the_joint_distribution_unchanged(
    temperature: float, num_drafted: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = tables(4, temperature)
    slots = []
    for _ in range(num_drafted):
        candidates = torch.stack([torch.randperm(VOCAB, generator=generator)[:NUM_CANDIDATES] for _ in range(VOCAB)])
        slots.append((candidates, torch.randn(VOCAB, NUM_CANDIDATES, generator=generator).softmax(-1)))
    draft_ids, draft = draw_path(slots, generator)
    tokens = first_two_tokens(draft_ids, draft, first, second, generator)
    assert distance(tokens, first, second) < LARGEST_DISTANCE


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_paths_walked_by_the_selector_leave_the_joint_distribution_unchanged(temperature: float) -> None:
    """The q that the selector reports is the one it samples from, given the path so far."""
    generator = torch.Generator().manual_seed(9)
    first, second = tables(10, temperature)
    selector = CandidateSelector(VOCAB, 4, 3)
    for parameter in selector.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    hidden = torch.randn(1, 2, 4, generator=generator).expand(NUM_RUNS, -1, -1)
    unary, candidate_ids = torch.randn(1, 2, VOCAB, generator=generator).topk(NUM_CANDIDATES)
    unary, candidate_ids = unary.expand(NUM_RUNS, -1, -1), candidate_ids.expand(NUM_RUNS, -1, -1)
    anchors = torch.zeros(NUM_RUNS, dtype=torch.long)
    draft_ids, q = selector.walk(hidden, unary, candidate_ids, anchors, temperature=temperature, generator=generator)
    tokens = first_two_tokens(draft_ids, DraftDistribution(candidate_ids, q), first, second, generator)
    assert len(draft_ids.unique(dim=0)) > 4
    assert distance(tokens, first, second) < LARGEST_DISTANCE


def test_a_wrongly_reported_q_would_be_noticed() -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = tables(4, 1.0)
    candidates = torch.arange(VOCAB).expand(VOCAB, -1)
    draft_ids, _ = draw_path([(candidates, torch.full((VOCAB, VOCAB), 1 / VOCAB))] * 2, generator)
    claimed = DraftDistribution(
        candidates[:2].expand(NUM_RUNS, -1, -1), first.expand(NUM_RUNS, 2, -1)
    )  # drawn uniformly, claimed to be p
    assert distance(first_two_tokens(draft_ids, claimed, first, second, generator), first, second) > 0.1


def test_a_draft_from_the_target_itself_is_always_accepted() -> None:
    first, _ = tables(5, 1.0)
    generator = torch.Generator().manual_seed(6)
    draft_ids = torch.multinomial(first, 4, replacement=True, generator=generator)
    draft = DraftDistribution(torch.arange(VOCAB).expand(1, 4, -1), first.expand(1, 4, -1))
    verdict = verify_sampled(draft_ids[None], draft, first.expand(1, 5, -1), generator)
    assert verdict.num_accepted.tolist() == [4]


@pytest.mark.parametrize("draft", [None, DraftDistribution(torch.tensor([[[1, 2]]]), torch.tensor([[[1.0, 0.0]]]))])
def test_a_token_that_the_target_never_samples_is_never_accepted(draft: DraftDistribution | None) -> None:
    probabilities = torch.tensor([[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
    for seed in range(50):
        verdict = verify_sampled(torch.tensor([[1]]), draft, probabilities, torch.Generator().manual_seed(seed))
        assert (verdict.num_accepted.tolist(), verdict.next_ids.tolist()) == ([0], [2])


def test_greedy_keeps_exactly_the_right_prefix_of_every_row_and_adds_the_targets_token() -> None:
    chosen = torch.tensor([3, 0, 4, 2])
    logits = torch.nn.functional.one_hot(chosen, VOCAB).float().expand(4, -1, -1)
    draft_ids = chosen[:-1].repeat(4, 1)
    for right in range(3):
        draft_ids[right, right:] = (draft_ids[right, right:] + 1) % VOCAB
    for right in range(2):
        draft_ids[right, right + 1] = chosen[right + 1]  # right again after a mistake: does not count
    verdict = verify_greedy(draft_ids, logits)
    assert verdict.num_accepted.tolist() == [0, 1, 2, 3]
    assert torch.equal(verdict.next_ids, chosen)


def test_min_p_keeps_the_tokens_near_the_best_before_top_p_counts_its_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    near = target_probabilities(logits, temperature=1.0, min_p=0.29)
    assert torch.allclose(near, torch.tensor([[0.5, 0.3, 0.15, 0.0]]) / 0.95)
    both = target_probabilities(logits, temperature=1.0, min_p=0.5, top_p=0.6)  # 0.5 / 0.8 reaches 0.6 alone
    assert torch.equal(both, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_temperature_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    same = target_probabilities(logits, temperature=1.0)
    assert torch.allclose(same, torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    cut = target_probabilities(logits, temperature=1.0, top_p=0.6)
    assert torch.allclose(cut, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    best = target_probabilities(logits, temperature=1.0, top_k=1)
    assert torch.equal(best, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    both = target_probabilities(logits, temperature=1.0, top_k=3, top_p=0.5)  # 0.5 / 0.95 reaches 0.5 alone
    assert torch.equal(both, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    sharp = target_probabilities(logits, temperature=0.5)
    assert torch.allclose(sharp, torch.tensor([[0.25, 0.09, 0.0225, 0.0025]]) / 0.365)


@pytest.mark.parametrize("spread", [0.01, 4.0])  # a nucleus of nearly the whole vocabulary, and a small one
def test_the_nucleus_of_a_large_vocabulary_is_the_one_of_a_full_sort(spread: float) -> None:
    logits = spread * torch.randn(3, 2000, generator=torch.Generator().manual_seed(8))
    result = target_probabilities(logits, temperature=1.0, top_p=0.9)
    for row, full in zip(result, logits.softmax(-1), strict=True):
        order = full.argsort(descending=True)
        size = int((full[order].cumsum(0) < 0.9).sum()) + 1
        assert set(row.nonzero().flatten().tolist()) == set(order[:size].tolist())
        assert torch.allclose(row[order[:size]], full[order[:size]] / full[order[:size]].sum())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_values_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        target_probabilities(torch.zeros(1, VOCAB), **wrong)
