"""Weights and options of the objective."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config.rules import require

KL_KINDS = ("tail_bucket", "truncated", "renormalised")
MISSING_CANDIDATE = ("mask", "inject")


@dataclass(kw_only=True)
class LossConfig:
    """Weights of the objective; formulas in DESIGN terms are at the top of ``losses.py``."""

    gamma: float = 6.5  # w_k = exp(-(k - 1) / gamma)
    ce_weight: float = 1.0
    kl_weight: float = 1.0  # beta
    kl_kind: str = "tail_bucket"
    selector_weight: float = 1.0
    selector_ramp: float = 0.001  # share of the steps over which the selector's weight rises from 0
    missing_candidate: str = "mask"
    detach_unary: bool = False
    chunk_mib: int = 256  # fp32 logits alive at once in the chunked loss, MiB

    def check(self) -> None:
        require(self.gamma > 0, "loss.gamma", self.gamma, "must be positive", "Use 6.5.")
        require(self.kl_kind in KL_KINDS, "loss.kl_kind", self.kl_kind, f"must be one of {KL_KINDS}", "Pick one.")
        require(
            self.missing_candidate in MISSING_CANDIDATE,
            "loss.missing_candidate",
            self.missing_candidate,
            f"must be one of {MISSING_CANDIDATE}",
            "Pick one.",
        )
        for key in ("ce_weight", "kl_weight", "selector_weight"):
            value = getattr(self, key)
            require(value >= 0, f"loss.{key}", value, "must be at least 0", "Use 1.0.")
        require(
            self.ce_weight + self.kl_weight > 0,
            "loss.ce_weight",
            self.ce_weight,
            "with loss.kl_weight=0 nothing is left to train",
            "Set one of them.",
        )
        require(
            0 <= self.selector_ramp <= 1,
            "loss.selector_ramp",
            self.selector_ramp,
            "is a share of the steps",
            "Use 0.001.",
        )
        require(self.chunk_mib > 0, "loss.chunk_mib", self.chunk_mib, "must be positive", "Use 256.")
