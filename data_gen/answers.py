"""Judging an answer, and the row that it becomes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from data_gen.backends.base import Completion, GenerationRequest
from data_gen.prepare import PreparedPrompts
from data_gen.turns import Dialogue

EMPTY, CUT, REPEATS = "empty answer", "cut by max_tokens", "repeats"
MIN_ROUNDS = 4  # a cycle that often round fills the window of an endless answer


def repeats_forever(ids: Sequence[int], window: int) -> bool:
    """Whether the last ``window`` tokens are one cycle, at least four times round; False for shorter answers."""
    if len(ids) < window:
        return False
    tail = ids[len(ids) - window :]
    borders = [0] * window  # borders[i]: longest proper prefix of tail[:i + 1] that is also its suffix
    length = 0
    for place in range(1, window):
        while length and tail[place] != tail[length]:
            length = borders[length - 1]
        length += tail[place] == tail[length]
        borders[place] = length
    return (window - borders[-1]) * MIN_ROUNDS <= window


def drop_reason(completion: Completion, *, drop_cut: bool, drop_repeats: bool, repeat_window: int) -> str:
    """Why an answer is not trained on; empty if it is."""
    if not completion.completion_ids:
        return EMPTY
    if completion.finish_reason not in ("stop", "length"):
        return f"ended by {completion.finish_reason}"
    if completion.finish_reason == "stop":
        return ""
    if drop_repeats and repeats_forever(completion.completion_ids, repeat_window):
        return REPEATS
    return CUT if drop_cut else ""


def ends_dialogue(finish_reason: str, completion_ids: Sequence[int]) -> bool:
    """Whether no later turn can be asked: an answer that was cut, or is empty, is no history to go on from."""
    return finish_reason != "stop" or not completion_ids


def make_row(
    dialogue: Dialogue, request: GenerationRequest, completion: Completion, prepared: PreparedPrompts
) -> dict[str, Any]:
    """The stored form of an answer; columns as in ``data_gen.cache.conversations``."""
    content, record = prepared.content, dialogue.record
    return {
        "row_id": request.request_id,
        "prompt_id": record.prompt_id,
        "repeat": dialogue.repeat,
        "turn": dialogue.turn,
        "messages": json.dumps(dialogue.messages(), ensure_ascii=False),
        "tools": json.dumps(record.tools, ensure_ascii=False) if record.tools else "",
        "source": record.source,
        "license": record.license,
        "prompt_ids": request.prompt_ids,
        "completion_ids": completion.completion_ids,
        "completion_text": prepared.renderer.text_of(completion.completion_ids),
        "finish_reason": completion.finish_reason,
        "dropped": drop_reason(completion, **content["drop"]),
        "seed": request.seed,
        **dataclasses.asdict(prepared.sampling),
        **{key: content[key] for key in ("target", "revision", "target_hash", "enable_thinking")},
    }
