"""The training losses of a drafter, from hidden states to differentiable rows.

With drafter logits z over the whole vocabulary, ``q = softmax(z)``, data token y, the teacher's stored top-T ids with
probabilities p (exact softmax of the target), ``P = sum_T p`` and ``Q = sum_T q``, the unary loss of a slot is
``ce_weight * CE + kl_weight * KL``:

    CE               -log q_y
    tail_bucket      sum_T p (log p - log q) + (1 - P) [log(1 - P) - log(1 - Q)]      >= 0, minimal at q = p on T
    truncated        sum_T p (log p - log q)                                          may be negative
    renormalised     sum_T (p / P) [log(p / P) - log(q / Q)]                          ratios inside T only
    total_variation  1/2 sum_T |p - q| + 1/2 |P - Q|                                  0..1, what a sampled draft loses
    full_vocabulary  sum_V p (log p - log q), p from the target's final hidden states; no top-T cache can give it

Logits are ``softcap(output_multiplier * hidden @ head^T)``, the product in the parameters' dtype as served, all
that follows in fp32. The head is frozen: nothing here makes a gradient for it. :func:`unary_loss` never holds
[N, V]: it sweeps chunks of rows, on a CPU by tiles of the vocabulary, and turns each piece of logits into a part of the
hidden gradient before the next one. The gradient of every top-T variant has the shape

    dKL/dz_j = row_scale * q_j + [j in T] correction_j
    tail_bucket      row_scale = P - r Q          correction = r q - p     with r = (1 - P) / (1 - Q)
    truncated        row_scale = P                correction = -p
    renormalised     row_scale = 0                correction = q / Q - p / P
    total_variation  row_scale = - sum_T g q      correction = g q         with g = (sign(q - p) + sign(Q - P)) / 2

so one softmax is multiplied by the head, scaled by row and corrected at T + 1 places.

Modules: ``unary`` (the entry), ``tiles`` (plain PyTorch), ``sweep`` (whole rows) with ``pass_triton`` and, for the full
vocabulary, ``pass_torch`` (what is done to a chunk of logits), ``products`` (with the head, on a CPU), ``divergence``
(the formulas above), ``candidates``, ``selector``, ``weights``, ``schedule``.

Letters: N rows (slots of all blocks), M rows of a chunk, V vocabulary, H hidden, T teacher ids, C candidates.
"""

from dflash2_train.losses.candidates import candidate_logits, inject_gold, known_logits, unary_candidates
from dflash2_train.losses.divergence import MIN_TAIL
from dflash2_train.losses.schedule import Moment, gamma_at, injects_at, sampled_share_at
from dflash2_train.losses.selector import SelectorLoss, selector_loss
from dflash2_train.losses.sweep import Workspace
from dflash2_train.losses.unary import UnaryLoss, unary_loss
from dflash2_train.losses.weights import dpace_weights, position_weights

__all__ = [
    "MIN_TAIL",
    "Moment",
    "SelectorLoss",
    "UnaryLoss",
    "Workspace",
    "candidate_logits",
    "dpace_weights",
    "gamma_at",
    "inject_gold",
    "injects_at",
    "known_logits",
    "position_weights",
    "sampled_share_at",
    "selector_loss",
    "unary_candidates",
    "unary_loss",
]
