"""The conversation in a row: turns under any layout of columns and any role names, and tools.

What is wrong with the content of a row is a :class:`RowRejectedError`, whose reason the report counts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from data_gen.prompt_rows import RowRejectedError
from dflash2_train.config import PromptSourceConfig
from dflash2_train.config.prompts import ROLES
from dflash2_train.overlap import Message

MAX_CONTROL = 0.02  # share of control and replacement characters from which text counts as binary

# Reasons for rejecting a row; they are keys of the report.
NO_COLUMN = "no column"
NO_MESSAGES = "no messages"
NOT_TEXT = "content is not text"
BINARY = "binary content"
EMPTY_CONTENT = "empty content"
UNKNOWN_ROLE = "unknown role"
NO_USER_TURN = "no user turn"
TWO_SYSTEMS = "a system turn besides the system column"
NOT_TOOLS = "tools are no list of functions"

_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd]")
_SAMPLE_CHARS = 4096  # enough to tell binary from text
Tools = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What the target is to continue."""

    messages: list[Message]  # {role, content}, roles as in ROLES; the last one is a user turn
    tools: Tools | None  # in the OpenAI layout, {type: function, function: {name, ...}}; None where there are none


class ColumnMap:
    """Reads the rows of one source as its configuration maps them."""

    def __init__(self, source: PromptSourceConfig) -> None:
        self._source = source
        self._roles = {**{role: role for role in ROLES}, **source.roles}

    def read(self, row: dict[str, Any]) -> Conversation:
        """The conversation up to its last wanted user turn; turns after it are the target's to write.

        Raises:
            RowRejectedError: the row cannot be a prompt.
        """
        source = self._source
        if source.prompt_column:
            messages = self._from_prompt(_column(row, "prompt_column", source.prompt_column))
        else:
            messages = self._from_turns(_column(row, "messages_column", source.messages_column))
        if source.system_column:
            system = _column(row, "system_column", source.system_column)
            if not _is_blank(system):
                if messages[0]["role"] == "system":
                    raise RowRejectedError(TWO_SYSTEMS)
                messages = [{"role": "system", "content": check_text(system)}, *messages]
        tools = _tools(row.get(source.tools_column)) if source.tools_column else None
        return Conversation(messages=messages, tools=tools)

    def _from_prompt(self, value: object) -> list[Message]:
        texts = value if isinstance(value, list) else [value]
        if not texts:
            raise RowRejectedError(NO_MESSAGES)
        return [{"role": "user", "content": check_text(text)} for text in texts[: self._source.max_user_turns]]

    def _from_turns(self, value: object) -> list[Message]:
        turns = self._up_to_last_user(_as_list(value, NO_MESSAGES))
        messages = []
        for role, content in turns:
            if role == "system" and _is_blank(content):
                continue  # some sets give every conversation a system turn and leave it empty
            messages.append({"role": role, "content": check_text(content)})
        return messages

    def _up_to_last_user(self, turns: list[Any]) -> list[tuple[str, object]]:
        source = self._source
        if not turns:
            raise RowRejectedError(NO_MESSAGES)
        pairs: list[tuple[str, object]] = []
        end = users = 0
        for turn in turns:
            name = turn.get(source.role_key) if isinstance(turn, dict) else None
            role = self._roles.get(name) if isinstance(name, str) else None
            if role is None:
                raise RowRejectedError(UNKNOWN_ROLE, f" {name!r:.40}" if isinstance(turn, dict) else "")
            pairs.append((role, turn.get(source.content_key)))
            if role == "user" and (source.max_user_turns is None or users < source.max_user_turns):
                end, users = len(pairs), users + 1
        if not users:
            raise RowRejectedError(NO_USER_TURN)
        return pairs[:end]


def check_text(value: object) -> str:
    """The content of a turn, unchanged.

    Raises:
        RowRejectedError: it is not text that a tokenizer could take.
    """
    if not isinstance(value, str):
        raise RowRejectedError(NOT_TEXT)
    if not value.strip():
        raise RowRejectedError(EMPTY_CONTENT)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: bytes that were not UTF-8, or a cut escape
        raise RowRejectedError(NOT_TEXT) from error
    sample = value[:_SAMPLE_CHARS]
    if "\0" in value or len(_CONTROL.findall(sample)) > MAX_CONTROL * len(sample):
        raise RowRejectedError(BINARY)
    return value


def _column(row: dict[str, Any], key: str, name: str) -> object:
    if name not in row:
        there = ", ".join(sorted(row)) or "none"
        raise RowRejectedError(f"{NO_COLUMN} {name!r}", f", which {key} names; there are: {there}")
    return row[name]


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _as_list(value: object, reason: str) -> list[Any]:
    """A list, or one written as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRejectedError(reason) from error
    if not isinstance(value, list):
        raise RowRejectedError(reason)
    return value


def _tools(value: object) -> Tools | None:
    """Tools in one layout, whether a row gives a list, JSON text, bare functions or none."""
    if _is_blank(value):
        return None
    tools = []
    for tool in _as_list(value, NOT_TOOLS):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRejectedError(NOT_TOOLS)
        tools.append({"type": "function", "function": function})
    return tools or None
