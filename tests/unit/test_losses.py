"""The fused unary loss against a plain fp64 autograd reference, and the selector's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dflash2_train import budgets
from dflash2_train.budgets import LOGIT_GROUP as GROUP
from dflash2_train.config import KL_KINDS, ConfigError
from dflash2_train.losses import (
    MIN_TAIL,
    UnaryLoss,
    Workspace,
    candidate_logits,
    dpace_weights,
    inject_gold,
    known_logits,
    position_weights,
    selector_loss,
    unary_candidates,
    unary_loss,
)
from dflash2_train.losses.candidates import CandidateSearch, top_candidates
from dflash2_train.losses.shaping import Shaping

N, H, V, T, C = 11, 6, 37, 5, 4
LOGIT_BYTES = 4
MIB = 1 << 20
WEIGHTS = torch.rand(N, generator=torch.Generator().manual_seed(7)) + 0.1
TOP_K_KINDS = [kind for kind in KL_KINDS if kind != "full_vocabulary"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPINGS: list[tuple[float, float | None]] = [(1.0, None), (0.5, None), (1.0, 3.0), (2.0, 5.0)]


def problem(
    dtype: torch.dtype = torch.float64,
    *,
    rows: int = N,
    hidden: int = H,
    vocab: int = V,
    scale: float = 1.0,
    kl_kind: str = "tail_bucket",
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(rows, vocab, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1).topk(T, -1)
    inputs = {
        "hidden": (torch.randn(rows, hidden, generator=generator) * scale).to(dtype).requires_grad_(),
        "head_weight": torch.randn(vocab, hidden, generator=generator).to(dtype),
        "target_ids": torch.randint(0, vocab, (rows,), generator=generator),
        "teacher_ids": teacher.indices,
        "teacher_logprobs": teacher.values,
    }
    if kl_kind == "full_vocabulary":
        inputs["teacher_hidden"] = (torch.randn(rows, hidden, generator=generator) * scale).to(dtype)
    return inputs


def run(inputs: dict[str, Tensor], **options: Any) -> UnaryLoss:
    settings: dict[str, Any] = {
        "ce_weight": 1.0,
        "kl_weight": 0.7,
        "kl_kind": "tail_bucket",
        "top_k": C,
        "chunk_bytes": 3 * V * LOGIT_BYTES,
    }
    return unary_loss(**inputs, **{**settings, **options})


def weighted(rows: Tensor) -> Tensor:
    return (rows * WEIGHTS[: len(rows)].to(rows)).sum()


def full_logits(hidden: Tensor, head: Tensor, multiplier: float, cap: float | None) -> Tensor:
    """fp64 logits with a gradient for ``hidden``, rounded as the parameters' dtype does."""
    exact = hidden.double() @ head.double().T
    rounded = hidden.detach().to(head.dtype) @ head.T
    logits = (exact + (rounded.double() - exact).detach()) * multiplier
    return logits if cap is None else cap * torch.tanh(logits / cap)


def divergence_of(inputs: dict[str, Tensor], logits: Tensor, kl_kind: str, teacher_logits: Tensor | None) -> Tensor:
    """The formulas of the module's docstring, word by word."""
    log_q = logits.log_softmax(-1)
    if teacher_logits is not None:
        p = teacher_logits.softmax(-1)
        return (p * (p.log() - log_q)).sum(-1)
    log_p = inputs["teacher_logprobs"].double()
    log_qt = log_q.gather(-1, inputs["teacher_ids"])
    p, mass_p, mass_q = log_p.exp(), log_p.exp().sum(-1), log_qt.exp().sum(-1)
    if kl_kind == "total_variation":
        return 0.5 * ((p - log_qt.exp()).abs().sum(-1) + (mass_p - mass_q).abs())
    if kl_kind == "renormalised":
        log_p, log_qt = log_p - mass_p.log()[:, None], log_qt - mass_q.log()[:, None]
        p = log_p.exp()
    divergence = (p * (log_p - log_qt)).sum(-1)
    if kl_kind == "tail_bucket":
        tail_p = (1 - mass_p).clamp(min=0)
        divergence = divergence + torch.xlogy(tail_p, tail_p) - tail_p * (1 - mass_q).clamp(min=MIN_TAIL).log()
    return divergence


def reference(
    inputs: dict[str, Tensor],
    *,
    ce_weight: float = 1.0,
    kl_weight: float = 0.7,
    kl_kind: str = "tail_bucket",
    multiplier: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted loss and gradient of hidden by autograd through full fp64 logits."""
    hidden = inputs["hidden"].detach().double().requires_grad_()
    logits = full_logits(hidden, inputs["head_weight"], multiplier, cap)
    teacher = None
    if "teacher_hidden" in inputs:
        teacher = full_logits(inputs["teacher_hidden"], inputs["head_weight"], multiplier, cap)
    cross_entropy = -logits.log_softmax(-1).gather(-1, inputs["target_ids"][:, None]).squeeze(-1)
    divergence = divergence_of(inputs, logits, kl_kind, teacher)
    loss = weighted(ce_weight * cross_entropy + kl_weight * divergence)
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), gradient


def number(scalar: Tensor) -> float:
    return float(scalar.detach())


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kl_kind", KL_KINDS)
@pytest.mark.parametrize(("multiplier", "cap"), SHAPINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_equal_the_full_logits_reference(
    device: str, kl_kind: str, multiplier: float, cap: float | None, dtype: torch.dtype
) -> None:
    inputs = problem(dtype, kl_kind=kl_kind)
    expected, expected_gradient = reference(inputs, kl_kind=kl_kind, multiplier=multiplier, cap=cap)
    moved = {key: value.detach().to(device) for key, value in inputs.items()}
    moved["hidden"].requires_grad_()
    result = run(moved, kl_kind=kl_kind, output_multiplier=multiplier, final_logit_softcapping=cap)
    (gradient,) = torch.autograd.grad(weighted(result.loss) * 3.0, moved["hidden"])
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6
    assert number(weighted(result.loss)) == pytest.approx(float(expected), rel=tolerance)
    assert relative_error(gradient.cpu(), 3.0 * expected_gradient) < tolerance


@pytest.mark.parametrize(("ce_weight", "kl_weight"), [(1.0, 0.0), (0.0, 1.0), (0.25, 2.0)])
def test_each_term_carries_its_own_factor(ce_weight: float, kl_weight: float) -> None:
    inputs = problem()
    expected, expected_gradient = reference(inputs, ce_weight=ce_weight, kl_weight=kl_weight)
    result = run(inputs, ce_weight=ce_weight, kl_weight=kl_weight)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    assert number(weighted(result.loss)) == pytest.approx(float(expected), rel=1e-10)
    assert number(weighted(ce_weight * result.ce + kl_weight * result.kl)) == pytest.approx(float(expected), rel=1e-10)
    assert relative_error(gradient, expected_gradient) < 1e-10


@pytest.mark.parametrize("cap", [None, 4.0])
def test_the_result_does_not_depend_on_the_chunk(cap: float | None) -> None:
    outcomes = []
    for rows in (1, 2, 3, 100):
        inputs = problem()
        result = run(inputs, chunk_bytes=rows * V * LOGIT_BYTES, final_logit_softcapping=cap)
        (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
        outcomes.append((*(field.detach() for field in result), gradient))
    for outcome in outcomes[1:]:
        for found, expected in zip(outcome, outcomes[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kl_kind", TOP_K_KINDS)
@pytest.mark.parametrize(("multiplier", "cap"), SHAPINGS)
def test_the_result_does_not_depend_on_the_tiles_of_the_vocabulary(
    kl_kind: str, multiplier: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for columns in (V, V // 2 + 1, C + 1, C - 1, 1):
        monkeypatch.setattr(budgets, "TILE_BYTES", columns * budgets.TILE_ROWS * 8)
        inputs = problem(scale=3.0)
        inputs["target_ids"][:3] = inputs["teacher_ids"][:3, 1]  # the gold token among the teacher's
        inputs["teacher_logprobs"][1:4, 2:] = -torch.inf  # and entries that are not part of T, of any id
        inputs["teacher_ids"][1:4, 2:] = 0
        inputs["teacher_logprobs"][4] = -torch.inf
        shaping = {"output_multiplier": multiplier, "final_logit_softcapping": cap}
        result = run(inputs, kl_kind=kl_kind, chunk_bytes=MIB, **shaping)
        (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
        outcomes.append((*(field.detach() for field in result), gradient))
    for outcome in outcomes[1:]:
        for found, expected in zip(outcome, outcomes[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_confident_drafters_gradient_keeps_its_digits_in_16_bits() -> None:
    """q - p is small against both where the drafter is nearly right; a rounded q would lose it."""
    inputs = problem(torch.bfloat16, rows=64, hidden=32, vocab=600)
    with torch.no_grad():
        head, target = inputs["head_weight"].double(), inputs["target_ids"]
        confident = head[target] * (8.0 / head[target].square().sum(-1, keepdim=True)) * 1.5
        inputs["hidden"] = confident.bfloat16()
    inputs["hidden"].requires_grad_()
    options = {"ce_weight": 1.0, "kl_weight": 0.0}
    (gradient,) = torch.autograd.grad(run(inputs, chunk_bytes=MIB, **options).loss.sum(), inputs["hidden"])
    exact = {name: part.detach().double() if part.is_floating_point() else part for name, part in inputs.items()}
    logits = (exact["hidden"] @ exact["head_weight"].T).bfloat16().double()  # as served
    slope = logits.softmax(-1)
    slope[torch.arange(64), target] -= 1.0
    assert float(slope[torch.arange(64), target].abs().median()) < 0.05  # a confident drafter, or this shows nothing
    assert relative_error(gradient, slope @ exact["head_weight"]) < 5e-3


def test_a_loss_whose_gradient_was_taken_refuses_a_second_time() -> None:
    """The gradient is weighted where it lies; a silent second use would weigh it twice."""
    inputs = problem()
    loss = weighted(run(inputs).loss)
    torch.autograd.grad(loss, inputs["hidden"], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, inputs["hidden"])


def test_a_chunk_smaller_than_a_row_still_sweeps_row_by_row() -> None:
    inputs = problem()
    assert number(weighted(run(inputs, chunk_bytes=1).loss)) == pytest.approx(float(reference(inputs)[0]), rel=1e-10)


def test_row_results_equal_their_definitions() -> None:
    inputs = problem()
    result = run(inputs)
    logits = inputs["hidden"].detach() @ inputs["head_weight"].T
    q = logits.softmax(-1).gather(-1, inputs["teacher_ids"])
    best = logits.topk(C)
    torch.testing.assert_close(result.candidate_ids, best.indices)
    torch.testing.assert_close(result.candidate_logits, best.values)
    torch.testing.assert_close(result.log_normaliser, logits.logsumexp(-1))
    torch.testing.assert_close(result.sum_min_pq, torch.minimum(q, inputs["teacher_logprobs"].exp()).sum(-1))
    assert torch.equal(result.top1_correct, logits.argmax(-1) == inputs["target_ids"])


def test_over_the_whole_vocabulary_the_overlap_is_the_acceptance_probability() -> None:
    inputs = problem(kl_kind="full_vocabulary")
    logits, teacher = (inputs[key].detach() @ inputs["head_weight"].T for key in ("hidden", "teacher_hidden"))
    expected = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    torch.testing.assert_close(run(inputs, kl_kind="full_vocabulary").sum_min_pq, expected)


def test_a_right_first_candidate_counts_as_correct() -> None:
    inputs = problem()
    inputs["target_ids"] = (inputs["hidden"].detach() @ inputs["head_weight"].T).argmax(-1)
    assert run(inputs).top1_correct.all()


def test_a_row_of_weight_zero_moves_nothing_and_each_row_moves_only_its_own_state() -> None:
    inputs = problem()
    (gradient,) = torch.autograd.grad(run(inputs).loss[2], inputs["hidden"])
    assert gradient[2].any()
    assert not gradient[torch.arange(N) != 2].any()


@pytest.mark.parametrize("implementation", ["auto", "torch"])
def test_a_batch_without_rows_is_zero_and_keeps_its_graph(implementation: str) -> None:
    inputs = problem(torch.float32)
    empty = {key: value if key == "head_weight" else value[:0] for key, value in inputs.items()}
    result = run(empty, implementation=implementation)
    (gradient,) = torch.autograd.grad(result.loss.sum(), inputs["hidden"])
    assert number(result.loss.sum()) == 0.0
    assert not gradient.any()
    assert result.candidate_ids.shape == result.candidate_logits.shape == (0, C)


def test_the_head_gets_no_gradient() -> None:
    inputs = problem()
    head = inputs["head_weight"].requires_grad_()
    run(inputs).loss.sum().backward()
    ids = torch.zeros(N, C, dtype=torch.int64)
    candidate_logits(inputs["hidden"], head, ids).sum().backward()
    assert head.grad is None
    assert inputs["hidden"].grad is not None


def test_evaluation_without_gradients_gives_the_same_numbers() -> None:
    inputs = problem()
    expected = run(inputs)
    with torch.no_grad():
        found = run(inputs)
    assert not found.loss.requires_grad
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("kl_kind", TOP_K_KINDS)
@pytest.mark.parametrize("share", [1.0, 1.003])
def test_a_teacher_whose_top_k_holds_all_mass_stays_finite(kl_kind: str, share: float) -> None:
    inputs = problem(torch.float32)
    certain = torch.full((N, T), -60.0)
    certain[:, 0] = float(torch.tensor(share).log())
    inputs["teacher_logprobs"] = certain
    result = run(inputs, kl_kind=kl_kind)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    gold = inputs["teacher_ids"][:, 0]
    cross_entropy = torch.nn.functional.cross_entropy(
        inputs["hidden"].detach() @ inputs["head_weight"].T, gold, reduction="none"
    )
    assert torch.isfinite(gradient).all()
    if kl_kind in ("truncated", "tail_bucket"):  # against a certain teacher it is the cross-entropy with its one token
        torch.testing.assert_close(result.kl, cross_entropy, rtol=1e-5, atol=1e-6)
    if kl_kind == "total_variation":
        torch.testing.assert_close(result.kl, 1 - (-cross_entropy).exp(), rtol=1e-5, atol=1e-6)
    assert (result.kl >= 0).all()


@pytest.mark.parametrize("kl_kind", TOP_K_KINDS)
def test_a_drafter_with_no_mass_outside_the_top_k_stays_finite_and_follows_the_clamp(kl_kind: str) -> None:
    inputs = problem(torch.float64)
    inputs["head_weight"] = torch.zeros(V, H, dtype=torch.float64)
    inputs["head_weight"][:T, 0] = 60.0 + torch.arange(T)
    inputs["hidden"] = torch.ones(N, H, dtype=torch.float64, requires_grad=True)
    inputs["teacher_ids"] = torch.arange(T).repeat(N, 1)
    expected, expected_gradient = reference(inputs, kl_kind=kl_kind)
    result = run(inputs, kl_kind=kl_kind)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    assert torch.isfinite(gradient).all()
    assert number(weighted(result.loss)) == pytest.approx(float(expected), rel=1e-8)
    assert relative_error(gradient, expected_gradient) < 1e-8


@pytest.mark.parametrize("kl_kind", TOP_K_KINDS)
def test_a_row_without_teacher_has_no_kl(kl_kind: str) -> None:
    inputs = problem(torch.float32)
    inputs["teacher_logprobs"] = torch.full((N, T), -torch.inf)
    inputs["teacher_ids"] = torch.zeros(N, T, dtype=torch.int64)
    result = run(inputs, kl_kind=kl_kind)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    _, expected_gradient = reference(problem(torch.float32), kl_weight=0.0)
    assert not result.kl.any()
    assert not result.sum_min_pq.any()
    assert relative_error(gradient, expected_gradient) < 2e-6


@pytest.mark.parametrize("kl_kind", TOP_K_KINDS)
def test_entries_at_minus_infinity_are_not_part_of_the_top_k(kl_kind: str) -> None:
    short, padded = problem(), problem()
    for key in ("teacher_ids", "teacher_logprobs"):
        short[key] = short[key][:, :2]
    padded["teacher_ids"][:, 2:] = 0
    padded["teacher_logprobs"][:, 2:] = -torch.inf
    expected, found = run(short, kl_kind=kl_kind), run(padded, kl_kind=kl_kind)
    gradients = [torch.autograd.grad(r.loss.sum(), i["hidden"])[0] for r, i in ((expected, short), (found, padded))]
    torch.testing.assert_close(found.kl, expected.kl, rtol=1e-10, atol=1e-12)
    assert relative_error(gradients[1], gradients[0]) < 1e-10


def test_the_tail_bucket_is_zero_with_zero_gradient_where_drafter_and_teacher_agree() -> None:
    inputs = problem()
    log_q = (inputs["hidden"].detach() @ inputs["head_weight"].T).log_softmax(-1).topk(T, -1)
    inputs["teacher_ids"], inputs["teacher_logprobs"] = log_q.indices, log_q.values
    result = run(inputs, ce_weight=0.0, kl_weight=1.0)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    assert float(result.kl.abs().max()) < 1e-12
    assert float(gradient.norm()) < 1e-12


@pytest.mark.parametrize("kl_kind", KL_KINDS)
@pytest.mark.parametrize("ce_weight", [0.0, 1.0])
def test_sixteen_bit_inputs_keep_the_gradient_of_a_good_drafter_within_one_percent(
    kl_kind: str, ce_weight: float
) -> None:
    vocab, hidden = 32_000, 48
    inputs = problem(torch.bfloat16, rows=6, hidden=hidden, vocab=vocab, scale=0.6, kl_kind=kl_kind)
    logits = (inputs["hidden"].detach() @ inputs["head_weight"].T).double()
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher = (logits + 0.05 * noise).log_softmax(-1).topk(T, -1)
    inputs["teacher_ids"], inputs["teacher_logprobs"] = teacher.indices, teacher.values.float()
    if kl_kind == "full_vocabulary":
        inputs["teacher_hidden"] = inputs["hidden"].detach() + 0.02 * inputs["teacher_hidden"]
    _, expected = reference(inputs, ce_weight=ce_weight, kl_weight=1.0, kl_kind=kl_kind)
    result = run(inputs, ce_weight=ce_weight, kl_weight=1.0, kl_kind=kl_kind, chunk_bytes=4 * vocab * LOGIT_BYTES)
    (gradient,) = torch.autograd.grad(weighted(result.loss), inputs["hidden"])
    assert gradient.dtype == torch.bfloat16
    assert relative_error(gradient, expected) < 0.01


@pytest.mark.parametrize(
    ("vocab", "kl_kind", "cap", "dtype"),
    [
        (8_000, "tail_bucket", 5.0, torch.float32),
        (50_000, "tail_bucket", None, torch.bfloat16),
        (50_000, "full_vocabulary", 5.0, torch.bfloat16),
    ],
)
def test_the_memory_of_the_sweep_stays_below_a_tenth_of_all_logits_whatever_the_vocabulary(
    vocab: int, kl_kind: str, cap: float | None, dtype: torch.dtype
) -> None:
    rows = (12 * MIB) // vocab  # 48 MiB of fp32 logits
    inputs = problem(dtype, rows=rows, vocab=vocab, kl_kind=kl_kind)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(inputs, chunk_bytes=1 << 40, kl_kind=kl_kind, final_logit_softcapping=cap).loss.sum().backward()
    live = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < rows * vocab * LOGIT_BYTES / 10


def test_a_byte_budget_below_that_is_kept() -> None:
    workspace = Workspace()
    inputs = problem(torch.bfloat16, rows=4096, vocab=1024)
    run(inputs, chunk_bytes=MIB // 4, workspace=workspace).loss.sum().backward()
    assert MIB // 8 < workspace.num_bytes() <= MIB // 4


def test_buffers_are_used_again_from_call_to_call_and_change_no_result() -> None:
    workspace = Workspace()
    first, fresh = run(problem(), workspace=workspace), run(problem())
    held = workspace.num_bytes()
    again = run(problem(), workspace=workspace)
    assert workspace.num_bytes() == held > 0
    for one, two, three in zip(first, fresh, again, strict=True):
        assert torch.equal(one, two) and torch.equal(two, three)


@pytest.mark.parametrize("vocab", [GROUP * C, GROUP * 2 * C, GROUP * 3 * C + 5, 5])
def test_the_grouped_search_finds_the_largest_logits_in_order(vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(4))
    logits[0, -C:] += 50.0  # all in what is left over, or in one group
    logits[1, :: max(1, vocab // GROUP)][:C] += 50.0
    expected = logits.topk(C)
    values, ids = top_candidates(logits, C)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
@pytest.mark.parametrize("columns", [1, 3, GROUP * C, GROUP * C + 5])
def test_a_search_tile_by_tile_finds_what_a_search_of_all_logits_finds(columns: int, order: str) -> None:
    logits = torch.randn(9, 8 * GROUP * C + 7, generator=torch.Generator().manual_seed(4))
    if order != "random":  # every tile holds better ones than those before, or none does
        logits = logits.sort(-1, descending=order == "descending").values
    logits[:, -3:] += 50.0
    expected = logits.topk(C)
    search = CandidateSearch(C)
    for first in range(0, logits.shape[1], columns):
        tile = logits[:, first : first + columns]
        assert torch.equal(search.add(tile, first), tile.amax(1))
    values, ids = search.best()
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


@pytest.mark.parametrize(("multiplier", "cap"), SHAPINGS)
def test_candidates_without_a_loss_are_those_of_the_loss(multiplier: float, cap: float | None) -> None:
    inputs = problem(torch.float32)
    result = run(inputs, output_multiplier=multiplier, final_logit_softcapping=cap)
    shaping = Shaping(multiplier=multiplier, cap=cap)
    for chunk_bytes in (1, MIB):
        values, ids = unary_candidates(
            inputs["hidden"], inputs["head_weight"], C, chunk_bytes=chunk_bytes, shaping=shaping
        )
        assert torch.equal(ids, result.candidate_ids)
        torch.testing.assert_close(values, result.candidate_logits)


def test_an_implementation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss.implementation='cuda'"):
        run(problem(), implementation="cuda")


def test_full_vocabulary_and_the_teachers_states_go_together() -> None:
    with pytest.raises(ValueError, match="teacher_hidden missing"):
        run(problem(), kl_kind="full_vocabulary")
    with pytest.raises(ValueError, match="teacher_hidden given"):
        run(problem(kl_kind="full_vocabulary"))


@pytest.mark.parametrize("broken", ["target_ids", "teacher_ids", "teacher_logprobs", "head_weight"])
def test_an_input_with_one_axis_too_many_is_refused(broken: str) -> None:
    inputs = problem()
    inputs[broken] = inputs[broken].unsqueeze(-1)
    with pytest.raises(ValueError, match=broken):
        run(inputs)


def test_a_head_in_another_dtype_is_refused() -> None:
    inputs = problem(torch.float32)
    inputs["head_weight"] = inputs["head_weight"].bfloat16()
    with pytest.raises(TypeError, match="bfloat16"):
        run(inputs)


def test_an_unknown_kl_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_kind='full'"):
        run(problem(), kl_kind="full")


def test_position_weights_decay_from_one() -> None:
    expected = torch.tensor([1.0, 0.857, 0.735, 0.630, 0.540, 0.463, 0.397])
    torch.testing.assert_close(position_weights(7, 6.5), expected, rtol=0, atol=6e-4)


def test_dpace_weights_are_the_sum_of_the_products_that_a_slot_belongs_to() -> None:
    supervised = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    gold = torch.tensor([0.9, 0.5, 0.2, 0.8, 0.1])
    c = 0.5 * gold + 0.5
    expected = [
        float(c[0] + c[0] * c[1] + c[0] * c[1] * c[2]),
        float(c[0] * c[1] + c[0] * c[1] * c[2]),
        float(c[0] * c[1] * c[2]),
        float(c[3] + c[3] * c[4]),
        float(c[3] * c[4]),
    ]
    found = dpace_weights(gold.log().requires_grad_(), supervised, 0.5)
    assert found.tolist() == pytest.approx(expected)
    assert not found.requires_grad


def test_dpace_at_alpha_zero_is_the_sensitivity_of_the_expected_length_to_log_acceptance() -> None:
    log_q = torch.tensor([0.9, 0.6, 0.3, 0.8]).log().requires_grad_()
    (expected,) = torch.autograd.grad(log_q.exp().cumprod(0).sum(), log_q)
    found = dpace_weights(log_q, torch.ones(1, 4, dtype=torch.bool), 0.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("multiplier", "cap"), SHAPINGS)
@pytest.mark.parametrize("gathered", [1, C * H * 3, 1 << 20])
def test_candidate_logits_equal_gathered_full_logits(
    multiplier: float, cap: float | None, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash2_train.model.gathered.PIECE_ELEMENTS", gathered)
    inputs = problem()
    hidden, head = inputs["hidden"], inputs["head_weight"]
    ids = torch.randint(0, V, (N, C), generator=torch.Generator().manual_seed(2))
    full = hidden @ head.T * multiplier
    if cap is not None:
        full = cap * torch.tanh(full / cap)
    expected = full.gather(-1, ids)
    found = candidate_logits(hidden, head, ids, output_multiplier=multiplier, final_logit_softcapping=cap)
    factors = torch.arange(N * C, dtype=torch.float64).view(N, C).sin()
    (expected_gradient,) = torch.autograd.grad((expected * factors).sum(), hidden)
    (gradient,) = torch.autograd.grad((found * factors).sum(), hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(("multiplier", "cap"), SHAPINGS)
def test_logits_known_from_the_sweep_have_the_gradient_of_those_made_anew(multiplier: float, cap: float | None) -> None:
    inputs = problem()
    shaping = {"output_multiplier": multiplier, "final_logit_softcapping": cap}
    result = run(inputs, **shaping)
    hidden, head, ids = inputs["hidden"], inputs["head_weight"], result.candidate_ids
    anew = candidate_logits(hidden, head, ids, **shaping)
    known = known_logits(hidden, head, ids, result.candidate_logits, **shaping)
    torch.testing.assert_close(known, anew)
    factors = torch.arange(N * C, dtype=torch.float64).view(N, C).sin()
    (expected,) = torch.autograd.grad((anew * factors).sum(), hidden)
    (gradient,) = torch.autograd.grad((known * factors).sum(), hidden)
    torch.testing.assert_close(gradient, expected)


def test_candidate_logits_of_sixteen_bit_states_come_in_single_precision() -> None:
    inputs = problem(torch.bfloat16)
    found = candidate_logits(inputs["hidden"], inputs["head_weight"], torch.zeros(N, C, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(found.sum(), inputs["hidden"])
    assert found.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16


def test_injection_replaces_only_the_last_candidate_and_only_on_a_miss() -> None:
    candidates = torch.tensor([[1, 2, 3], [4, 5, 6]])
    injected = inject_gold(candidates, torch.tensor([2, 9]))
    assert injected.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert candidates.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_selector_loss_masks_misses_and_unsupervised_rows() -> None:
    scores = torch.tensor([[0.5, 1.0, -1.0], [2.0, 0.0, 1.0], [0.1, 0.2, 0.3]], requires_grad=True)
    candidates = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9]])
    loss, hits, _ = selector_loss(
        scores, candidates, torch.tensor([8, 1, 9]), torch.tensor([0.5, 1.0, 0.0]), injected=False
    )
    expected = 0.5 * torch.nn.functional.cross_entropy(scores[:1], torch.tensor([1]))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert number(loss) == pytest.approx(number(expected))
    assert hits.tolist() == [True, False, False]
    assert gradient[0].any() and not gradient[1:].any()


def test_selector_loss_without_hits_is_zero_and_keeps_its_graph() -> None:
    scores = torch.full((2, 3), torch.nan, requires_grad=True)
    loss, hits, _ = selector_loss(
        scores, torch.ones(2, 3, dtype=torch.int64), torch.tensor([5, 6]), torch.ones(2), injected=False
    )
    (gradient,) = torch.autograd.grad(loss, scores)
    assert number(loss) == 0.0
    assert not gradient.any() and not hits.any()


def test_injected_rows_all_count_and_a_forgotten_injection_is_refused() -> None:
    scores, targets = torch.zeros(2, 3, requires_grad=True), torch.tensor([1, 9])
    candidates = torch.tensor([[1, 2, 3], [4, 5, 6]])
    loss, hits, _ = selector_loss(scores, inject_gold(candidates, targets), targets, torch.ones(2), injected=True)
    assert number(loss) == pytest.approx(2 * float(torch.tensor(3.0).log()))
    assert hits.all()
    with pytest.raises(ValueError, match="inject_gold"):
        selector_loss(scores, candidates, targets, torch.ones(2), injected=True)


def test_selector_loss_refuses_weights_of_another_shape() -> None:
    with pytest.raises(ValueError, match="weights"):
        selector_loss(
            torch.zeros(2, 3),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2).long(),
            torch.ones(2, 1),
            injected=False,
        )
