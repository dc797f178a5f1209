"""How a batch is decoded: length and stops, the target's sampling, how drafts are made, how the cache is kept."""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_SAMPLING = ("argmax", "selector")


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The same settings serve the speculative and the plain path.

    Raises:
        ValueError: a value outside its range.
    """

    max_new_tokens: int
    num_drafted: int  # K; unused by plain decoding
    stop_ids: frozenset[int]  # every id of a list-valued EOS; the stop token itself is part of the output
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off; share of the best token's probability that a token must reach
    draft_sampling: str = "argmax"  # argmax: one-hot q; selector: paths sampled with their true q
    static_cache: bool = False  # full-size target cache of fixed addresses: what torch.compile and CUDA graphs need
    compile_target: bool = False  # torch.compile of the verifying forward; needs static_cache

    def __post_init__(self) -> None:
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        _check(self.num_drafted >= 1, "num_drafted", self.num_drafted, "must be at least 1. Use plain_decode for none")
        _check(self.temperature >= 0, "temperature", self.temperature, "must be at least 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]. Use 1.0 for off")
        _check(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or positive")
        _check(0 <= self.min_p < 1, "min_p", self.min_p, "must lie in [0, 1). Use 0.0 for off")
        _check(
            self.draft_sampling in DRAFT_SAMPLING,
            "draft_sampling",
            self.draft_sampling,
            f"must be one of {DRAFT_SAMPLING}",
        )
        _check(
            self.static_cache or not self.compile_target,
            "compile_target",
            self.compile_target,
            "needs static_cache=True, or every new length would be compiled afresh",
        )

    @property
    def draft_temperature(self) -> float:
        """Temperature of the selector's walk; 0 proposes the argmax path."""
        return self.temperature if self.draft_sampling == "selector" else 0.0


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: {rule}.")
