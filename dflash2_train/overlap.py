"""When two prompts count as the same text, and whether a prompt overlaps with the hold-out.

Texts are compared as words: NFKC, casefolded, punctuation and white space folded. A prompt overlaps with the
hold-out if one of its user turns equals a user turn there, or contains a whole one of at least 8 words, or if
more than 30 % of its 8-word runs occur there. Short hold-out turns inside longer text are no overlap: "How are
you?" may occur anywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dflash2_train.provenance import sha256_json

RUN_WORDS = 8  # length of the word runs that are compared
MAX_SHARED_RUNS = 0.3  # share of a prompt's runs above which it counts as a copy
WORDING_SHARE = 0.2  # share of a task's prompts above which what they share is wording around them

# Rules by which a prompt overlaps; they are keys of the report.
SAME_TURN = "same user turn"
CONTAINS = "contains a hold-out turn"
SHARED_RUNS = "shares 8-word runs"

# Scripts written without spaces count one word a character.
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]|[^\W\u2e80-\u9fff\uac00-\ud7af]+")

Message = dict[str, str]  # {role, content}
Words = tuple[str, ...]


def split_words(text: str) -> Words:
    """Folded words of a text; a text without any word gives its symbols."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return tuple(_WORD.findall(folded)) or tuple(folded.split())


def word_runs(words: Words) -> Iterator[Words]:
    """Every run of 8 words, from left to right."""
    return (words[start : start + RUN_WORDS] for start in range(len(words) - RUN_WORDS + 1))


def user_turns(messages: list[Message]) -> list[Words]:
    """Folded words of every user turn."""
    return [split_words(message["content"]) for message in messages if message["role"] == "user"]


def holdout_hash(messages: list[Message]) -> str:
    """Hex sha256 of the folded user turns: equal for prompts that differ in case, punctuation or white space."""
    return sha256_json([" ".join(words) for words in user_turns(messages)])


def duplicate_key(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> bytes:
    """32 bytes, equal for conversations with the same tools that differ in case and white space only.

    Punctuation counts here, since 3 + 4 is not 3 - 4 and both may be trained on.
    """
    folded: list[Any] = [[message["role"], " ".join(message["content"].casefold().split())] for message in messages]
    return bytes.fromhex(sha256_json([folded, tools] if tools else folded))


def shared_wording(prompts: Sequence[list[Message]]) -> frozenset[Words]:
    """The 8-word runs that stand in two prompts and in a fifth of them: wording that a task puts around each prompt."""
    found = Counter(
        run for messages in prompts for run in {one for turn in user_turns(messages) for one in word_runs(turn)}
    )
    return frozenset(run for run, number in found.items() if number >= 2 and number > WORDING_SHARE * len(prompts))


class OverlapIndex:
    """Whole user turns and 8-word runs of the hold-out, each with the id of a prompt that has it."""

    def __init__(
        self, holdout: Iterable[tuple[str, list[Message]]], *, ignored: frozenset[Words] = frozenset()
    ) -> None:
        """Args: holdout: (prompt id, messages) of every hold-out prompt; ignored: 8-word runs that say nothing."""
        self._ignored = ignored
        self._turns: dict[Words, str] = {}
        self._runs: dict[Words, str] = {}
        self._starts: dict[Words, set[Words]] = {}  # first run of a turn -> turns that begin so
        for prompt_id, messages in holdout:
            for words in user_turns(messages):
                self._turns.setdefault(words, prompt_id)
                for run in word_runs(words):
                    if run not in ignored:
                        self._runs.setdefault(run, prompt_id)
                if len(words) >= RUN_WORDS:
                    self._starts.setdefault(words[:RUN_WORDS], set()).add(words)

    def find(self, messages: list[Message]) -> tuple[str, str] | None:
        """(rule, hold-out id) of the first rule that the user turns meet, or None."""
        turns = user_turns(messages)
        for words in turns:
            if words in self._turns:
                return SAME_TURN, self._turns[words]
        runs = [run for words in turns for run in word_runs(words) if run not in self._ignored]
        shared = [run for run in runs if run in self._runs]
        if not shared:
            return None
        for words in turns:
            contained = self._contained(words)
            if contained is not None:
                return CONTAINS, contained
        if len(shared) > MAX_SHARED_RUNS * len(runs):
            return SHARED_RUNS, self._runs[shared[0]]
        return None

    def _contained(self, words: Words) -> str | None:
        for start, run in enumerate(word_runs(words)):
            for turn in self._starts.get(run, ()):
                if words[start : start + len(turn)] == turn:
                    return self._turns[turn]
        return None
