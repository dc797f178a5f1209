"""The serve-ready folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.export_gguf import GgufConfig
from dflash2_train.config.rules import DTYPES, require

FORMATS = ("hf", "gguf")
WEIGHTS = ("last", "ema")


@dataclass(kw_only=True)
class ExportConfig:
    """The serve-ready folder."""

    output_dir: str = MISSING
    format: str = "hf"  # hf: the folder that vLLM, SGLang and the runner load; gguf: that, and files for llama.cpp
    checkpoint: str | None = None  # checkpoint folder, or best; None = the newest whole one of train.output_dir
    weights: str = "last"  # last: as trained; ema: their moving average (train.ema_decay)
    dtype: str = "bfloat16"
    gguf: GgufConfig = field(default_factory=GgufConfig)

    def check(self) -> None:
        require(self.format in FORMATS, "export.format", self.format, f"must be one of {FORMATS}", "Use hf.")
        require(self.weights in WEIGHTS, "export.weights", self.weights, f"must be one of {WEIGHTS}", "Use last.")
        require(self.dtype in DTYPES, "export.dtype", self.dtype, f"must be one of {DTYPES}", "Use bfloat16.")
        self.gguf.check()
