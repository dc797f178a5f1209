"""The candidate selector: parallel scores, greedy and sampled walk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash2_train.model.selector import CandidateSelector

ROWS, SLOTS, CANDIDATES, VOCAB, HIDDEN, RANK = 3, 5, 4, 40, 16, 6


def random_selector(dtype: torch.dtype = torch.float32) -> CandidateSelector:
    selector = CandidateSelector(VOCAB, HIDDEN, RANK)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.normal_()
    return selector.to(dtype)


def problem(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, SLOTS, HIDDEN)
    unary = torch.randn(rows, SLOTS, CANDIDATES)
    candidates = torch.stack([torch.randperm(VOCAB)[:CANDIDATES] for _ in range(rows * SLOTS)])
    return hidden, unary, candidates.view(rows, SLOTS, CANDIDATES), torch.randint(VOCAB, (rows,))


def one_slot(selector: CandidateSelector, hidden: Tensor, unary: Tensor, candidates: Tensor, previous: int) -> Tensor:
    """The formula for one slot, candidate by candidate."""
    gate = selector.hidden_projection.weight @ hidden
    rows = [
        (selector.predecessor_codebook[previous] * gate * selector.successor_codebook[candidate]).sum()
        for candidate in candidates.tolist()
    ]
    return unary + torch.stack(rows)


@torch.no_grad()
def test_parallel_scores_equal_the_sequential_walk_under_teacher_forcing() -> None:
    selector = random_selector()
    hidden, unary, candidates, anchors = problem()
    path, _ = selector.walk(hidden, unary, candidates, anchors)
    predecessors = torch.cat([anchors[:, None], path[:, :-1]], 1)
    parallel = selector.scores(hidden, unary, candidates, predecessors)
    assert parallel.dtype == torch.float32
    for row in range(ROWS):
        previous = int(anchors[row])
        for slot in range(SLOTS):
            scores = one_slot(selector, hidden[row, slot], unary[row, slot], candidates[row, slot], previous)
            torch.testing.assert_close(parallel[row, slot], scores, atol=1e-4, rtol=1e-4)
            previous = int(candidates[row, slot, scores.argmax()])
            assert previous == int(path[row, slot])


@torch.no_grad()
def test_the_greedy_walk_is_sequential_and_not_the_best_whole_path() -> None:
    selector = CandidateSelector(4, 1, 1)
    selector.hidden_projection.weight.fill_(1.0)
    selector.predecessor_codebook.copy_(torch.tensor([[0.0], [0.0], [0.0], [1.0]]))
    selector.successor_codebook.copy_(torch.tensor([[0.0], [0.0], [0.0], [100.0]]))
    hidden = torch.ones(1, 2, 1)
    unary = torch.tensor([[[1.0, 0.9], [0.5, 0.0]]])  # candidate 3 is second best now and would pay later
    path, q = selector.walk(hidden, unary, torch.tensor([[[1, 3], [2, 3]]]), torch.tensor([0]))
    assert path.tolist() == [[1, 2]]
    assert q.tolist() == [[[1.0, 0.0], [1.0, 0.0]]]


@torch.no_grad()
def test_the_predecessor_of_a_slot_is_the_chosen_candidate_and_not_the_unary_best() -> None:
    selector = random_selector()
    hidden, unary, candidates, anchors = problem(rows=16)
    path, _ = selector.walk(hidden, unary, candidates, anchors)
    unary_path = candidates.gather(-1, unary.argmax(-1, keepdim=True)).squeeze(-1)
    assert not torch.equal(path, unary_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_selector_changes_no_score_and_no_choice(dtype: torch.dtype) -> None:
    selector = CandidateSelector(VOCAB, HIDDEN, RANK).to(dtype)
    hidden, unary, candidates, anchors = problem()
    predecessors = torch.randint(VOCAB, (ROWS, SLOTS))
    assert torch.equal(selector.scores(hidden.to(dtype), unary, candidates, predecessors), unary)
    path, _ = selector.walk(hidden.to(dtype), unary, candidates, anchors)
    assert torch.equal(path, candidates.gather(-1, unary.argmax(-1, keepdim=True)).squeeze(-1))


def test_an_untrained_selector_can_learn() -> None:
    selector = CandidateSelector(VOCAB, HIDDEN, RANK)
    hidden, unary, candidates, _ = problem()
    scores = selector.scores(hidden, unary, candidates, torch.randint(VOCAB, (ROWS, SLOTS)))
    scores.logsumexp(-1).sum().backward()
    assert selector.successor_codebook.grad is not None and selector.successor_codebook.grad.abs().sum() > 0


@torch.no_grad()
def test_rows_of_a_batch_walk_independently() -> None:
    selector = random_selector()
    hidden, unary, candidates, anchors = problem()
    together, _ = selector.walk(hidden, unary, candidates, anchors)
    for row in range(ROWS):
        alone, _ = selector.walk(*(tensor[row : row + 1] for tensor in (hidden, unary, candidates, anchors)))
        assert torch.equal(alone[0], together[row])


@torch.no_grad()
def test_sampled_paths_follow_the_chain_of_softmaxes_and_q_is_the_true_one() -> None:
    selector = random_selector()
    selector.successor_codebook.mul_(0.3)
    draws, temperature = 20000, 0.7
    hidden, unary, candidates, anchors = (tensor[:1, :2] if tensor.dim() > 1 else tensor[:1] for tensor in problem())
    many = [tensor.expand(draws, *tensor.shape[1:]) for tensor in (hidden, unary, candidates, anchors)]
    path, q = selector.walk(*many, temperature=temperature, generator=torch.Generator().manual_seed(3))

    first = (one_slot(selector, hidden[0, 0], unary[0, 0], candidates[0, 0], int(anchors)) / temperature).softmax(-1)
    torch.testing.assert_close(q[:, 0], first.expand(draws, -1))
    joint = torch.zeros(CANDIDATES, CANDIDATES)
    for index, previous in enumerate(candidates[0, 0].tolist()):
        scores = one_slot(selector, hidden[0, 1], unary[0, 1], candidates[0, 1], previous)
        second = (scores / temperature).softmax(-1)
        chosen = path[:, 0] == previous
        torch.testing.assert_close(q[chosen, 1], second.expand(int(chosen.sum()), -1))
        for following, token in enumerate(candidates[0, 1].tolist()):
            joint[index, following] = first[index] * second[following]
            joint[index, following] -= (chosen & (path[:, 1] == token)).float().mean()
    assert joint.abs().sum() / 2 < 0.02


@torch.no_grad()
def test_a_seeded_walk_repeats_and_a_negative_temperature_is_refused() -> None:
    selector, inputs = random_selector(), problem()
    paths = [
        selector.walk(*inputs, temperature=1.0, generator=torch.Generator().manual_seed(seed))[0] for seed in (5, 5, 6)
    ]
    assert torch.equal(paths[0], paths[1]) and not torch.equal(paths[0], paths[2])
    with pytest.raises(ValueError, match="temperature"):
        selector.walk(*inputs, temperature=-1.0)


@torch.no_grad()
def test_bf16_weights_still_give_fp32_scores() -> None:
    selector = random_selector(torch.bfloat16)
    hidden, unary, candidates, anchors = problem()
    scores = selector.scores(hidden.bfloat16(), unary, candidates, anchors[:, None].expand(-1, SLOTS))
    gate = selector.hidden_projection(hidden.bfloat16()).float()
    query = selector.predecessor_codebook[anchors].float()[:, None] * gate
    expected = unary + torch.einsum("bkr,bkcr->bkc", query, selector.successor_codebook[candidates].float())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_published_parameter_names_are_bare_codebooks() -> None:
    found = {name: tuple(value.shape) for name, value in CandidateSelector(VOCAB, HIDDEN, RANK).named_parameters()}
    assert found == {
        "predecessor_codebook": (VOCAB, RANK),
        "successor_codebook": (VOCAB, RANK),
        "hidden_projection.weight": (RANK, HIDDEN),
    }
