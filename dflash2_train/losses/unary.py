"""The unary loss: cross-entropy and divergence of the drafter's own logits, rows in, differentiable rows out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash2_train.config import IMPLEMENTATIONS, KL_KINDS, ConfigError
from dflash2_train.losses.candidates import check_head
from dflash2_train.losses.pass_torch import FullVocabularyPass
from dflash2_train.losses.shaping import Shaping
from dflash2_train.losses.sweep import LogitPass, RowResults, Rows, SweepSettings, Workspace, sweep, sweep_budget
from dflash2_train.losses.tiles import tiled_sweep

_SCALED_ROWS = 128  # whose fp32 product a CPU holds at once


class UnaryLoss(NamedTuple):
    """What one sweep over the logits yields. Only ``loss`` carries a gradient; ``softmax(z)`` is q."""

    loss: Tensor  # [N] fp32, ce_weight CE_n + kl_weight KL_n
    ce: Tensor  # [N] fp32, nats; -ce is the log-probability of the data token
    kl: Tensor  # [N] fp32, nats (total_variation: a probability)
    candidate_ids: Tensor  # [N, C] int64, the C largest logits, descending
    candidate_logits: Tensor  # [N, C] fp32
    log_normaliser: Tensor  # [N] fp32, log sum_V exp(z)
    top1_correct: Tensor  # [N] bool, argmax z == target id
    sum_min_pq: Tensor  # [N] fp32, sum_T min(p, q): a lower bound of the acceptance probability sum_V min(p, q)


def unary_loss(
    hidden: Tensor,
    head_weight: Tensor,
    target_ids: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
    kl_kind: str,
    top_k: int,
    chunk_bytes: int,
    logit_share: float = 0.1,
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
    implementation: str = "auto",
    teacher_hidden: Tensor | None = None,
    workspace: Workspace | None = None,
) -> UnaryLoss:
    """CE and KL of every row in one sweep that never holds [N, V]; weigh and sum the rows as you like.

    Args:
        hidden: [N, H] drafter states after the final norm; the only input that gets a gradient. N may be 0.
        head_weight: [V, H] frozen output head, same dtype as ``hidden``.
        target_ids: [N] int64 data tokens.
        teacher_ids: [N, T] int64, those of a row that are part of T unique.
        teacher_logprobs: [N, T] log-probabilities of the target. An entry at -inf is not part of T; a row of them
            only is a row without teacher and has KL 0.
        ce_weight: factor of the CE.
        kl_weight: factor of the KL (beta).
        kl_kind: see the formulas of ``losses``.
        top_k: C, candidates a row.
        chunk_bytes: memory of the sweep, bytes; at least one row is swept at a time.
        logit_share: the sweep takes less where the whole loss would else hold more than this share of fp32 logits
            [N, V].
        output_multiplier: factor of the raw logits, positive.
        final_logit_softcapping: c of ``c * tanh(z / c)``, or None.
        implementation: ``torch``, ``triton``, or ``auto``: triton on CUDA, torch elsewhere.
        teacher_hidden: [N, H] the target's own states after its final norm, for ``full_vocabulary`` alone; its logits
            are made with the same head, factor and cap.
        workspace: buffers to use again from call to call; without one they are made for this call.

    Raises:
        ValueError: shapes that do not belong together, an unknown ``kl_kind``, or ``teacher_hidden`` missing or not
            wanted.
        TypeError: ``hidden`` and ``head_weight`` differ in dtype.
        ConfigError: ``implementation`` cannot run here.
    """
    rows = Rows(hidden.detach(), target_ids, teacher_ids, teacher_logprobs, teacher_hidden)
    head = head_weight.detach()
    _check_inputs(rows, head, kl_kind)
    settings = SweepSettings(
        ce_weight=ce_weight,
        kl_weight=kl_weight,
        kl_kind=kl_kind,
        top_k=top_k,
        shaping=Shaping(multiplier=output_multiplier, cap=final_logit_softcapping),
    )
    workspace = workspace or Workspace()
    chosen = choose_implementation(implementation, hidden.device.type)
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    if len(hidden) == 0:
        results, gradient = _no_rows(rows, top_k), torch.zeros_like(hidden) if with_gradient else None
    else:
        budget = sweep_budget(hidden, head, chunk_bytes, logit_share)
        if chosen == "torch" and teacher_hidden is None:
            results, gradient = tiled_sweep(
                rows, head, settings, budget=budget, with_gradient=with_gradient, workspace=workspace
            )
        else:
            logit_pass = _make_pass(
                chosen, settings, head, full=teacher_hidden is not None, budget=budget, workspace=workspace
            )
            results, gradient = sweep(
                rows, head, logit_pass, budget=budget, with_gradient=with_gradient, workspace=workspace
            )
    loss = ce_weight * results.ce + kl_weight * results.kl
    if gradient is not None:
        loss = _AttachGradient.apply(hidden, loss, gradient)  # type: ignore[no-untyped-call]
    return UnaryLoss(loss, *results)


def choose_implementation(implementation: str, device_type: str) -> str:
    """``torch`` or ``triton`` for a setting and a device.

    Raises:
        ConfigError: an unknown setting.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"loss.implementation={implementation!r}: must be one of {IMPLEMENTATIONS}. Use auto.")
    if implementation == "auto":
        return "triton" if device_type == "cuda" else "torch"
    return implementation


def _make_pass(
    implementation: str,
    settings: SweepSettings,
    head_weight: Tensor,
    *,
    full: bool,
    budget: int,
    workspace: Workspace,
) -> LogitPass:
    if implementation == "torch":
        return FullVocabularyPass(settings, head_weight, budget=budget, workspace=workspace)
    try:
        from dflash2_train.losses.pass_triton import TritonPass
    except ModuleNotFoundError as error:
        raise ConfigError(
            "loss.implementation: triton is needed for the loss on CUDA but is not installed. Install it, or set "
            "loss.implementation=torch."
        ) from error
    return TritonPass(settings, head_weight, full=full)


def _check_inputs(rows: Rows, head_weight: Tensor, kl_kind: str) -> None:
    hidden, target_ids, teacher_ids, teacher_logprobs, teacher_hidden = rows
    check_head(hidden, head_weight)
    count = hidden.shape[:1]
    if hidden.dim() != 2 or target_ids.shape != count:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and target_ids {tuple(target_ids.shape)} must be [N, H] and [N]."
        )
    if teacher_ids.dim() != 2 or teacher_ids.shape[:1] != count or teacher_logprobs.shape != teacher_ids.shape:
        raise ValueError(
            f"teacher_ids {tuple(teacher_ids.shape)} and teacher_logprobs {tuple(teacher_logprobs.shape)} "
            f"must both be [N, T] with N={count[0]}."
        )
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind={kl_kind!r}: must be one of {KL_KINDS}.")
    if (kl_kind == "full_vocabulary") != (teacher_hidden is not None):
        raise ValueError(
            f"kl_kind={kl_kind!r} with teacher_hidden {'given' if teacher_hidden is not None else 'missing'}: "
            "full_vocabulary needs the target's final states, the other kinds take the teacher's top-T alone."
        )
    if teacher_hidden is not None and (teacher_hidden.shape, teacher_hidden.dtype) != (hidden.shape, hidden.dtype):
        raise ValueError(
            f"teacher_hidden {teacher_hidden.dtype} {tuple(teacher_hidden.shape)} must be as hidden, {hidden.dtype} "
            f"{tuple(hidden.shape)}."
        )


def _no_rows(rows: Rows, top_k: int) -> RowResults:
    dtype = torch.promote_types(rows.hidden.dtype, torch.float32)
    number = rows.hidden.new_empty(0, dtype=dtype)
    candidate_ids = rows.target_ids.new_empty(0, top_k)
    correct = number.new_empty(0, dtype=torch.bool)
    return RowResults(number, number, candidate_ids, number.new_empty(0, top_k), number, correct, number)


class _AttachGradient(torch.autograd.Function):
    """Row values whose gradients by ``hidden`` are already known: backward only scales them, row by row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # In place: it is used once, and autograd refuses a second use of a saved tensor that has changed.
        step = len(gradient) if gradient.device.type != "cpu" else _SCALED_ROWS
        for start in range(0, len(gradient), max(1, step)):
            piece = gradient[start : start + step]
            # Promoted by the factor: a product in 16 bits would round the factor as well.
            piece.copy_(piece * grad_output[start : start + step, None])
        return gradient, None, None
