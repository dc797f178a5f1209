"""Options of the objective that change over a run, as functions of the moment alone: a resume repeats them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config import LossConfig


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a run stands: ``step`` windows of ``steps`` are done; ``seed`` of the run."""

    step: int = 0
    steps: int = 1
    seed: int = 0

    @property
    def done(self) -> float:
        """Share of the run that is done, 0..1."""
        return min(1.0, self.step / max(1, self.steps))


def gamma_at(loss: LossConfig, moment: Moment) -> float:
    """Gamma of the decay weights: straight from ``loss.gamma`` to ``loss.gamma_end`` over the run."""
    if loss.gamma_end is None:
        return loss.gamma
    return loss.gamma + (loss.gamma_end - loss.gamma) * moment.done


def injects_at(loss: LossConfig, moment: Moment) -> bool:
    """Whether a missing data token is put among the selector's candidates now.

    The curriculum injects over the first ``loss.inject_share`` of the run, while the unary head finds few of them,
    and offers what a server would offer from then on.
    """
    if loss.missing_candidate == "curriculum":
        return moment.done < loss.inject_share
    return loss.missing_candidate == "inject"


def sampled_share_at(loss: LossConfig, moment: Moment) -> float:
    """Probability that a slot's predecessor is the drafter's own draw: up to ``loss.sampled_predecessor`` linearly."""
    if loss.sampled_predecessor_ramp == 0:
        return loss.sampled_predecessor
    return loss.sampled_predecessor * min(1.0, moment.done / loss.sampled_predecessor_ramp)
