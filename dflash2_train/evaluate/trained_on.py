"""Whether the prompts of tasks were trained on.

Figures on prompts that the drafter learned from are too good, so a task that shares some is refused. The rules are
those by which ``dflash2-gen-data`` keeps ``data.evaluation_prompts`` out of training (:mod:`dflash2_train.overlap`).
The hold-out needs no check: the same plan of prompts that made it kept it apart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash2_train.config import ConfigError, RunConfig, absolute
from dflash2_train.evaluate.tasks import Conversation, Task
from dflash2_train.overlap import Message, OverlapIndex, Words, shared_wording

logger = logging.getLogger(__name__)
PROMPTS_FILE = "prompts.jsonl"  # the plan of dflash2-gen-data: a line a prompt, with its split and messages
MAX_NAMED = 3  # overlapping prompts that an error names


def check_tasks(config: RunConfig, tasks: Sequence[Task]) -> list[str]:
    """Hold the tasks' user turns against the training prompts under ``data.root``.

    Returns:
        What a reader must know about all figures; nothing where only the hold-out is measured.

    Raises:
        ConfigError: prompts were trained on and ``eval.allow_trained_prompts`` is off, or the file is damaged.
    """
    asked = [(f"{task.name}: {one.prompt_id}", _messages(one)) for task in tasks for one in task.conversations]
    asked = [(name, messages) for name, messages in asked if messages]
    if not asked:
        return []
    path = absolute(config.data.root) / PROMPTS_FILE
    if not path.is_file():
        logger.warning("no %s under data.root: whether the tasks' prompts were trained on is not known", PROMPTS_FILE)
        return [f"whether prompts were trained on was not checked: data.root holds no {PROMPTS_FILE}"]
    index, trained, met = OverlapIndex(asked, ignored=_wording(tasks)), 0, {}
    for prompt_id, messages in _trained(path):
        trained += 1
        found = index.find(messages)
        if found is not None:
            rule, name = found
            met[prompt_id] = f"{name} ({rule} as training prompt {prompt_id})"
    if not met:
        return [f"none of the {trained:,} training prompts under data.root overlaps with a prompt of the tasks"]
    first = "; ".join(list(met.values())[:MAX_NAMED])
    if not config.eval.allow_trained_prompts:
        raise ConfigError(
            f"eval.tasks: {len(met)} of {trained:,} training prompts under data.root overlap with what is to be "
            f"measured, so its figures would be too good. The first: {first}. Take these prompts out of the task, or "
            "name it under data.evaluation_prompts and make the data anew; eval.allow_trained_prompts=true measures "
            "all the same and labels the result."
        )
    return [f"NOT HELD OUT: {len(met)} of {trained:,} training prompts overlap with the tasks, such as {first}"]


def _messages(conversation: Conversation) -> list[Message]:
    """All that the user says in a conversation."""
    further = [{"role": "user", "content": turn} for turn in conversation.further_turns]
    return [*(message for message in conversation.opening if message["role"] == "user"), *further]


def _wording(tasks: Sequence[Task]) -> frozenset[Words]:
    """What tasks put around their prompts, such as where the answer is to stand; training prompts may say it too."""
    return frozenset().union(*(shared_wording([_messages(one) for one in task.conversations]) for task in tasks))


def _trained(path: Path) -> Iterator[tuple[str, list[Message]]]:
    """Id and messages of every training prompt."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row: dict[str, Any] = json.loads(line)
                split, prompt_id, messages = row["split"], str(row["prompt_id"]), row["messages"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}:{number}: not a prompt with prompt_id, split and messages ({error}). "
                    "Run dflash2-gen-data stage=plan, which writes the file anew."
                ) from error
            if split == "train":
                yield prompt_id, messages
