"""How strongly each part of the loss pulls at the backbone.

Measured is the gradient of a part, with its weight, by the states [N, H] that leave the drafter: the point where all
parts meet, so that nothing behind it has to be differentiated. Squared norms of micro-batches and ranks add up to that
of the window. A share is a norm over the sum of the parts' norms; as gradients partly cancel, the norms do not add up
to that of the whole.
"""

from __future__ import annotations

import math

from dflash2_train.objective import SQUARES


def is_due(step: int, *, every: int, log_every: int) -> bool:
    """Whether the gradients of this step are measured: the first logged step at or after each multiple of ``every``.

    Args:
        step: counted from 1.
        every: ``train.gradient_share_every``; 0 = never.
        log_every: ``train.log_every``.
    """
    return every > 0 and step % log_every == 0 and step // every > (step - log_every) // every


def with_gradient_shares(rates: dict[str, float]) -> dict[str, float]:
    """A step's figures with the squared norms, if there are any, replaced by norms and shares."""
    norms = {name.removeprefix(SQUARES): math.sqrt(v) for name, v in rates.items() if name.startswith(SQUARES)}
    total = sum(norms.values())
    values = {name: value for name, value in rates.items() if not name.startswith(SQUARES)}
    values.update({f"gradient_norm/{part}": norm for part, norm in norms.items() if math.isfinite(norm)})
    if 0 < total < math.inf:
        values.update({f"gradient_share/{part}": norm / total for part, norm in norms.items()})
    return values
