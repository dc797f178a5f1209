"""How the target writes."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from dflash2_train.config.rules import require


@dataclass(kw_only=True)
class SamplingConfig:
    """How the target writes. Every field is sent with every request and recorded with every row."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 0.95  # mass of the most likely tokens that are drawn from; 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    presence_penalty: float = 0.0  # 0 = off
    frequency_penalty: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    max_tokens: int = MISSING  # completion tokens at most
    seed: int = 0  # row seeds derive from (seed, prompt_id, repeat, turn)
    repeats: int = 1  # completions a prompt

    def check(self) -> None:
        require(self.temperature >= 0, "data.sampling.temperature", self.temperature, "must be at least 0", "Use 1.0.")
        require(0 < self.top_p <= 1, "data.sampling.top_p", self.top_p, "must lie in (0, 1]", "Use 0.95.")
        require(self.top_k >= 0, "data.sampling.top_k", self.top_k, "must be 0 (off) or positive", "Use 0.")
        require(0 <= self.min_p < 1, "data.sampling.min_p", self.min_p, "must lie in [0, 1)", "Use 0.")
        for key in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, key)
            require(-2 <= value <= 2, f"data.sampling.{key}", value, "must lie in [-2, 2]", "Use 0.")
        require(
            self.repetition_penalty > 0,
            "data.sampling.repetition_penalty",
            self.repetition_penalty,
            "must be positive",
            "Use 1.0 for none.",
        )
        require(self.max_tokens > 0, "data.sampling.max_tokens", self.max_tokens, "must be positive", "Use 4096.")
        require(self.repeats > 0, "data.sampling.repeats", self.repeats, "must be positive", "Use 1.")
