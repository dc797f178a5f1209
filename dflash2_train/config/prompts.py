"""Where prompts come from, what their columns mean, and which of them are wanted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from dflash2_train.config.rules import absolute, require

SOURCE_KINDS = ("starter", "jsonl", "csv", "parquet", "datasets")
STARTER_SPLITS = ("train", "holdout")
ROLES = ("system", "user", "assistant")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(kw_only=True)
class PromptSourceConfig:
    """One source of prompts: the built-in starter set, local files, or a data set of the Hub or a folder.

    Rows that are faulty are rejected, rows that a filter below leaves out are filtered; the report counts both.
    """

    kind: str = MISSING  # starter | jsonl | csv | parquet | datasets
    path: str = ""  # file, or several as in part-*.jsonl (jsonl, csv, parquet); data set id or folder (datasets)
    name: str = ""  # of the source in records and reports; empty: the row's own column "source", or the path
    split: str = ""  # starter: train | holdout; datasets: the split name
    subset: str | None = None  # datasets: configuration name
    revision: str | None = None  # datasets: pinned commit, 40 hex digits
    allow_unpinned: bool = False  # datasets: without a revision, read the newest commit and record which it was
    fetch_columns: list[str] = field(default_factory=list)  # datasets stored as Parquet: fetch these alone; empty = all

    messages_column: str = "messages"  # column holding a list of turns, or that list as JSON text
    role_key: str = "role"  # of a turn; "from" in ShareGPT's layout
    content_key: str = "content"  # of a turn; "value" in ShareGPT's layout
    roles: dict[str, str] = field(default_factory=dict)  # further role names, as in {human: user, gpt: assistant}
    max_user_turns: int | None = None  # a conversation ends with this user turn; None = with its last one
    prompt_column: str = ""  # column holding plain text, or a list of user turns; wins over messages_column when set
    system_column: str = ""  # column holding a system turn; rows may leave it empty
    tools_column: str = ""  # column holding tools as list or JSON text; rows may leave it empty

    where: dict[str, list[str]] = field(default_factory=dict)  # column -> wanted values, as text
    languages: list[str] = field(default_factory=list)  # wanted ISO 639-1 codes, detected; for prose, not for code
    min_chars: int = 0  # of all turns together
    max_chars: int | None = 200_000  # keeps megabytes of junk away from the tokenizer
    min_words: int = 0  # words stand between white space
    max_words: int | None = None  # of all turns together; None = no limit
    holdout_share: float = 0.0  # split by content hash: holdout_prompts takes this share, train_prompts the rest

    license: str = ""  # licence of every row, where rows do not name their own
    terms: str = ""  # what the licence's name does not tell: gated, attribution, research only
    weight: float | None = None  # share of data.max_prompts, relative to the other sources
    max_prompts: int | None = None  # usable rows kept of this source, before near-duplicates and overlap are removed

    @property
    def from_hub(self) -> bool:
        """Whether ``path`` is a data set id of the Hub."""
        return self.kind == "datasets" and not Path(self.path).expanduser().exists()

    def check(self, key: str) -> None:
        """Raise ConfigError for the first field that cannot be right; ``key`` names the source."""
        self._check_place(key)
        self._check_filters(key)
        for name, role in self.roles.items():
            require(role in ROLES, f"{key}.roles.{name}", role, f"must be one of {ROLES}", "Map it to one of them.")
        for name in ("max_prompts", "max_user_turns", "weight"):
            value: float | None = vars(self)[name]
            require(
                value is None or value > 0, f"{key}.{name}", value, "must be positive", "Leave it null for all rows."
            )

    def _check_place(self, key: str) -> None:
        starter, hub = self.kind == "starter", self.kind == "datasets"
        require(self.kind in SOURCE_KINDS, f"{key}.kind", self.kind, f"must be one of {SOURCE_KINDS}", "Pick one.")
        require(
            not starter or self.split in STARTER_SPLITS,
            f"{key}.split",
            self.split,
            f"must be one of {STARTER_SPLITS}",
            "Pick one.",
        )
        require(
            starter or self.path != "", f"{key}.path", "", f"a {self.kind} source needs one", "Name file or data set."
        )
        require(not hub or self.split != "", f"{key}.split", "", "a datasets source needs one", "Name it, as in train.")
        require(
            not self.from_hub or self.allow_unpinned or _COMMIT.fullmatch(self.revision or "") is not None,
            f"{key}.revision",
            self.revision,
            f"{self.path} may change on the Hub while a run lasts, so it needs a commit of 40 hex digits",
            f"The first word of 'git ls-remote https://huggingface.co/datasets/{self.path} HEAD' is one; or set "
            "allow_unpinned=true to read the newest commit and have it recorded.",
        )

    def _check_filters(self, key: str) -> None:
        for unit in ("chars", "words"):
            low, high = vars(self)[f"min_{unit}"], vars(self)[f"max_{unit}"]
            require(low >= 0, f"{key}.min_{unit}", low, "must not be negative", "Use 0 for no limit.")
            require(
                high is None or high >= max(low, 1),
                f"{key}.max_{unit}",
                high,
                f"must be positive and at least min_{unit}={low}",
                "Raise it, or use null for no limit.",
            )
        require(
            0.0 <= self.holdout_share < 1.0,
            f"{key}.holdout_share",
            self.holdout_share,
            "must lie in [0, 1)",
            "Use 0.01.",
        )

    def same_rows(self, other: PromptSourceConfig) -> bool:
        """Whether both read the same rows."""
        paths = [self.path, other.path]
        if not self.from_hub:
            paths = [str(absolute(path)) for path in paths]
        mine, theirs = ((source.kind, source.split, source.subset) for source in (self, other))
        return paths[0] == paths[1] and mine == theirs


def check_sources(
    train: list[PromptSourceConfig],
    holdout: list[PromptSourceConfig],
    evaluation: list[PromptSourceConfig],
    max_prompts: int | None,
) -> None:
    """Check every source, and that weights and splits fit together.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for split, sources in (("train", train), ("holdout", holdout), ("evaluation", evaluation)):
        for number, source in enumerate(sources):
            key = f"data.{split}_prompts[{number}]"
            source.check(key)
            require(
                split == "train" or source.weight is None,
                f"{key}.weight",
                source.weight,
                "only training prompts are shared out by weight",
                "Leave it out, and set max_prompts.",
            )
            require(
                split != "evaluation" or not source.holdout_share,
                f"{key}.holdout_share",
                source.holdout_share,
                "all prompts of a benchmark stay out of training",
                "Leave it out.",
            )
    weights = [source.weight for source in train]
    require(
        weights == [None] * len(weights) or (None not in weights and max_prompts is not None),
        "data.train_prompts[*].weight",
        weights,
        "weights share out data.max_prompts, so it takes a weight for every source and a data.max_prompts",
        "Set them all, or leave every weight null.",
    )
    for number, source in enumerate(train):
        for other in holdout:
            require(
                not source.same_rows(other) or source.holdout_share == other.holdout_share,
                f"data.train_prompts[{number}].holdout_share",
                source.holdout_share,
                f"data.holdout_prompts splits the same rows at {other.holdout_share}",
                "Use one share for both.",
            )
