"""GGUF files of a drafter, for llama.cpp (``export.format=gguf``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash2_train.config.rules import require

# What the gguf package writes, but for its ternary types, which are made for weights trained to be ternary.
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
EMBEDDINGS = ("auto", "own", "target")


@dataclass(kw_only=True)
class GgufConfig:
    """One file a type, from a published drafter folder; see ``dflash2_train/export/GGUF.md``."""

    output_dir: str | None = None  # None = export.output_dir with -gguf behind it
    source: str | None = None  # drafter folder to convert; None = the chosen checkpoint, exported as hf first
    types: list[str] = field(default_factory=lambda: ["BF16", "Q8_0"])  # of the matrices; one file each
    codebook_type: str | None = None  # of the selector's two codebooks; None = as the rest
    # token_embd of its own, with the learned mask vector in the mask token's row. own: always; target: never, the
    # target's table is used; auto: when the drafter has a learned mask vector, which llama.cpp reads nowhere else
    embedding: str = "auto"
    tokenizer_from: str | None = None  # GGUF of the target to copy the tokenizer from; None = the target's folder
    pre_tokenizer: str | None = None  # llama.cpp's name of it; None = told from tokenizer.json
    compare_blocks: int = 64  # blocks that the table of errors is measured on; 0 = no table
    compare_on: str = "auto"  # capture: the captured data; random: noise; auto: captured data where there is any

    def check(self) -> None:
        """Raise :class:`ConfigError` for the first broken rule."""
        key = "export.gguf"
        require(bool(self.types), f"{key}.types", self.types, "must name a type", f"Choose among {GGUF_TYPES}.")
        require(len(set(self.types)) == len(self.types), f"{key}.types", self.types, "names one twice", "Drop it.")
        codebook = [] if self.codebook_type is None else [self.codebook_type]
        for name, values in (("types", self.types), ("codebook_type", codebook)):
            for value in values:
                require(value in GGUF_TYPES, f"{key}.{name}", value, f"must be among {GGUF_TYPES}", "Pick one.")
        require(
            self.embedding in EMBEDDINGS,
            f"{key}.embedding",
            self.embedding,
            f"must be one of {EMBEDDINGS}",
            "Use auto.",
        )
        require(self.compare_blocks >= 0, f"{key}.compare_blocks", self.compare_blocks, "must be at least 0", "Use 64.")
        kinds = ("auto", "capture", "random")
        require(self.compare_on in kinds, f"{key}.compare_on", self.compare_on, f"must be one of {kinds}", "Use auto.")
