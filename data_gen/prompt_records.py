"""A prompt, the plan that holds all prompts of an experiment, and what identifies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_gen.prompt_report import PromptReport
from dflash2_train.overlap import Message
from dflash2_train.provenance import sha256_json


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One conversation that the target is to continue."""

    prompt_id: str  # first 16 hex digits of the sha256 of messages and tools
    source: str
    license: str
    messages: list[Message]  # {role, content}; the last one is a user turn
    split: str  # train | holdout | evaluation
    tools: list[dict[str, Any]] | None = None  # in the OpenAI layout; None where there are none


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """The prompts of an experiment, in the order in which they are used."""

    train: list[PromptRecord]
    holdout: list[PromptRecord]
    holdout_hashes: list[str]  # sorted ``overlap.holdout_hash`` of every hold-out prompt, for the manifest
    report: PromptReport


def prompt_id(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """16 hex digits that depend on messages and tools alone."""
    return sha256_json({"messages": messages, "tools": tools} if tools else messages)[:16]
