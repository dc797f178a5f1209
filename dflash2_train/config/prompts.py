"""Where prompts come from."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True)
class PromptSourceConfig:
    """One source of prompts: the built-in starter set, a local JSONL file, or a ``datasets`` id."""

    kind: str = MISSING  # starter | jsonl | datasets
    path: str = ""  # file (jsonl) or data set id (datasets); empty for the starter set
    split: str = ""  # starter: train | holdout; datasets: the split name
    subset: str | None = None  # datasets: configuration name
    revision: str | None = None  # datasets: pinned commit
    messages_column: str = "messages"  # column holding a list of {role, content}
    prompt_column: str = ""  # column holding plain text; wins over messages_column when set
    license: str = ""  # licence of every row, where rows do not name their own
    max_prompts: int | None = None
