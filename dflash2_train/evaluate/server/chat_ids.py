"""Conversations -> prompt ids with the target's own template, for requests that carry token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash2_train.config import ConfigError, TargetConfig
from dflash2_train.evaluate.tasks import Message

THINKING_ARGUMENT = "enable_thinking"


def open_renderer(target: TargetConfig, enable_thinking: bool | None) -> Callable[[Sequence[Message]], list[int]]:
    """A function from messages to ids, the assistant's turn opened and no special token added.

    Raises:
        ConfigError: no tokenizer, no template, or a thinking mode that the template would ignore.
    """
    from jinja2 import TemplateError

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
    arguments = {} if enable_thinking is None else {THINKING_ARGUMENT: enable_thinking}

    def render(messages: Sequence[Message]) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **arguments
            )
        except TemplateError as error:
            raise ConfigError(
                f"target.name={target.name!r}: its chat template refuses a conversation of eval.tasks ({error}). "
                "Remove the row."
            ) from error
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return render
