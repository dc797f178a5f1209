"""The whole target for plain forwards, and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash2_train.config import ConfigError, TargetConfig, absolute
from dflash2_train.pretrained import load_pretrained
from dflash2_train.target.facts import open_target_config
from dflash2_train.target.files import first_line, is_local, metadata_folder, setup_hint
from dflash2_train.target.head import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")


def load_target_model(
    target: TargetConfig, dtype: str | torch.dtype | None = None, *, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The whole target for plain forwards: evaluation mode, no gradients.

    Args:
        target: folder or Hub id.
        dtype: of the weights; None is ``target.dtype``.
        device: to run on; "auto" spreads the layers over all visible GPUs.

    Raises:
        ConfigError: as :func:`open_target_config`, which is asked first.
    """
    info = open_target_config(target)
    return load_pretrained(
        str(absolute(target.name)) if is_local(target) else target.name,
        torch_dtype(target.dtype if dtype is None else dtype),
        device=device,
        revision=info.revision,
        trust_remote_code=target.trust_remote_code,
    )


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ConfigError: the folder holds no tokenizer, or one with more tokens than the embedding has rows.
    """
    from transformers import AutoTokenizer

    folder = metadata_folder(target)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"target.name={target.name!r}: {folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            + (setup_hint(target) or "Copy the tokenizer files of the model into the folder.")
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.name={target.name!r}: its tokenizer does not load: {first_line(error)}. "
            "A tokenizer with code of its own needs target.trust_remote_code=true."
        ) from error
    if len(tokenizer) > target.vocab_size:
        raise ConfigError(
            f"target.vocab_size={target.vocab_size}: the tokenizer in {folder} has {len(tokenizer)} tokens. "
            "Tokenizer and weights are of different models."
        )
    return tokenizer
