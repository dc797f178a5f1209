"""Draws belong to a seed, a purpose, a sample and its counters, and are spread as they claim."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.draws import document_keys, gumbel, uniform

COUNT = 40_000


def test_a_key_depends_on_seed_purpose_and_sample_alone() -> None:
    packed = document_keys([["a", "b"], ["c"]], seed=1, purpose="x")
    alone = document_keys([["c"]], seed=1, purpose="x")
    assert packed.shape == (2, 2)
    assert packed[1].tolist() == [int(alone[0, 0]), 0]
    assert len({*packed[0].tolist(), int(packed[1, 0])}) == 3
    assert document_keys([["c"]], seed=2, purpose="x") != alone
    assert document_keys([["c"]], seed=1, purpose="y") != alone


def test_numbers_are_uniform_and_neighbours_independent() -> None:
    key = document_keys([["a"]], seed=0, purpose="x")[0, 0]
    drawn = uniform(key, torch.arange(COUNT))
    assert 0 <= float(drawn.min()) and float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.006)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.002)
    pairs = torch.stack([drawn, uniform(key, torch.arange(COUNT) + 1), uniform(key, 7, torch.arange(COUNT))])
    correlation = torch.corrcoef(pairs) - torch.eye(3)
    assert float(correlation[0, 2].abs()) < 0.03  # another counter list is another draw
    assert torch.equal(pairs[0, 1:], pairs[1, :-1])  # the same counter is the same draw, in any call
    assert float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1].abs()) < 0.03


def test_the_order_of_counters_matters() -> None:
    key = torch.tensor(5)
    assert float(uniform(key, 1, 2)) != float(uniform(key, 2, 1))


def test_the_argmax_of_scores_with_gumbel_noise_is_a_draw_from_their_softmax() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    noise = gumbel(torch.tensor(11), torch.arange(COUNT)[:, None], torch.arange(3))
    shares = (scores + noise).argmax(-1).bincount(minlength=3) / COUNT
    torch.testing.assert_close(shares, scores.softmax(0), atol=0.01, rtol=0)
