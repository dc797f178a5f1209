"""A tiny target with a byte-level BPE tokenizer, and a tiny drafter that llama.cpp would load, for the GGUF tests."""

from __future__ import annotations

from pathlib import Path

from dflash2_train.config import RunConfig
from tests.cases import RECORD, make_drafter, make_target_info, tiny_run_config
from tests.tiny_target import save_tiny_llama

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
PLACEHOLDERS = 6  # ids below vocab_size that no token has


def gguf_config(root: Path, *, selector_rank: int = 32) -> RunConfig:
    """The tiny experiment with a target on disk and few enough candidates for llama.cpp: H 32 >= C (C + 1) = 20."""
    config = tiny_run_config(root)
    config.target.name = str(root / "target")
    config.drafter.selector_top_k = 4
    config.drafter.selector_rank = selector_rank
    config.export.format = "gguf"
    config.export.gguf.types = ["F32"]
    config.export.gguf.compare_blocks = 0
    config.check()
    return config


def save_target(config: RunConfig) -> Path:
    """The tiny Llama and its tokenizer under ``target.name``."""
    folder = Path(config.target.name)
    save_tiny_llama(folder, config)
    save_tokenizer(folder, num_tokens=config.target.vocab_size - PLACEHOLDERS)
    return folder


def save_tokenizer(folder: Path, *, num_tokens: int) -> None:
    """Byte-level BPE of ``num_tokens`` tokens: characters, merges, two control tokens and one that users may type."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
    num_letters = num_tokens - len(special) - len(merges) - 2
    letters = [chr(code) for code in range(ord("z") + 1 - num_letters, ord("z") + 1)]
    texts = [*special, "Ġ", *letters, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    assert len(tokenizer) == num_tokens
    tokenizer.save_pretrained(folder)


def save_drafter(config: RunConfig, folder: Path, dtype: str = "bfloat16") -> Path:
    """A published folder of the tiny drafter, every parameter random."""
    from dflash2_train.export.hf import export_hf

    return export_hf(make_drafter(config), config, make_target_info(config), folder, run_record=RECORD, dtype=dtype)
