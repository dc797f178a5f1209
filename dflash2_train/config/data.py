"""Prompts, regeneration, capture and the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.attest import AttestConfig
from dflash2_train.config.prompts import PromptSourceConfig
from dflash2_train.config.rules import require
from dflash2_train.config.sampling import SamplingConfig
from dflash2_train.config.store import StoreConfig
from dflash2_train.config.stream import StreamConfig

BACKENDS = ("vllm", "hf")
MODES = ("cache", "stream")


@dataclass(kw_only=True)
class DataConfig:
    """Prompts, regeneration, capture and the cache."""

    root: str = MISSING  # folder of conversations/ and capture/
    train_prompts: list[PromptSourceConfig] = MISSING
    holdout_prompts: list[PromptSourceConfig] = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    enable_thinking: bool | None = None  # chat-template argument; None = the template has none
    backend: str = "vllm"  # vllm | hf, for both stages; never changed silently
    mode: str = "cache"  # cache: all states on disk first; stream: captured while training, through a ring
    stream: StreamConfig = field(default_factory=StreamConfig)
    max_prompt_tokens: int = MISSING  # longer prompts are dropped and counted
    drop_cut: bool = False  # True drops completions that ended for length
    teacher_top_k: int = 20
    conversations_per_shard: int = 128
    max_num_seqs: int = 96  # requests in flight inside the engine
    kv_cache_gib: float = 2.0  # vLLM on CPU: memory for its KV cache
    gpu_memory_utilization: float = 0.9  # vLLM on GPU
    store: StoreConfig = field(default_factory=StoreConfig)
    max_failed_share: float = 0.01  # of conversations whose answer or states could not be had; more end the stage
    attest: AttestConfig = field(default_factory=AttestConfig)

    def check(self) -> None:
        require(self.backend in BACKENDS, "data.backend", self.backend, f"must be one of {BACKENDS}", "Pick one.")
        require(self.teacher_top_k > 0, "data.teacher_top_k", self.teacher_top_k, "must be positive", "Use 20.")
        require(
            self.conversations_per_shard > 0,
            "data.conversations_per_shard",
            self.conversations_per_shard,
            "must be positive",
            "Use 128.",
        )
        require(
            self.max_prompt_tokens > 0, "data.max_prompt_tokens", self.max_prompt_tokens, "must be positive", "Use 512."
        )
        require(self.mode in MODES, "data.mode", self.mode, f"must be one of {MODES}", "Pick one.")
        require(
            0.0 <= self.max_failed_share < 1.0,
            "data.max_failed_share",
            self.max_failed_share,
            "must lie in [0, 1)",
            "Use 0.01.",
        )
        self.sampling.check()
        self.attest.check()
        self.store.check()
        self.stream.check()
