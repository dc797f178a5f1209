"""Several draft lengths and temperatures in one evaluation with the built-in runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash2_train.config.rules import require


@dataclass(kw_only=True)
class EvalSweepConfig:
    """``eval.sweep``: every task with every K at every temperature, as in [1, 3, 5, 7] and [0, 0.6, 1.0]."""

    num_speculative_tokens: list[int] = field(default_factory=list)  # K; empty = eval.num_drafted alone
    temperatures: list[float] = field(default_factory=list)  # empty = greedy, and eval.temperature where that is set

    @property
    def is_set(self) -> bool:
        """Whether anything is swept."""
        return bool(self.num_speculative_tokens or self.temperatures)

    def check(self, largest_k: int) -> None:
        """Raise ConfigError for the first rule that the values break; ``largest_k`` is drafter.block_size - 1."""
        drafted, temperatures = self.num_speculative_tokens, self.temperatures
        require(
            len(set(drafted)) == len(drafted) and all(1 <= k <= largest_k for k in drafted),
            "eval.sweep.num_speculative_tokens",
            drafted,
            f"must be different numbers between 1 and drafter.block_size - 1 = {largest_k}",
            "Drop those outside.",
        )
        require(
            len(set(temperatures)) == len(temperatures) and all(t >= 0 for t in temperatures),
            "eval.sweep.temperatures",
            temperatures,
            "must be different numbers of at least 0",
            "Use [0, 0.6, 1.0]; 0 is greedy.",
        )
