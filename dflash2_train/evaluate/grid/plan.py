"""What is measured: every conversation at every temperature, plainly and with every K.

A *unit* is one conversation at one temperature; all its decoders answer it one after another, so that drift of the
machine hits them alike. Prompts are rendered before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.evaluate.server.chat_ids import Chat, open_chat
from dflash2_train.evaluate.subject import sampling_facts
from dflash2_train.evaluate.tasks import Conversation, Task, load_tasks

PLAIN = 0  # in place of a K: the target alone


@dataclass(frozen=True, kw_only=True)
class Script:
    """A conversation in tokens: the opening prompt, and what stands between an answer and the next one."""

    prompt_id: str
    prompt_ids: list[int]
    follow_ups: list[list[int]]  # one a further turn: end of the answer, the user's turn, the assistant's opened

    @property
    def num_turns(self) -> int:
        """Answers that it asks for."""
        return 1 + len(self.follow_ups)


@dataclass(frozen=True, kw_only=True)
class ScriptedTask:
    """A task and its conversations in tokens."""

    task: Task
    scripts: list[Script]

    @property
    def name(self) -> str:
        """Task and category, in tables and messages."""
        return " / ".join(part for part in (self.task.name, self.task.category) if part)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One conversation at one temperature."""

    scripted: ScriptedTask
    index: int  # of the conversation in its task
    temperature: float
    turn_of_order: int  # which decoder begins; moves on from conversation to conversation

    @property
    def key(self) -> str:
        """Names it in the results file."""
        return unit_key(self.scripted.name, self.index, self.temperature)

    @property
    def script(self) -> Script:
        """Its conversation."""
        return self.scripted.scripts[self.index]

    def order(self, decoders: Sequence[int]) -> list[int]:
        """The decoders, beginning with another one each time."""
        first = self.turn_of_order % len(decoders)
        return [*decoders[first:], *decoders[:first]]


def unit_key(task_name: str, index: int, temperature: float) -> str:
    """A unit's name in the results file."""
    return f"{task_name}#{index} at {temperature:g}"


def units_of(scripted: Sequence[ScriptedTask], temperatures: Sequence[float]) -> list[Unit]:
    """All units, conversation by conversation."""
    return [
        Unit(scripted=one, index=index, temperature=temperature, turn_of_order=index + place)
        for one in scripted
        for index in range(len(one.scripts))
        for place, temperature in enumerate(temperatures)
    ]


def draft_lengths(config: RunConfig, block_size: int) -> list[int]:
    """Every K, ascending.

    Raises:
        ConfigError: one is more than the exported drafter was trained for.
    """
    trained = block_size - 1
    chosen = config.eval.sweep.num_speculative_tokens
    key = "eval.sweep.num_speculative_tokens"
    if not chosen:
        key, chosen = "eval.num_drafted", [config.eval.num_drafted or trained]
    if max(chosen) > trained:
        raise ConfigError(
            f"{key}={max(chosen)}: the drafter's block_size {block_size} allows {trained} at most. Lower it."
        )
    return sorted(chosen)


def temperatures_of(config: RunConfig) -> list[float]:
    """Every temperature, ascending: those of the sweep, else greedy and eval.temperature where it is set."""
    return sorted(config.eval.sweep.temperatures or {0.0, config.eval.temperature})


def load_scripts(config: RunConfig) -> list[ScriptedTask]:
    """All tasks in tokens.

    Raises:
        ConfigError: prompts that cannot be read or rendered.
    """
    tasks = load_tasks(config)
    if all(one.prompt_ids is not None and not one.further_turns for task in tasks for one in task.conversations):
        return [ScriptedTask(task=task, scripts=[_ready(one) for one in task.conversations]) for task in tasks]
    chat = open_chat(config.target, config.data.enable_thinking)
    return [_scripted(task, chat) for task in tasks]


def _ready(conversation: Conversation) -> Script:
    assert conversation.prompt_ids is not None
    return Script(prompt_id=conversation.prompt_id, prompt_ids=conversation.prompt_ids, follow_ups=[])


def _scripted(task: Task, chat: Chat) -> ScriptedTask:
    conversations = [
        one if one.prompt_ids is not None else replace(one, prompt_ids=chat.render(one.opening))
        for one in task.conversations
    ]
    scripts = [
        replace(_ready(one), follow_ups=chat.follow_ups(one.opening, one.further_turns) if one.further_turns else [])
        for one in conversations
    ]
    return ScriptedTask(task=replace(task, conversations=conversations), scripts=scripts)


def describe_grid(
    config: RunConfig, models: dict[str, Any], scripted: Sequence[ScriptedTask], context: int
) -> dict[str, Any]:
    """All that shapes the measured numbers, as JSON values; the results' fingerprint covers it.

    ``models`` is :func:`~dflash2_train.evaluate.subject.describe_models`, ``context`` the tokens that prompt, answer
    and one block may have together.
    """
    drafted, temperatures = draft_lengths(config, models["block_size"]), temperatures_of(config)
    sampled = max(temperatures) > 0
    return {
        **models,
        "num_drafted": drafted[0] if len(drafted) == 1 else None,
        "draft_lengths": drafted,
        "temperature": temperatures[0] if len(temperatures) == 1 else None,
        "temperatures": temperatures,
        "concurrency": 1,
        "max_new_tokens": config.eval.max_new_tokens,
        "context": context,
        "tasks": {one.name: one.task.prompts_sha256 for one in scripted},
        "follow_ups": "asked with the decoder's own answers, their tokens kept",
        "enable_thinking": config.data.enable_thinking,
        "baseline": config.eval.baseline,
        **sampling_facts(config, sampled=sampled),
    }
