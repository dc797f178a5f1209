"""What the checks want to know of the target, from an opened target or straight from a folder or Hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash2_train.config import ConfigError, TargetConfig, UserError
from dflash2_train.target import TargetInfo, TargetTensors, metadata_folder, open_target_config

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """Which token an id is, from the tokenizer's files alone."""

    ordinary: frozenset[int]  # ids that text is made of
    special: dict[int, str] = field(default_factory=dict)  # id -> the token's text
    template: str = ""  # of chat, as text
    mask_token: str | None = None  # what the tokenizer itself calls its mask token


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The target's stated sizes and, where its files are at hand, its tokenizer and weights."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    config: TargetConfig | None = None  # to reach the files with; None: the sizes are all there is

    @classmethod
    def of(cls, info: TargetInfo, *, name: str = "the target", config: TargetConfig | None = None) -> TargetFacts:
        """The facts in an opened target."""
        return cls(
            name=name,
            hidden_size=info.hidden_size,
            num_layers=info.num_layers,
            vocab_size=info.vocab_size,
            max_position_embeddings=info.max_position_embeddings,
            eos_token_ids=info.eos_token_ids,
            config=config,
        )

    @cached_property
    def tokenizer(self) -> TokenizerFacts | None:
        """The tokenizer's facts, or None where there is no ``tokenizer.json``."""
        if self.config is None:
            return None
        return read_tokenizer(metadata_folder(self.config))

    @cached_property
    def tensors(self) -> TargetTensors | None:
        """The target's tensors if its weights are here; none are fetched for a check-up."""
        if self.config is None or not any(Path(self.config.name).glob("*.safetensors")):
            return None
        return TargetTensors(self.config)


def open_target(name: str, revision: str | None = None) -> TargetFacts:
    """The facts of a model folder or Hub id.

    Raises:
        UserError: no such model, or one that states no sizes; the text names what is wrong.
    """
    probe = TargetConfig(name=name, revision=revision, license="", hidden_size=0, num_layers=0, vocab_size=0)
    try:
        raw = json.loads((metadata_folder(probe) / "config.json").read_text(encoding="utf-8"))
        text: dict[str, Any] = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
        hidden, layers, vocab = (int(text[key]) for key in _SIZES)
        config = replace(probe, hidden_size=hidden, num_layers=layers, vocab_size=vocab)
        return TargetFacts.of(open_target_config(config), name=name, config=config)
    except ConfigError as error:
        raise UserError(str(error).replace("target.name", "--target", 1)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--target {name}: its config.json states no {', '.join(_SIZES)} ({error}). Name a language model."
        ) from error


_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def read_tokenizer(folder: Path) -> TokenizerFacts | None:
    """The facts in a folder's tokenizer files, or None where there is no readable ``tokenizer.json``.

    Raises:
        UserError: a file is there and no JSON.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    stated = _json(folder / TOKENIZER)
    vocabulary = stated.get("model", {}).get("vocab", {})
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))  # unigram: a list
    added = {token["id"]: token for token in stated.get("added_tokens", [])}
    special = {id: str(token["content"]) for id, token in added.items() if token.get("special")}
    config = _json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    template = (folder / TEMPLATE).read_text(encoding="utf-8") if (folder / TEMPLATE).is_file() else ""
    named = config.get("mask_token")
    return TokenizerFacts(
        ordinary=(frozenset(ids) | frozenset(added)) - frozenset(special),
        special=special,
        template=template or str(config.get("chat_template") or ""),
        mask_token=named.get("content") if isinstance(named, dict) else named,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}). Fetch the file again.") from error
    return value
