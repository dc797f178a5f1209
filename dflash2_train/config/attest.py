"""Limits of the gates that a cache passes before training starts."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config.rules import require

SHARES = ("min_agreement", "min_teacher_agreement", "min_supervised_share", "max_supervised_share")


@dataclass(kw_only=True)
class AttestConfig:
    """What a cache must show before a step is spent on it."""

    tokens: int = 32  # cached tokens held against a plain forward of the target, at least; 0 leaves that out
    label_tokens: int = 16384  # tokens of each source whose labels are held against the teacher, at most
    min_agreement: float = 0.3  # least share of a source's supervised tokens in the teacher's top-k
    min_teacher_agreement: float = 0.9  # least share of rows where teacher and target have the same first choice
    min_supervised_share: float = 0.02  # of all tokens
    max_supervised_share: float = 0.999  # of all tokens; all of them would mean that prompts are trained on

    def check(self) -> None:
        require(self.tokens >= 0, "data.attest.tokens", self.tokens, "must not be negative", "Use 32.")
        require(self.label_tokens > 0, "data.attest.label_tokens", self.label_tokens, "must be positive", "Use 16384.")
        for key in SHARES:
            value = getattr(self, key)
            require(0.0 <= value <= 1.0, f"data.attest.{key}", value, "must lie in [0, 1]", "Give a share.")
        require(
            self.min_supervised_share <= self.max_supervised_share,
            "data.attest.min_supervised_share",
            self.min_supervised_share,
            f"must not exceed data.attest.max_supervised_share={self.max_supervised_share}",
            "Lower it.",
        )
