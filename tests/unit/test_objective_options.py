"""Every option of the objective against its formula, and what none of them may break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import BlockBatch
from dflash2_train.config import LossConfig
from dflash2_train.data import PackedBatch
from dflash2_train.losses import MIN_TAIL, Moment, gamma_at, injects_at, position_weights, sampled_share_at
from dflash2_train.objective import MIN_SELECTOR_SHARE, SQUARES, Objective, StepOutput
from dflash2_train.paths import walk_paths
from dflash2_train.predecessors import partly_sampled
from tests.objective_case import batch_of, make_objective

HALFWAY = Moment(step=50, steps=100, seed=1)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"position_weights": "dpace"},
    {"gamma_end": 2.0},
    {"kl_kind": "total_variation"},
    {"missing_candidate": "curriculum", "inject_share": 0.9, "detach_unary": True},
    {"sampled_predecessor": 1.0, "selector_denominator": "hits"},
]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Objective, list[CapturedSample]]:
    _, objective, samples = make_objective(tmp_path_factory.mktemp("options"))
    return objective, samples


@pytest.fixture
def objective(case: tuple[Objective, list[CapturedSample]]) -> Iterator[Objective]:
    """The objective with default options, whatever a test sets."""
    case[0].loss = LossConfig()
    case[0].zero_grad()
    yield case[0]


@pytest.fixture
def samples(case: tuple[Objective, list[CapturedSample]]) -> list[CapturedSample]:
    return case[1]


def run(objective: Objective, batch: PackedBatch, blocks: BlockBatch, **options: Any) -> StepOutput:
    settings = {"denominator": torch.tensor(1.0), "scale": 1.0, "selector_ramp": 1.0, "moment": HALFWAY}
    return objective(batch, blocks, **{**settings, **options})


def loss_of(objective: Objective, batch: PackedBatch, blocks: BlockBatch, **options: Any) -> float:
    return float(run(objective, batch, blocks, **options).loss.detach())


def unary_reference(objective: Objective, batch: PackedBatch, blocks: BlockBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, full logits and CE + tail-bucket KL of every supervised slot, by the textbook."""
    slots = objective._slots(batch, blocks)
    logits = slots.hidden @ objective.frozen.head.T
    log_q = logits.log_softmax(-1)
    cross_entropy = -log_q.gather(-1, slots.target_ids[:, None]).squeeze(-1)
    log_p = blocks.teacher_logprobs[blocks.supervised]
    log_qt = log_q.gather(-1, blocks.teacher_ids[blocks.supervised])
    p, q = log_p.exp(), log_qt.exp()
    tail_p, tail_q = 1 - p.sum(-1), 1 - q.sum(-1)
    divergence = (p * (log_p - log_qt)).sum(-1) + tail_p * (tail_p.log() - tail_q.log())
    return slots.hidden, logits, cross_entropy + divergence


def test_gamma_goes_straight_from_its_start_to_its_end() -> None:
    loss = LossConfig(gamma=6.0, gamma_end=2.0)
    assert [gamma_at(loss, Moment(step=step, steps=4)) for step in (0, 1, 2, 4, 9)] == [6.0, 5.0, 4.0, 2.0, 2.0]
    assert gamma_at(LossConfig(gamma=6.0), HALFWAY) == 6.0


def test_the_weights_and_the_normaliser_follow_gamma(objective: Objective, samples: list[CapturedSample]) -> None:
    objective.loss = LossConfig(gamma=8.0, gamma_end=2.0, selector_weight=0.0)
    batch, blocks = batch_of([samples])
    weights = position_weights(3, 5.0).expand(blocks.supervised.shape)[blocks.supervised]
    _, _, losses = unary_reference(objective, batch, blocks)
    assert float(objective.window_weight(blocks, HALFWAY)) == pytest.approx(float(weights.sum()))
    assert loss_of(objective, batch, blocks) == pytest.approx(float((weights * losses).sum().detach()), rel=1e-5)


def test_dpace_weighs_by_the_drafters_own_confidence_over_the_number_of_slots(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    objective.loss = LossConfig(position_weights="dpace", dpace_alpha=0.3, selector_weight=0.0)
    batch, blocks = batch_of([samples])
    hidden, logits, losses = unary_reference(objective, batch, blocks)
    gold = logits.softmax(-1).gather(-1, blocks.target_ids[blocks.supervised][:, None]).squeeze(-1).detach()
    confidence = torch.zeros(blocks.supervised.shape)
    confidence[blocks.supervised] = 0.7 * gold + 0.3
    expected = torch.zeros_like(confidence)
    for j in range(3):
        for m in range(j, 3):
            expected[..., j] += confidence[..., : m + 1].prod(-1)
    total = (expected[blocks.supervised] * losses).sum()
    (expected_gradient,) = torch.autograd.grad(total, objective.drafter.fc.weight)
    output = run(objective, batch, blocks)
    (gradient,) = torch.autograd.grad(output.loss, objective.drafter.fc.weight)
    assert float(objective.window_weight(blocks, HALFWAY)) == float(blocks.supervised.sum())
    assert float(output.loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)


def test_the_curriculum_injects_first_and_masks_afterwards(objective: Objective, samples: list[CapturedSample]) -> None:
    batch, blocks = batch_of([samples])
    early, late = Moment(step=9, steps=100), Moment(step=10, steps=100)
    values = {}
    for kind in ("inject", "mask", "curriculum"):
        objective.loss = LossConfig(missing_candidate=kind, inject_share=0.1)
        values[kind] = [loss_of(objective, batch, blocks, moment=moment) for moment in (early, late)]
    assert values["inject"][0] != values["mask"][0]
    assert values["curriculum"] == [values["inject"][0], values["mask"][1]]
    assert not injects_at(LossConfig(missing_candidate="curriculum", inject_share=0.0), Moment())


@pytest.mark.parametrize("detach", [False, True])
def test_the_selector_reaches_the_states_through_its_candidates_unless_detached(
    objective: Objective, samples: list[CapturedSample], detach: bool
) -> None:
    batch, blocks = batch_of([samples])
    gradients = []
    for weight in (1.0, 0.0):
        objective.loss = LossConfig(selector_weight=weight, missing_candidate="inject", detach_unary=detach)
        total = run(objective, batch, blocks).loss
        gradients.append(torch.autograd.grad(total, objective.drafter.norm.weight)[0])
    hidden, logits, _ = unary_reference(objective, batch, blocks)
    targets = blocks.target_ids[blocks.supervised]
    ids = logits.topk(6).indices
    missing = ~(ids == targets[:, None]).any(-1)
    ids[missing, -1] = targets[missing]
    candidates = logits.gather(-1, ids)
    scores = objective.drafter.candidate_selector.scores(
        hidden, candidates.detach() if detach else candidates, ids, blocks.predecessor_ids[blocks.supervised]
    )
    gold = (ids == targets[:, None]).int().argmax(-1)
    weights = position_weights(3, 6.5).expand(blocks.supervised.shape)[blocks.supervised]
    loss = (weights * torch.nn.functional.cross_entropy(scores, gold, reduction="none")).sum()
    (expected,) = torch.autograd.grad(loss, objective.drafter.norm.weight)
    torch.testing.assert_close(gradients[0] - gradients[1], expected, rtol=1e-3, atol=1e-4)


def test_the_selectors_own_denominator_divides_its_term_alone(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    batch, blocks = batch_of([samples])
    whole, halved, floor, tiny = (
        loss_of(objective, batch, blocks, selector_share=share) for share in (1.0, 0.5, MIN_SELECTOR_SHARE, 0.0)
    )
    objective.loss = LossConfig(selector_weight=0.0)
    unary = loss_of(objective, batch, blocks)
    assert halved - unary == pytest.approx(2 * (whole - unary), rel=1e-4)
    assert floor == tiny


def test_the_reported_share_is_the_weight_of_slots_that_hold_their_token(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    batch, blocks = batch_of([samples])
    _, logits, _ = unary_reference(objective, batch, blocks)
    inside = (logits.topk(6).indices == blocks.target_ids[blocks.supervised][:, None]).any(-1)
    weights = position_weights(3, 6.5).expand(blocks.supervised.shape)[blocks.supervised]
    sums = run(objective, batch, blocks).sums
    assert 0 < sums.rates()["selector_share"] < 1
    assert sums.rates()["selector_share"] == pytest.approx(float((weights * inside).sum() / weights.sum()))
    objective.loss = LossConfig(missing_candidate="inject")
    assert run(objective, batch, blocks).sums.rates()["selector_share"] == 1.0


def sampled(objective: Objective, rows: list[list[CapturedSample]], share: float, moment: Moment) -> list[list[int]]:
    """Predecessors of the supervised slots, block by block."""
    batch, blocks = batch_of(rows)
    with torch.no_grad():
        slots = objective._slots(batch, blocks)
        unary = objective._unary(slots, blocks)
    flat = partly_sampled(
        objective.drafter.candidate_selector,
        blocks,
        slots.hidden,
        unary,
        share=share,
        moment=moment,
        sample_ids=batch.sample_ids,
    )
    full = torch.full(blocks.supervised.shape, -1)
    full[blocks.supervised] = flat
    return full.flatten(0, 1)[blocks.block_valid.flatten()].tolist()


def test_the_share_of_sampled_predecessors_rises_over_the_ramp() -> None:
    loss = LossConfig(sampled_predecessor=0.4, sampled_predecessor_ramp=0.5)
    shares = [sampled_share_at(loss, Moment(step=step, steps=100)) for step in (0, 25, 50, 100)]
    assert shares == pytest.approx([0.0, 0.2, 0.4, 0.4])
    assert sampled_share_at(LossConfig(), HALFWAY) == 0.0
    assert sampled_share_at(LossConfig(sampled_predecessor=0.4, sampled_predecessor_ramp=0.0), Moment()) == 0.4


def test_a_sampled_predecessor_is_a_served_candidate_of_the_slot_before_and_the_first_stays_the_anchor(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    batch, blocks = batch_of([samples])
    _, logits, _ = unary_reference(objective, batch, blocks)
    candidates = torch.full((*blocks.supervised.shape, 6), -1)
    candidates[blocks.supervised] = logits.topk(6).indices
    valid = blocks.block_valid
    rows = zip(
        sampled(objective, [samples], 1.0, HALFWAY),
        blocks.block_ids[..., 0][valid].tolist(),
        candidates[valid].tolist(),
        blocks.supervised[valid].tolist(),
        strict=True,
    )
    for found, anchor, own, supervised in rows:
        assert found[0] == anchor
        assert all(found[k] in own[k - 1] for k in (1, 2) if supervised[k])


def test_sampled_predecessors_depend_on_seed_step_and_sample_but_not_on_the_batch(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    packed = sampled(objective, [samples], 0.5, HALFWAY)
    alone = [row for one in samples for row in sampled(objective, [[one]], 0.5, HALFWAY)]
    assert packed == alone == sampled(objective, [samples], 0.5, HALFWAY)
    assert packed != sampled(objective, [samples], 0.5, replace(HALFWAY, step=51))
    assert packed != sampled(objective, [samples], 0.5, replace(HALFWAY, seed=2))


def test_the_share_of_replaced_predecessors_is_the_one_asked_for(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    text, all_own = (sampled(objective, [samples], share, HALFWAY) for share in (0.0, 1.0))
    batch, blocks = batch_of([samples])
    assert text == blocks.predecessor_ids.masked_fill(~blocks.supervised, -1)[blocks.block_valid].tolist()
    kept = total = 0
    for step in range(60):
        moment = replace(HALFWAY, step=step)
        some, all_own = (sampled(objective, [samples], share, moment) for share in (0.25, 1.0))
        for found, own, truth in zip(some, all_own, text, strict=True):
            for k in (1, 2):
                if truth[k] >= 0 and own[k] != truth[k]:
                    total += 1
                    kept += found[k] == own[k]
    assert total > 1000
    assert kept / total == pytest.approx(0.25, abs=0.05)


def test_sampled_predecessors_change_the_selectors_loss_alone(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    batch, blocks = batch_of([samples])
    text = run(objective, batch, blocks).sums.rates()
    objective.loss = LossConfig(sampled_predecessor=1.0)
    own = run(objective, batch, blocks).sums.rates()
    assert own["selector"] != text["selector"]
    assert own["selector/slot1"] == text["selector/slot1"], "the first slot follows the anchor"
    changed = {name for name in own if own[name] != text[name]}
    assert changed <= {"loss", "selector", *(f"selector/slot{k}" for k in range(2, blocks.supervised.shape[-1] + 1))}


def test_walking_in_pieces_changes_no_path(
    objective: Objective, samples: list[CapturedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, blocks = batch_of([samples])
    with torch.no_grad():
        slots = objective._slots(batch, blocks)
        unary = objective._unary(slots, blocks)
    started = blocks.supervised[..., 0]
    arguments = (objective.drafter.candidate_selector, slots.hidden, unary.candidate_logits, unary.candidate_ids)
    mask, anchors = blocks.supervised[started], blocks.block_ids[..., 0][started]
    whole = walk_paths(*arguments, mask, anchors)
    rank = objective.drafter.shape.selector_rank
    block = mask.shape[1] * unary.candidate_ids.shape[1] * rank  # successors' elements of a block
    for pieces in (1, 4 * block, len(mask) * block):
        monkeypatch.setattr("dflash2_train.model.selector.PIECE_ELEMENTS", pieces)
        assert torch.equal(walk_paths(*arguments, mask, anchors)[mask], whole[mask])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_and_separate_documents_give_one_loss_and_one_gradient_under_every_option(
    objective: Objective, samples: list[CapturedSample], options: dict[str, Any]
) -> None:
    objective.loss = LossConfig(**options)
    rows = [[samples[0], samples[1]], [samples[2]]]
    total = objective.window_weight(batch_of(rows)[1], HALFWAY)
    packed = run(objective, *batch_of(rows), denominator=total, selector_share=0.5).loss
    single = torch.stack(
        [run(objective, *batch_of([[one]]), denominator=total, selector_share=0.5).loss for one in samples]
    ).sum()
    parameters = list(objective.parameters())
    found, expected = torch.autograd.grad(packed, parameters), torch.autograd.grad(single, parameters)
    torch.testing.assert_close(packed, single, rtol=1e-5, atol=1e-6)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_micro_batch_without_a_supervised_slot_adds_zeros_to_every_gradient_under_every_option(
    objective: Objective, samples: list[CapturedSample], options: dict[str, Any]
) -> None:
    objective.loss = LossConfig(**options)
    batch, blocks = batch_of([samples])
    names = run(objective, batch, blocks).sums.names()
    empty = replace(blocks, supervised=torch.zeros_like(blocks.supervised))
    output = run(objective, batch, empty, denominator=torch.tensor(3.0))
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert output.sums.names() == names
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("options", OPTIONS)
def test_measuring_the_parts_gradients_changes_no_bit_of_loss_or_gradient(
    objective: Objective, samples: list[CapturedSample], options: dict[str, Any]
) -> None:
    objective.loss = LossConfig(**options)
    batch, blocks = batch_of([[samples[0], samples[1]]])
    found = []
    for measure in (False, True):
        objective.zero_grad()
        output = run(objective, batch, blocks, measure_gradients=measure)
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
        found.append((output, gradients))
    (plain, expected), (measured, gradients) = found
    assert torch.equal(plain.loss, measured.loss)
    assert expected.keys() == gradients.keys()
    assert all(torch.equal(expected[name], gradients[name]) for name in expected)
    rates = measured.sums.rates()
    assert {name: value for name, value in rates.items() if not name.startswith(SQUARES)} == plain.sums.rates()


def test_the_parts_squared_norms_are_those_of_autograd_over_whole_logits(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    objective.loss = LossConfig(ce_weight=0.5, kl_weight=2.0, selector_weight=3.0)
    batch, blocks = batch_of([[samples[0]]])
    seen = blocks.supervised
    states = objective._slots(batch, blocks).hidden.detach().requires_grad_()
    logits = states @ objective.frozen.head.T
    log_q, targets = logits.log_softmax(-1), blocks.target_ids[seen]
    weights = position_weights(seen.shape[-1], objective.loss.gamma).expand(seen.shape)[seen]
    ce = -log_q.gather(-1, targets[:, None]).squeeze(-1)
    log_p, log_qt = blocks.teacher_logprobs[seen], log_q.gather(-1, blocks.teacher_ids[seen])
    excess = log_p.exp().sum(-1, keepdim=True).clamp(min=1.0)  # half precision may add up to a little over 1
    log_p = log_p - excess.log()
    tail_p, tail_q = (1 - log_p.exp().sum(-1)).clamp(min=0), 1 - log_qt.exp().sum(-1)
    assert float(tail_q.detach().min()) > MIN_TAIL
    kl = (log_p.exp() * (log_p - log_qt)).sum(-1) + torch.xlogy(tail_p, tail_p) - tail_p * tail_q.log()
    unary, ids = logits.topk(objective.drafter.shape.selector_top_k, -1)
    scores = objective.drafter.candidate_selector.scores(states, unary, ids, blocks.predecessor_ids[seen])
    hits = ids == targets[:, None]
    selector = torch.where(hits.any(-1), scores.logsumexp(-1) - (scores * hits).sum(-1), 0.0)
    denominator = torch.tensor(7.0)
    rates = run(objective, batch, blocks, denominator=denominator, measure_gradients=True).sums.rates()
    for name, part in (("ce", 0.5 * ce), ("kl", 2.0 * kl), ("selector", 3.0 * selector)):
        (gradient,) = torch.autograd.grad((weights * part).sum() / denominator, states, retain_graph=True)
        assert rates[f"{SQUARES}{name}"] == pytest.approx(float(gradient.square().sum()), rel=1e-4)


def test_squared_norms_of_micro_batches_and_ranks_add_up_to_those_of_the_window(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    rows = [[samples[0]], [samples[1]], [samples[2]]]
    denominator = objective.window_weight(batch_of(rows)[1])
    whole = run(objective, *batch_of(rows), denominator=denominator, measure_gradients=True).sums.rates()
    parts = [
        run(objective, *batch_of([row]), denominator=denominator, scale=3.0, measure_gradients=True).sums
        for row in rows
    ]
    summed = (parts[0] + parts[1] + parts[2]).rates()
    for name in ("ce", "kl", "selector"):
        assert summed[f"{SQUARES}{name}"] == pytest.approx(whole[f"{SQUARES}{name}"], rel=1e-4)


def test_figures_by_slot_make_up_those_over_all_slots(objective: Objective, samples: list[CapturedSample]) -> None:
    batch, blocks = batch_of([[samples[0], samples[1]], [samples[2]]])
    output = run(objective, batch, blocks)
    rates = output.sums.rates()
    counts = blocks.supervised.sum((0, 1)).double()  # [K]
    weights = counts * position_weights(len(counts), objective.loss.gamma).double()
    for name, shares in (("ce", weights), ("kl", weights), ("top1", counts), ("recall", counts)):
        by_slot = torch.tensor([rates[f"{name}/slot{k}"] for k in range(1, len(counts) + 1)], dtype=torch.float64)
        assert rates[name] == pytest.approx(float((shares * by_slot).sum() / shares.sum()), rel=1e-5), name
    accepted = [rates[f"accepted/slot{k}"] for k in range(1, len(counts) + 1)]
    assert rates["selector_path"] == pytest.approx(sum(accepted))
    assert accepted == sorted(accepted, reverse=True)
