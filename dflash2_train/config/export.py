"""The serve-ready folder."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from dflash2_train.config.rules import DTYPES, require

WEIGHTS = ("last", "ema")


@dataclass(kw_only=True)
class ExportConfig:
    """The serve-ready folder."""

    output_dir: str = MISSING
    format: str = "hf"  # hf
    checkpoint: str | None = None  # checkpoint folder, or best; None = the newest whole one of train.output_dir
    weights: str = "last"  # last: as trained; ema: their moving average (train.ema_decay)
    dtype: str = "bfloat16"
    base_model: str | None = None  # Hub id that the card names where target.name is a local folder

    def check(self) -> None:
        require(self.format == "hf", "export.format", self.format, "only hf is written so far", "Use hf.")
        require(self.weights in WEIGHTS, "export.weights", self.weights, f"must be one of {WEIGHTS}", "Use last.")
        require(self.dtype in DTYPES, "export.dtype", self.dtype, f"must be one of {DTYPES}", "Use bfloat16.")
