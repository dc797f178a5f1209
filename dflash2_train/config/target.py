"""The frozen model: which one, its shapes, how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from dflash2_train.config.rules import DTYPES, require


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen model that is served and whose text and states train the drafter."""

    name: str = MISSING  # Hugging Face folder or Hub id
    revision: str | None = None  # commit of a Hub id; None for a local folder
    dtype: str = "bfloat16"  # weights during regenerate and capture
    trust_remote_code: bool = False  # running code from a model repository is opt-in
    license: str = MISSING  # stated in the card of every export
    architecture: str | None = None  # model_type of config.json; +scale=tiny builds a small random one of it
    hidden_size: int = MISSING  # H, checked against the model's own config.json when it is opened, as the next two
    num_layers: int = MISSING  # decoder layers
    vocab_size: int = MISSING  # V: rows of the embedding, which may be more than the tokenizer has tokens
    num_parameters: float | None = None  # weights in all, for plans; None = no estimate from peaks
    num_active_parameters: float | None = None  # weights a token meets; None = all of them
    tensor_parallel_size: int = 1  # GPUs for one copy of the target inside vLLM
    setup: str = ""  # the command that makes a local target folder; quoted in the error if it is missing

    def check(self) -> None:
        require(self.dtype in DTYPES, "target.dtype", self.dtype, f"must be one of {DTYPES}", "Pick one.")
        for key in ("hidden_size", "num_layers", "vocab_size", "tensor_parallel_size"):
            value = getattr(self, key)
            require(value > 0, f"target.{key}", value, "must be positive", "Copy it from the model's config.json.")
        for key in ("num_parameters", "num_active_parameters"):
            value = getattr(self, key)
            require(value is None or value > 0, f"target.{key}", value, "must be positive", "Use null if not known.")
