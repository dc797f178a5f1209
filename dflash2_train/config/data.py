"""Prompts, regeneration, capture and the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.attest import AttestConfig
from dflash2_train.config.generation import GenerationConfig
from dflash2_train.config.prompts import PromptSourceConfig, check_sources
from dflash2_train.config.rules import ConfigError, require
from dflash2_train.config.sampling import SamplingConfig
from dflash2_train.config.store import StoreConfig
from dflash2_train.config.stream import StreamConfig

BACKENDS = ("vllm", "hf", "server")
CAPTURE_BACKENDS = ("vllm", "hf")
MODES = ("cache", "stream")
SIZES = (
    "teacher_top_k",
    "conversations_per_shard",
    "max_prompt_tokens",
    "max_num_seqs",
    "kv_cache_gib",
    "gpu_memory_utilization",
)


@dataclass(kw_only=True)
class DataConfig(GenerationConfig):
    """Prompts, regeneration, capture and the cache."""

    root: str = MISSING  # folder of conversations/ and capture/
    train_prompts: list[PromptSourceConfig] = MISSING
    holdout_prompts: list[PromptSourceConfig] = MISSING
    evaluation_prompts: list[PromptSourceConfig] = field(default_factory=list)  # of benchmarks: never trained on
    max_prompts: int | None = None  # training prompts in all, after every filter, shared out by the sources' weights
    near_duplicates: float | None = 0.8  # Jaccard similarity of 5-word runs from which a prompt is a copy; None = off
    # Share of a source's rows that may be faulty, and of the prompts that may be refused by the chat template or too
    # long, before the run ends.
    max_rejected_share: float = 0.1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    enable_thinking: bool | None = None  # chat-template argument; None = the template has none
    backend: str = "vllm"  # vllm | hf | server: who answers; never changed silently
    capture_backend: str | None = None  # vllm | hf: who reads states; None = data.backend
    mode: str = "cache"  # cache: all states on disk first; stream: captured while training, through a ring
    stream: StreamConfig = field(default_factory=StreamConfig)
    max_prompt_tokens: int = MISSING  # longer prompts are dropped and counted
    teacher_top_k: int = 20  # T: most likely tokens of the target that are stored for each position
    conversations_per_shard: int = 128  # rows a file; a shard of states is held in memory before it is written
    max_num_seqs: int = 96  # requests in flight inside the engine
    kv_cache_gib: float = 2.0  # vLLM on CPU: memory for its KV cache
    gpu_memory_utilization: float = 0.9  # vLLM on GPU
    store: StoreConfig = field(default_factory=StoreConfig)
    max_failed_share: float = 0.01  # of conversations whose answer or states could not be had; more end the stage
    attest: AttestConfig = field(default_factory=AttestConfig)

    @property
    def capturer(self) -> str:
        """The backend of stage capture.

        Raises:
            ConfigError: it would be servers, which give no states.
        """
        chosen = self.capture_backend or self.backend
        if chosen not in CAPTURE_BACKENDS:
            raise ConfigError(
                f"data.capture_backend={self.capture_backend!r}: with data.backend={self.backend} nothing can read the "
                f"target's states. Set data.capture_backend to one of {CAPTURE_BACKENDS}, or run stage=regenerate."
            )
        return chosen

    def check(self) -> None:
        require(self.backend in BACKENDS, "data.backend", self.backend, f"must be one of {BACKENDS}", "Pick one.")
        require(
            self.capture_backend is None or self.capture_backend in CAPTURE_BACKENDS,
            "data.capture_backend",
            self.capture_backend,
            f"must be one of {CAPTURE_BACKENDS}",
            "Leave it null for data.backend.",
        )
        self.check_generation(self.backend)
        for key in SIZES:
            value = getattr(self, key)
            require(value > 0, f"data.{key}", value, "must be positive", "Use the experiment's value.")
        require(
            self.gpu_memory_utilization <= 1,
            "data.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "is a share of the memory, at most 1",
            "Use 0.9.",
        )
        require(self.mode in MODES, "data.mode", self.mode, f"must be one of {MODES}", "Pick one.")
        require(
            0.0 <= self.max_failed_share < 1.0,
            "data.max_failed_share",
            self.max_failed_share,
            "must lie in [0, 1)",
            "Use 0.01.",
        )
        self._check_prompts()
        self.sampling.check()
        self.attest.check()
        self.store.check()
        self.stream.check()

    def _check_prompts(self) -> None:
        limit, near, share = self.max_prompts, self.near_duplicates, self.max_rejected_share
        require(limit is None or limit > 0, "data.max_prompts", limit, "must be positive", "Use null for all prompts.")
        require(
            near is None or 0.7 <= near <= 1.0,
            "data.near_duplicates",
            near,
            "must lie in [0.7, 1], where the index finds nearly all copies",
            "Use 0.8, or null to keep near-duplicates.",
        )
        require(0.0 <= share <= 1.0, "data.max_rejected_share", share, "must lie in [0, 1]", "Use 0.1.")
        check_sources(self.train_prompts, self.holdout_prompts, self.evaluation_prompts, limit)
