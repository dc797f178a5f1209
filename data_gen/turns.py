"""Which turns of a conversation the target answers, and the history that each answer continues.

An assistant turn of the source is written anew if it follows a user turn (or a tool's result), and the end of the
conversation is always answered. Two kinds of assistant turns stay as context: a greeting before the first user turn,
and a turn whose tool call the next turn answers, as the source's result would not belong to another call. What stays
is prompt and never trained on.

Answer j continues the history in which answers 0 to j - 1 are the target's own. Their text is their tokens decoded
without the one that ended them; a think part stays in it, and the chat template alone decides whether it is shown in
later turns. Every answer is a row of its own with the prompt as it was rendered for it, so nothing depends on the
rendering of one turn being a prefix of the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from data_gen.prompts import PromptRecord
from dflash2_train.overlap import Message

ASKING = ("user", "tool")  # roles that an assistant answers


def turn_points(messages: list[Message], turns: str) -> list[int]:
    """Positions in ``messages`` before which the target writes, ascending; the last is the end.

    Args:
        messages: a conversation that ends in a user turn.
        turns: ``all``, or ``last`` for the end alone.
    """
    end = len(messages)
    if turns == "last":
        return [end]
    roles = [message["role"] for message in messages]
    inner = [
        place
        for place in range(1, end - 1)
        if roles[place] == "assistant" and roles[place - 1] in ASKING and roles[place + 1] != "tool"
    ]
    return [*inner, end]


def row_id(prompt_id: str, repeat: int, turn: int) -> str:
    """Name of one answer: of its request, its row and its captured sample."""
    return f"{prompt_id}-{repeat}-{turn}"


def row_seed(seed: int, prompt_id: str, repeat: int, turn: int) -> int:
    """Seed of one answer, 32 bits, from these four alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}:{repeat}:{turn}".encode()).digest()[:4], "big")


@dataclass(kw_only=True)
class Dialogue:
    """One conversation under way: ``turn`` is the answer that is wanted next."""

    record: PromptRecord
    repeat: int
    points: list[int]
    answers: list[str] = field(default_factory=list)  # texts of the answered turns

    @property
    def turn(self) -> int:
        """Number of the answer that is wanted next."""
        return len(self.answers)

    @property
    def name(self) -> str:
        """Row id of that answer."""
        return row_id(self.record.prompt_id, self.repeat, self.turn)

    @property
    def is_last(self) -> bool:
        """Whether no turn follows it."""
        return self.turn == len(self.points) - 1

    def later_names(self, first: int) -> list[str]:
        """Row ids of the answers from number ``first`` on."""
        return [row_id(self.record.prompt_id, self.repeat, turn) for turn in range(first, len(self.points))]

    def messages(self) -> list[Message]:
        """The history that the wanted answer continues."""
        history = [dict(message) for message in self.record.messages[: self.points[self.turn]]]
        for point, answer in zip(self.points, self.answers, strict=False):  # one point more than answers, at least
            history[point] = {"role": "assistant", "content": answer}
        return history
