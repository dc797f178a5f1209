"""The serve-ready folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.drafter import DrafterConfig
from dflash2_train.config.export_gguf import GgufConfig
from dflash2_train.config.rules import DTYPES, require
from dflash2_train.config.train import TrainConfig

FORMATS = ("hf", "gguf")
WEIGHTS = ("last", "ema", "mean")
TABLES = ("embed_tokens", "lm_head")


@dataclass(kw_only=True)
class ExportConfig:
    """The serve-ready folder."""

    output_dir: str = MISSING  # the folder, replaced as a whole
    format: str = "hf"  # hf: the folder that vLLM, SGLang and the runner load; gguf: that, and files for llama.cpp
    checkpoint: str | None = None  # checkpoint folder, or best; None = the newest whole one of train.output_dir
    weights: str = "last"  # last: as trained; ema: their moving average (train.ema_decay); mean: of average_last
    average_last: int = 1  # checkpoints up to the chosen one that weights=mean averages, in fp32
    dtype: str = "bfloat16"  # of the tensors in the file
    max_shard_gib: float | None = None  # tensor bytes a file, 2^30; None = one file, which every server reads
    num_proposals: int | None = None  # tokens a round that the card tells servers to draft; None = all block_size - 1
    tables: list[str] = field(default_factory=list)  # of the target's to put in: embed_tokens, lm_head
    fold_mask: bool = False  # the mask token's row of embed_tokens becomes the trained vector, as the file has it
    base_model: str | None = None  # Hub id that the card names where target.name is a local folder
    gguf: GgufConfig = field(default_factory=GgufConfig)

    def resolved_num_proposals(self, drafter: DrafterConfig) -> int:
        """``num_proposals`` with the default written out."""
        return drafter.num_drafted if self.num_proposals is None else self.num_proposals

    def check(self, drafter: DrafterConfig, train: TrainConfig) -> None:
        require(self.format in FORMATS, "export.format", self.format, f"must be one of {FORMATS}", "Use hf.")
        require(self.weights in WEIGHTS, "export.weights", self.weights, f"must be one of {WEIGHTS}", "Use last.")
        require(self.dtype in DTYPES, "export.dtype", self.dtype, f"must be one of {DTYPES}", "Use bfloat16.")
        require(
            self.average_last > 1 if self.weights == "mean" else self.average_last == 1,
            "export.average_last",
            self.average_last,
            "is the number of checkpoints of export.weights=mean, at least 2, and 1 otherwise",
            "Set both: export.weights=mean export.average_last=3.",
        )
        require(
            self.average_last <= train.keep_checkpoints,
            "export.average_last",
            self.average_last,
            f"is more than the trainer keeps (train.keep_checkpoints={train.keep_checkpoints})",
            "Raise train.keep_checkpoints to at least as many.",
        )
        require(
            self.max_shard_gib is None or self.max_shard_gib > 0,
            "export.max_shard_gib",
            self.max_shard_gib,
            "must be positive",
            "Use null for one file.",
        )
        require(
            self.num_proposals is None or 1 <= self.num_proposals <= drafter.num_drafted,
            "export.num_proposals",
            self.num_proposals,
            f"must lie between 1 and drafter.block_size - 1 = {drafter.num_drafted}: later slots were never trained",
            "Leave it null for all of them.",
        )
        require(
            set(self.tables) <= set(TABLES) and len(set(self.tables)) == len(self.tables),
            "export.tables",
            self.tables,
            f"names each of {TABLES} at most once",
            "Leave it empty: servers take the target's.",
        )
        require(
            not self.fold_mask or "embed_tokens" in self.tables,
            "export.fold_mask",
            self.fold_mask,
            "replaces a row of an embedding that is not exported",
            "Set export.tables=[embed_tokens] too.",
        )
        self.gguf.check()
