"""Evaluation tasks: prompts from a local file, a data set of the Hub, or the experiment's own hold-out.

A row becomes a conversation: its opening turns, and further user turns that are asked with the answers before them.
Nothing is sampled or shuffled: the first rows in their order, so that a hash over them says what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from dflash2_train.config import ConfigError, EvalTaskConfig, RunConfig, absolute
from dflash2_train.evaluate.holdout import HOLDOUT_FILE, load_holdout
from dflash2_train.evaluate.runs import HOLDOUT_TASK
from dflash2_train.provenance import sha256_json

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
ID_COLUMNS = ("prompt_id", "id", "question_id", "task_id", "unique_id")
# What nvidia/SPEED-Bench holds on the Hub in place of a prompt whose source has another licence.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One prompt, of one turn or several."""

    prompt_id: str
    opening: list[Message]  # up to the first turn to be answered; empty where ``prompt_ids`` stands
    further_turns: list[str]  # user turns after the first answer
    prompt_ids: list[int] | None = None  # rendered already: the hold-out, as dflash2-gen-data wrote it


@dataclass(frozen=True, kw_only=True)
class Task:
    """The conversations of one task, or of one category of it."""

    name: str
    category: str | None
    conversations: list[Conversation]

    @property
    def prompts_sha256(self) -> str:
        """Hex sha256 over the prompts in order: equal hashes mean the same input.

        Over ids and tokens where those are all there is, as ``holdout.prompts_hash``; else over the turns too.
        """
        if all(one.prompt_ids is not None and not one.further_turns for one in self.conversations):
            return sha256_json([[one.prompt_id, one.prompt_ids] for one in self.conversations])
        return sha256_json(
            [[one.prompt_id, one.opening, one.further_turns, one.prompt_ids] for one in self.conversations]
        )

    @property
    def num_requests(self) -> int:
        """Requests that the task asks if none fails."""
        return sum(1 + len(one.further_turns) for one in self.conversations)


def load_tasks(config: RunConfig) -> list[Task]:
    """Every task of ``eval.tasks``, categories one after another; the hold-out where none is configured.

    Raises:
        ConfigError: a source that cannot be read, is empty, or has a row without a prompt; names place and next step.
    """
    if not config.eval.tasks:
        return [_holdout(config)]
    return [
        task
        for number, one in enumerate(config.eval.tasks)
        for task in load_task(one, f"eval.tasks[{number}]", one.max_prompts or config.eval.max_prompts)
    ]


def _holdout(config: RunConfig) -> Task:
    root = absolute(config.data.root)
    prompts = load_holdout(root, max_prompts=config.eval.max_prompts)
    if config.eval.server.template == "server":
        raise ConfigError(
            f"eval.server.template='server': {root / HOLDOUT_FILE} was rendered by dflash2-gen-data and is sent as "
            "token ids. Use client, or name its file under eval.tasks to send its messages."
        )
    conversations = [
        Conversation(prompt_id=one.prompt_id, opening=[], further_turns=[], prompt_ids=one.prompt_ids)
        for one in prompts
    ]
    return Task(name=HOLDOUT_TASK, category=None, conversations=conversations)


def load_task(config: EvalTaskConfig, key: str, max_prompts: int | None = None) -> list[Task]:
    """The first ``max_prompts`` rows of one task, as a list of its categories where it names a column of them.

    Raises:
        ConfigError: see :func:`load_tasks`.
    """
    groups: dict[str | None, list[Conversation]] = {}
    for number, row in enumerate(_rows(config, key)):
        if number == max_prompts:
            break
        place = f"{config.path}, row {number + 1}"
        category = str(_column(row, config.category_column, place)) if config.category_column else None
        groups.setdefault(category, []).append(_conversation(row, number, config, place))
    if not groups:
        raise ConfigError(f"{key}.path={config.path!r}: holds no prompts. Name a file or split with rows.")
    return [Task(name=config.name, category=category, conversations=rows) for category, rows in groups.items()]


def _rows(config: EvalTaskConfig, key: str) -> Iterable[dict[str, Any]]:
    path = absolute(config.path)
    if path.suffix == ".jsonl":
        return _json_lines(path, key)
    try:
        from datasets import load_dataset

        if path.is_file():
            return load_dataset(path.suffix.removeprefix("."), data_files=str(path), split="train")
        return load_dataset(config.path, config.subset, split=config.split, revision=config.revision)
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{key}.path={config.path!r}: neither a local .jsonl, .csv or .parquet file nor a data set that can be "
            f"loaded ({first}). Correct path, subset or split, or name a file."
        ) from error


def _json_lines(path: Path, key: str) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{key}.path={str(path)!r}: no such file. Name the task's .jsonl file.")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON ({error}). Correct the line.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: not a JSON object. Write one row a line.")
            yield row


def _conversation(row: dict[str, Any], number: int, config: EvalTaskConfig, place: str) -> Conversation:
    prompt_id = next((str(row[name]) for name in ID_COLUMNS if row.get(name) is not None), str(number))
    opening, turns = _turns(row, config, place)
    if not opening or not opening[-1]["content"].strip() or any(not turn.strip() for turn in turns):
        raise ConfigError(f"{place}: an empty prompt. Remove the row, or correct prompt and turns_column.")
    if any(PLACEHOLDER in turn for turn in (*(one["content"] for one in opening), *turns)):
        raise ConfigError(
            f"{place}: holds a note in place of the prompt ({PLACEHOLDER!r}). Prepare the files with the data set's "
            "own tool, which fetches the prompts from their sources, and name those in path."
        )
    return Conversation(prompt_id=prompt_id, opening=opening, further_turns=turns)


def _turns(row: dict[str, Any], config: EvalTaskConfig, place: str) -> tuple[list[Message], list[str]]:
    """The opening turns and the further user turns of a row."""
    if config.prompt:
        try:
            return [_user(Template(config.prompt).substitute({name: str(value) for name, value in row.items()}))], []
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{place}: the template of eval.tasks prompt does not fit ({error}). It has columns {sorted(row)}."
            ) from error
    if config.turns_column:
        turns = [_text(turn, place) for turn in _list(_column(row, config.turns_column, place), place)]
        return [_user(turns[0])], turns[1:]
    if row.get("messages"):
        return _messages(_list(row["messages"], place), place), []
    return [_user(_text(_column(row, "prompt", place), place))], []


def _messages(messages: Sequence[Any], place: str) -> list[Message]:
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ConfigError(f"{place}: a turn of messages has no role out of {ROLES}. Correct the row.")
    turns = [{"role": str(one["role"]), "content": _text(one, place)} for one in messages]
    if turns[-1]["role"] != "user":
        raise ConfigError(f"{place}: messages end with the {turns[-1]['role']} turn, nothing to answer. Cut them.")
    return turns


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _column(row: dict[str, Any], name: str, place: str) -> Any:
    if row.get(name) is None:
        raise ConfigError(f"{place}: no column {name!r}. It has {sorted(row)}; set prompt or turns_column of the task.")
    return row[name]


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: turns must be a list with at least one entry, found {str(value)[:40]!r}.")
    return value


def _text(value: Any, place: str) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(f"{place}: a turn must be text, found {type(content).__name__}. Correct the row.")
    return content
