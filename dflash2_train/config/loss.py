"""Weights and options of the objective."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config.rules import require

KL_KINDS = ("tail_bucket", "truncated", "renormalised", "total_variation", "full_vocabulary")
CACHED_KL_KINDS = KL_KINDS[:-1]  # those that a cache of top-T logits can give
MISSING_CANDIDATE = ("mask", "inject", "curriculum")
POSITION_WEIGHTS = ("decay", "dpace")
SELECTOR_DENOMINATORS = ("window", "hits")
IMPLEMENTATIONS = ("auto", "torch", "triton")


@dataclass(kw_only=True)
class LossConfig:
    """Weights of the objective; formulas stand at the top of ``losses/__init__.py``."""

    position_weights: str = "decay"  # decay: exp(-(k - 1) / gamma); dpace: from the drafter's own confidence
    gamma: float = 6.5  # slot k weighs exp(-(k - 1) / gamma): a small one looks at the first slots
    gamma_end: float | None = None  # gamma goes there in a straight line over the run; None = stays
    dpace_alpha: float = 0.5  # 0 = sensitivity of the expected accepted length, 1 = (K - k + 1)
    ce_weight: float = 1.0  # of the cross-entropy on the token of the text
    kl_weight: float = 1.0  # beta: of the divergence from the target's own distribution
    kl_kind: str = "tail_bucket"  # the form of that divergence, see losses/divergence.py
    selector_weight: float = 1.0  # of the selector's cross-entropy over the candidates
    selector_ramp: float = 0.001  # share of the steps over which the selector's weight rises from 0
    selector_denominator: str = "window"  # window: that of the unary loss; hits: slots that hold their data token
    # A slot whose token is not among the candidates. mask: the selector is not trained on it; inject: the token takes
    # the last place; curriculum: inject over the first inject_share of the run, then mask.
    missing_candidate: str = "mask"
    inject_share: float = 0.1  # share of the steps, see missing_candidate
    detach_unary: bool = False  # the selector's loss does not reach the unary logits
    sampled_predecessor: float = 0.0  # probability that the selector trains on the drafter's own predecessor
    sampled_predecessor_ramp: float = 0.5  # share of the run over which that probability rises from 0
    served_anchor_share: float = 0.0  # share of the anchors moved to where a server would start a block
    served_anchor_hops: int = 2  # rounds of drafting that such an anchor is moved by; each is a forward pass
    implementation: str = "auto"  # of the unary loss: auto (triton on CUDA, torch elsewhere) | torch | triton
    chunk_mib: int = 256  # memory of the chunked loss, MiB
    logit_share: float = 0.1  # of the bytes of fp32 logits [slots, V]; the loss takes less than chunk_mib above it

    def check(self) -> None:
        for key, allowed in (
            ("kl_kind", KL_KINDS),
            ("missing_candidate", MISSING_CANDIDATE),
            ("position_weights", POSITION_WEIGHTS),
            ("selector_denominator", SELECTOR_DENOMINATORS),
            ("implementation", IMPLEMENTATIONS),
        ):
            value = getattr(self, key)
            require(value in allowed, f"loss.{key}", value, f"must be one of {allowed}", "Pick one.")
        require(
            self.kl_kind in CACHED_KL_KINDS,
            "loss.kl_kind",
            self.kl_kind,
            "needs the target's final hidden states, and a capture cache holds its top logits instead",
            f"Use one of {CACHED_KL_KINDS}.",
        )
        require(self.gamma > 0, "loss.gamma", self.gamma, "must be positive", "Use 6.5.")
        require(
            self.gamma_end is None or self.gamma_end > 0,
            "loss.gamma_end",
            self.gamma_end,
            "must be positive",
            "Leave it null to keep loss.gamma.",
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
        for key, usual in (
            ("selector_ramp", 0.001),
            ("inject_share", 0.1),
            ("dpace_alpha", 0.5),
            ("sampled_predecessor", 0.0),
            ("sampled_predecessor_ramp", 0.5),
            ("served_anchor_share", 0.0),
        ):
            value = getattr(self, key)
            require(0 <= value <= 1, f"loss.{key}", value, "is a share and must lie in [0, 1]", f"Use {usual}.")
        for key, usual_count in (("served_anchor_hops", 2), ("chunk_mib", 256)):
            value = getattr(self, key)
            require(value > 0, f"loss.{key}", value, "must be positive", f"Use {usual_count}.")
        require(0 < self.logit_share <= 1, "loss.logit_share", self.logit_share, "must lie in (0, 1]", "Use 0.1.")
