"""Validation during training: what is held back, how much of it is looked at, and when real decoding must agree."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config.rules import require


@dataclass(kw_only=True)
class ValidationConfig:
    """Hold-out captures and what is done with them every ``train.validate_every`` steps."""

    share: float = 0.0  # of the captured conversations, never trained on; all answers to a prompt stay together
    seed: int = 0  # of that choice and of sampled decoding, so that runs of any train.seed can be compared
    root: str | None = None  # data.root of other captures to validate on, in place of a share
    max_documents: int = 256  # captured answers looked at each time; the same ones throughout
    decode_prompts: int = 0  # of their prompts decoded with the target, by the built-in runner; 0 = none
    decode_tokens: int = 64  # written at most for each
    tolerance: float = 0.25  # of the forecast's accepted drafts, by which real ones may differ, beside three std errors

    def check(self, validate_every: int) -> None:
        """Raise ConfigError for the first rule that these and ``train.validate_every`` break."""
        require(0 <= self.share < 1, "train.validation.share", self.share, "must lie in [0, 1)", "Use 0.02.")
        require(
            self.share == 0 or self.root is None,
            "train.validation.root",
            self.root,
            f"stands beside train.validation.share={self.share}",
            "Choose one of them: captures of their own, or a share of those to train on.",
        )
        require(
            validate_every == 0 or self.share > 0 or self.root is not None,
            "train.validate_every",
            validate_every,
            "has nothing to validate on",
            "Set train.validation.share=0.02, or train.validation.root; or use 0 for no validation.",
        )
        for key in ("max_documents", "decode_tokens"):
            value = getattr(self, key)
            require(value > 0, f"train.validation.{key}", value, "must be positive", "Leave it at its default.")
        require(
            0 <= self.decode_prompts <= self.max_documents,
            "train.validation.decode_prompts",
            self.decode_prompts,
            f"must lie between 0 and train.validation.max_documents={self.max_documents}",
            "Use 8, or 0 for no decoding.",
        )
        require(
            self.tolerance >= 0,
            "train.validation.tolerance",
            self.tolerance,
            "must be at least 0",
            "Use 0.25.",
        )
