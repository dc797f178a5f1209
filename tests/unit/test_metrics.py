"""Sums that merge to the single-process figure, and acceptance on scripted blocks."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.metrics import MetricSums, acceptance_length, acceptance_rate, prefix_acceptance

K = 7


def scripted(lengths: list[int], num_drafted: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks that accept the given numbers of tokens and hit again after the miss."""
    targets = torch.arange(len(lengths) * num_drafted).view(len(lengths), num_drafted)
    paths = targets.clone()
    for row, length in enumerate(lengths):
        if length < num_drafted:
            paths[row, length] = -5
    return paths, targets, torch.ones_like(targets, dtype=torch.bool)


def test_merged_parts_equal_the_sums_of_one_process() -> None:
    hits, weights = torch.rand(12) < 0.5, torch.rand(12)
    whole, parts = MetricSums(), []
    whole.add("accuracy", hits.sum(), 12, rate=True)
    whole.add("loss", weights.sum(), weights.square().sum())
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        part = MetricSums()
        part.add("accuracy", hits[start:stop].sum(), stop - start, rate=True)
        part.add("loss", weights[start:stop].sum(), weights[start:stop].square().sum())
        parts.append(part)
    merged = parts[0] + parts[1] + parts[2]
    assert merged.rates() == pytest.approx(whole.rates(), rel=1e-6)
    assert merged.rate_names == {"accuracy"}


def test_the_flat_form_of_two_ranks_adds_to_the_merged_sums() -> None:
    ranks = [
        MetricSums.from_pairs({"b": (1.0, 2), "a": (torch.tensor(3), 4.0)}, rates=["a"]),
        MetricSums.from_pairs({"a": (0.5, 4), "b": (5.0, 2)}, rates=["a"]),
    ]
    reduced = ranks[0].reduced(lambda flat: flat.add_(ranks[1].to_flat()))
    assert ranks[0].sums()["a"] == (3.0, 4.0)  # a collective that works in place leaves the local sums alone
    assert reduced.sums() == (ranks[0] + ranks[1]).sums() == {"a": (3.5, 8.0), "b": (6.0, 4.0)}
    assert reduced.rate_names == {"a"}


def test_the_empty_sums_are_neutral() -> None:
    sums = MetricSums.from_pairs({"a": (1, 2)}, rates=["a"])
    assert (MetricSums.empty() + sums).rates() == (sums + MetricSums.empty()).rates() == {"a": 0.5}
    assert MetricSums.empty().reduced(lambda flat: flat).rates() == {}


def test_a_rank_with_other_metrics_is_refused() -> None:
    sums = MetricSums.from_pairs({"a": (1.0, 2.0)})
    with pytest.raises(ValueError, match="same metric names"):
        sums.from_flat(torch.zeros(4))


def test_an_aliased_tensor_is_counted_once_and_later_changes_do_not_reach_the_sums() -> None:
    shared = torch.tensor(2.0, dtype=torch.float64)
    sums = MetricSums()
    sums.add("first", shared, 4)
    sums.add("second", shared, shared)
    sums.to_flat().mul_(10)
    shared.mul_(10)
    assert sums.rates() == {"first": 0.5, "second": 1.0}


def test_a_sum_adds_over_calls_and_carries_no_graph() -> None:
    sums = MetricSums()
    sums.add("loss", torch.tensor(1.0, requires_grad=True), 1)
    sums.add("loss", 2.0, 1)
    assert sums.rates() == {"loss": 1.5}
    assert not sums.to_flat().requires_grad


@pytest.mark.parametrize("numerator", [1.42, -0.1])
def test_a_rate_outside_zero_to_one_is_refused_when_read(numerator: float) -> None:
    with pytest.raises(ValueError, match="'accuracy' is a rate"):
        MetricSums.from_pairs({"accuracy": (numerator, 1)}, rates=["accuracy"]).rates()
    assert MetricSums.from_pairs({"length": (numerator, 1)}).rates() == {"length": numerator}


def test_a_metric_over_nothing_is_left_out() -> None:
    assert MetricSums.from_pairs({"empty": (0, 0), "full": (1, 1)}).rates() == {"full": 1.0}
    assert MetricSums().rates() == {}


def test_a_name_cannot_be_a_rate_in_one_place_only() -> None:
    sums = MetricSums.from_pairs({"a": (1, 2)}, rates=["a"])
    with pytest.raises(ValueError, match="Declare it alike"):
        sums.add("a", 1, 2)
    with pytest.raises(ValueError, match="Declare them alike"):
        sums + MetricSums.from_pairs({"a": (1, 2)})


def test_a_vector_is_not_a_sum() -> None:
    with pytest.raises(ValueError, match="Sum before adding"):
        MetricSums().add("loss", torch.ones(2), 2)


def test_scripted_acceptances_give_the_published_definitions() -> None:
    found = prefix_acceptance(*scripted([0, 3, 7, 2]))
    accepted, blocks = float(found.accepted_sum), float(found.num_blocks)
    assert (accepted, blocks) == (12.0, 4.0)
    assert acceptance_length(accepted, blocks) == 4.0
    assert acceptance_rate(accepted, blocks * K) == 12 / 28
    assert found.accepted_per_position.tolist() == [3, 3, 2, 1, 1, 1, 1]
    assert found.reached_per_position.tolist() == [4, 3, 3, 2, 1, 1, 1]


def test_a_run_stops_at_the_first_unsupervised_slot() -> None:
    paths, targets, supervised = scripted([7, 7, 1])
    supervised[0, 3] = False  # the slots after it hit but are out of reach
    supervised[1, :] = False
    found = prefix_acceptance(paths, targets, supervised)
    assert float(found.accepted_sum) == 3 + 0 + 1
    assert float(found.num_blocks) == 2
    assert found.reached_per_position.tolist() == [2, 2, 1, 0, 0, 0, 0]


def test_leading_axes_do_not_matter() -> None:
    paths, targets, supervised = scripted([0, 3, 7, 2, 5, 1])
    flat = prefix_acceptance(paths, targets, supervised)
    shaped = prefix_acceptance(*(tensor.view(2, 3, K) for tensor in (paths, targets, supervised)))
    for found, expected in zip(shaped, flat, strict=True):
        assert torch.equal(found, expected)


def test_no_blocks_give_zero_sums() -> None:
    empty = torch.zeros(0, K, dtype=torch.int64)
    found = prefix_acceptance(empty, empty, empty.bool())
    assert (float(found.accepted_sum), float(found.num_blocks)) == (0.0, 0.0)


def test_a_mask_of_another_shape_is_refused() -> None:
    paths, targets, supervised = scripted([1, 2])
    with pytest.raises(ValueError, match="must have one shape"):
        prefix_acceptance(paths, targets, supervised.unsqueeze(-1))


@pytest.mark.parametrize(("accepted", "total"), [(1, 0), (-1, 2), (5, 4)])
def test_impossible_counts_are_refused(accepted: int, total: int) -> None:
    with pytest.raises(ValueError, match="num_accepted"):
        acceptance_rate(accepted, total)
    if accepted < total or total == 0:
        with pytest.raises(ValueError, match="num_rounds"):
            acceptance_length(accepted, total)
