"""Conversations -> token ids through the target's own chat template, and which of them are supervised.

The text a template renders already holds its special tokens, so it is tokenised without adding any: exactly one BOS
where the template writes one. Answers are never rendered or tokenised here: an engine returns ids, and the boundary
between prompt and completion is the engine's own split. Everything the generation prompt supplies (an opened
assistant turn, an empty think pair) is prompt and unsupervised.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError
from dflash2_train.provenance import hash_tokenizer_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

THINKING_ARGUMENT = "enable_thinking"
TOOLS_ARGUMENT = "tools"
MAX_REASON = 120  # characters of a template's own error text, which may quote the whole conversation


class PromptRefusedError(ValueError):
    """A conversation that the chat template does not take; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class ChatRenderer:
    """A tokenizer with its template and the thinking mode of the run."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    enable_thinking: bool | None
    tokenizer_hash: str  # hex sha256 of the tokenizer files
    template_hash: str  # hex sha256 of the template text

    @classmethod
    def open(cls, folder: Path, *, enable_thinking: bool | None, trust_remote_code: bool = False) -> ChatRenderer:
        """Load tokenizer and template of a target folder.

        Raises:
            ConfigError: no template, or a thinking mode that the template does not know.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        template = tokenizer.chat_template
        if not isinstance(template, str) or not template:
            raise ConfigError(
                f"{folder}: the tokenizer has no single chat template, so conversations cannot be rendered. "
                "Use an instruct model, or add its chat_template.jinja."
            )
        check_thinking(template, enable_thinking)
        return cls(
            tokenizer=tokenizer,
            template=template,
            enable_thinking=enable_thinking,
            tokenizer_hash=hash_tokenizer_files(folder),
            template_hash=hashlib.sha256(template.encode()).hexdigest(),
        )

    def prompt_text(self, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> str:
        """The conversation with the assistant's turn opened.

        Raises:
            PromptRefusedError: the template raises an error for this conversation, or leaves a part of it out.
        """
        from jinja2 import TemplateError

        arguments: dict[str, Any] = {}
        if self.enable_thinking is not None:
            arguments[THINKING_ARGUMENT] = self.enable_thinking
        if tools:
            if TOOLS_ARGUMENT not in self.template:
                raise PromptRefusedError("the chat template never reads tools")
            arguments[TOOLS_ARGUMENT] = tools
        try:
            text = str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
            )
        # Templates are small programs: beside their own errors they run into those of a value they did not expect.
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise PromptRefusedError(f"template: {first[:MAX_REASON] or type(error).__name__}") from error
        check_complete(messages, text)
        return text

    def prompt_ids(self, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of :meth:`prompt_text`, nothing added.

        Raises:
            PromptRefusedError: see :meth:`prompt_text`.
        """
        encoded = self.tokenizer(self.prompt_text(messages, tools), add_special_tokens=False)
        return [int(token) for token in encoded["input_ids"]]

    def text_of(self, ids: list[int]) -> str:
        """Tokens as text, special ones included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answer_text(self, completion_ids: list[int], stop_ids: list[int]) -> str:
        """An answer as the content of a turn of the history: all of it but the token that ended it.

        Special tokens inside stay: think marks are special in some tokenizers, and without them the template could
        not tell a think part from the answer.
        """
        ended = bool(completion_ids) and completion_ids[-1] in stop_ids
        return self.text_of(completion_ids[:-1] if ended else completion_ids)


def check_complete(messages: list[dict[str, str]], text: str) -> None:
    """Refuse a rendering without the system turn or without the turn that is to be answered.

    Raises:
        PromptRefusedError: the template left one out.
    """
    for message in (messages[0], messages[-1]):
        if message["role"] in ("system", "user") and message["content"].strip() not in text:
            raise PromptRefusedError(f"the chat template leaves out the {message['role']} turn")


def check_thinking(template: str, enable_thinking: bool | None) -> None:
    """Refuse a thinking mode that the template would ignore without a word.

    Raises:
        ConfigError: ``enable_thinking`` is set and the template never reads it.
    """
    if enable_thinking is not None and THINKING_ARGUMENT not in template:
        raise ConfigError(
            f"data.enable_thinking={enable_thinking}: the target's chat template never reads {THINKING_ARGUMENT}. "
            "Set data.enable_thinking=null."
        )


def join_turn(prompt_ids: list[int], completion_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Input ids [S] int32 and loss mask [S] bool of a prompt and the engine's completion.

    Raises:
        ValueError: an empty part; without a prompt there is no anchor, without a completion nothing to learn.
    """
    import torch

    if not prompt_ids or not completion_ids:
        raise ValueError(
            f"{len(prompt_ids)} prompt and {len(completion_ids)} completion tokens: both need at least one"
        )
    ids = torch.tensor([*prompt_ids, *completion_ids], dtype=torch.int32)
    mask = torch.arange(len(ids)) >= len(prompt_ids)
    return ids, mask
