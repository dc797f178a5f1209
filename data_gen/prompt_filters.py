"""Which sound rows of a source are wanted: by column value, length, language, and side of a hash split."""

from __future__ import annotations

import hashlib
import importlib.util
from typing import Any

from data_gen.prompt_rows import RowRejectedError
from dflash2_train.config import ConfigError, PromptSourceConfig
from dflash2_train.overlap import Message, split_words

LANGUAGE_CHARS = 2000  # of a prompt, from which its language is told
LANGUAGE_LETTERS = 20  # a prompt with fewer is kept: too short to tell
SPLIT_RANGE = 1 << 64

# Reasons for leaving a row out; they are keys of the report.
OTHER_SIDE = "on the other side of the split"


class RowFilter:
    """The filters of one source. Each gives the reason for leaving a row out, or an empty text."""

    def __init__(self, source: PromptSourceConfig, split: str) -> None:
        """Args: split: ``train`` takes the rest of a ``holdout_share``, every other split the share."""
        self._source = source
        self._takes_share = split != "train"
        if source.languages and importlib.util.find_spec("py3langid") is None:
            raise ConfigError(
                f"prompt source languages={source.languages}: py3langid is not installed. "
                "Run pip install 'dflash2-train[languages]', or leave languages empty."
            )

    def unwanted_columns(self, row: dict[str, Any]) -> str:
        """Whether a column has a value that ``where`` does not list.

        Raises:
            RowRejectedError: the row lacks the column.
        """
        for name, values in self._source.where.items():
            if name not in row:
                raise RowRejectedError(
                    f"no column {name!r}", f", which where names; there are: {', '.join(sorted(row))}"
                )
            if str(row[name]) not in values:
                return f"{name} not in {', '.join(values)}"
        return ""

    def unwanted(self, messages: list[Message]) -> str:
        """Whether a conversation is too short, too long, in another language, or on the split's other side."""
        return self._length(messages) or self._side(messages) or self._language(messages)

    def _length(self, messages: list[Message]) -> str:
        source = self._source
        chars = sum(len(message["content"]) for message in messages)
        if chars < source.min_chars:
            return f"below min_chars={source.min_chars}"
        if source.max_chars is not None and chars > source.max_chars:
            return f"above max_chars={source.max_chars}"
        if source.min_words or source.max_words is not None:
            words = sum(len(message["content"].split()) for message in messages)
            if words < source.min_words:
                return f"below min_words={source.min_words}"
            if source.max_words is not None and words > source.max_words:
                return f"above max_words={source.max_words}"
        return ""

    def _side(self, messages: list[Message]) -> str:
        share = self._source.holdout_share
        return "" if not share or in_holdout(messages, share) == self._takes_share else OTHER_SIDE

    def _language(self, messages: list[Message]) -> str:
        wanted = self._source.languages
        if not wanted:
            return ""
        from py3langid import classify  # type: ignore[import-untyped]  # loads a model; only this filter needs it

        text = " ".join(message["content"] for message in messages if message["role"] == "user")[:LANGUAGE_CHARS]
        if sum(letter.isalpha() for letter in text) < LANGUAGE_LETTERS:
            return ""
        language = classify(text)[0]
        return "" if language in wanted else f"language not in {', '.join(wanted)}"


def in_holdout(messages: list[Message], share: float) -> bool:
    """Whether a conversation is held out; the one boundary of the split.

    The folded words of the first user turn decide, so all rows cut from one conversation, and copies that differ in
    case or punctuation, fall on the same side whatever the order, the seed or the number of rows.
    """
    first = next(message["content"] for message in messages if message["role"] == "user")
    digest = hashlib.sha256(" ".join(split_words(first)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * SPLIT_RANGE
