"""Conversations -> prompt ids with the target's own template, for requests that carry token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash2_train.config import ConfigError, TargetConfig
from dflash2_train.evaluate.tasks import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING_ARGUMENT = "enable_thinking"
ANSWER_MARK = "@@answer-stands-here@@"  # no chat template and no prompt holds it


class Chat:
    """The target's chat template, and its tokenizer without special tokens of its own."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, bool]) -> None:
        self._name, self._tokenizer, self._arguments = name, tokenizer, arguments

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Messages -> ids, the assistant's turn opened.

        Raises:
            ConfigError: the template refuses them.
        """
        return self._ids(self._text(messages))

    def follow_ups(self, opening: Sequence[Message], further_turns: Sequence[str]) -> list[list[int]]:
        """For each further user turn the ids from the end of the answer before it to the next opened answer.

        They follow the answer's own tokens, without its stop token: the template writes how an answer ends.

        Raises:
            ConfigError: the template refuses the conversation, or does not write answers out.
        """
        messages, found = list(opening), list[list[int]]()
        for content in further_turns:
            messages += [{"role": "assistant", "content": ANSWER_MARK}, {"role": "user", "content": content}]
            _, mark, after = self._text(messages).rpartition(ANSWER_MARK)
            if not mark:
                raise ConfigError(
                    f"target.name={self._name!r}: its chat template leaves out earlier answers, so no second turn can "
                    "be asked. Remove turns_column from the task."
                )
            found.append(self._ids(after))
        return found

    def _text(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except TemplateError as error:
            raise ConfigError(
                f"target.name={self._name!r}: its chat template refuses a conversation of eval.tasks ({error}). "
                "Remove the row."
            ) from error
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def open_chat(target: TargetConfig, enable_thinking: bool | None) -> Chat:
    """The target's template, thinking as asked.

    Raises:
        ConfigError: no tokenizer, no template, or a thinking mode that the template would ignore.
    """
    from dflash2_train.target import load_tokenizer

    tokenizer = load_tokenizer(target)
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template:
        raise ConfigError(
            f"target.name={target.name!r}: its tokenizer has no single chat template. Use an instruct model, or "
            "eval.server.template=server."
        )
    if enable_thinking is not None and THINKING_ARGUMENT not in template:
        raise ConfigError(
            f"data.enable_thinking={enable_thinking}: the target's chat template never reads {THINKING_ARGUMENT}. "
            "Set data.enable_thinking=null."
        )
    return Chat(target.name, tokenizer, {} if enable_thinking is None else {THINKING_ARGUMENT: enable_thinking})


def open_renderer(target: TargetConfig, enable_thinking: bool | None) -> Callable[[Sequence[Message]], list[int]]:
    """A function from messages to ids, the assistant's turn opened and no special token added.

    Raises:
        ConfigError: see :func:`open_chat` and :meth:`Chat.render`.
    """
    return open_chat(target, enable_thinking).render
