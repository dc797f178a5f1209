"""How much each slot of a block counts.

    decay   w_k = exp(-(k - 1) / gamma)
    dpace   w_k = sum_{m >= k} prod_{i <= m} c_i     with c_i = (1 - alpha) q_i(y_i) + alpha, a constant to autograd

D-PACE weights are the sensitivity of the expected accepted length to each slot's log-acceptance (exact at alpha = 0):
a slot counts as long as the ones before it are likely to be accepted. alpha keeps later slots alive while q is low.
"""

from __future__ import annotations

import torch
from torch import Tensor


def position_weights(num_drafted: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """Slot weights ``exp(-(k - 1) / gamma)`` for k = 1..K, [K] fp32."""
    return torch.exp(-torch.arange(num_drafted, dtype=torch.float32, device=device) / gamma)


@torch.no_grad()
def dpace_weights(gold_logprob: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights of the supervised slots.

    Args:
        gold_logprob: [N] drafter log-probability of the data token, slots in the order of ``supervised``.
        supervised: [..., K] bool, a prefix of its block; N True.
        alpha: 0..1.

    Returns:
        [N] fp32. They do not average to 1: their normaliser is the number of supervised slots.
    """
    confidence = gold_logprob.new_zeros(supervised.shape)
    confidence[supervised] = (1.0 - alpha) * gold_logprob.exp() + alpha  # 0 past the supervised prefix ends the product
    reached = confidence.cumprod(-1)
    weights = reached.flip(-1).cumsum(-1).flip(-1)  # sum over m >= k
    return weights[supervised].float()
