"""The hold-out prompts: token ids that never took part in training, as dflash2-gen-data wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash2_train.config import ConfigError
from dflash2_train.provenance import sha256_json

HOLDOUT_FILE = "holdout.jsonl"


@dataclass(frozen=True, kw_only=True)
class HoldoutPrompt:
    """One prompt, tokenised with the target's chat template and ready to decode from."""

    prompt_id: str
    prompt_ids: list[int]


def load_holdout(root: Path, *, max_prompts: int | None = None) -> list[HoldoutPrompt]:
    """The first ``max_prompts`` prompts of the file, in its order.

    Raises:
        ConfigError: no file, no prompts, or a line that is not a prompt; names file and line.
    """
    path = root / HOLDOUT_FILE
    if not path.is_file():
        raise ConfigError(
            f"data.root={str(root)!r}: there is no {HOLDOUT_FILE} in it, so nothing to evaluate on. "
            "Run dflash2-gen-data with the same experiment first."
        )
    prompts: list[HoldoutPrompt] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if max_prompts is not None and len(prompts) == max_prompts:
                break
            if line.strip():
                prompts.append(_parse(line, f"{path}:{number}"))
    if not prompts:
        raise ConfigError(
            f"{path}: holds no prompts. Check data.holdout_prompts and eval.max_prompts, "
            "then run dflash2-gen-data again."
        )
    repeated = len(prompts) - len({prompt.prompt_id for prompt in prompts})
    if repeated:
        raise ConfigError(f"{path}: {repeated} prompt ids stand there twice. Run dflash2-gen-data again.")
    return prompts


def _parse(line: str, place: str) -> HoldoutPrompt:
    next_step = "Delete the file and run dflash2-gen-data again."
    try:
        row = json.loads(line)
        prompt = HoldoutPrompt(prompt_id=str(row["prompt_id"]), prompt_ids=[int(i) for i in row["prompt_ids"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: not a prompt with prompt_id and prompt_ids ({error}). {next_step}") from error
    if not prompt.prompt_ids:
        raise ConfigError(f"{place}: prompt_ids is empty, it needs at least one token. {next_step}")
    return prompt


def prompts_hash(prompts: Sequence[HoldoutPrompt]) -> str:
    """Hex sha256 over ids and tokens in order: equal hashes mean the same measurement input."""
    return sha256_json([[prompt.prompt_id, prompt.prompt_ids] for prompt in prompts])
