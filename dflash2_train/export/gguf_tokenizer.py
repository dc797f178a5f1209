"""The target's tokenizer as GGUF keys. A drafter has no text of its own, but llama.cpp wants the target's vocabulary.

It compares the two token for token at start, so what is written here must equal what stands in the target's own GGUF.
Two ways lead there: from the target's ``tokenizer.json`` under the conventions of llama.cpp's converter, for byte-level
BPE, which is what the targets of this project have; or copied, key for key, from a GGUF of the target, for any other
tokenizer and wherever such a file is at hand.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dflash2_train.config import GgufConfig, TargetConfig, absolute
from dflash2_train.export.gguf_layout import MASK_KEY
from dflash2_train.export.gguf_read import GgufFile
from dflash2_train.export.gguf_types import GgufError, gguf_package
from dflash2_train.target import load_tokenizer, metadata_folder

logger = logging.getLogger(__name__)
TOKENIZER_FILE = "tokenizer.json"
MODEL = "gpt2"  # GGUF's name of byte-level BPE
COPY_ADVICE = "Name a GGUF of the target with export.gguf.tokenizer_from; its tokenizer is copied."

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TRIPLES = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_SINGLES = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_MARKS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merging -> llama.cpp's name for it. "bytes" is the cut of GPT-2, which the byte level brings.
_NAMES: dict[tuple[str, ...], str] = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_TRIPLES,): "glm4",
    (_SINGLES,): "qwen2",
    (_MARKS,): "qwen35",
}


def add_tokenizer(writer: Any, target: TargetConfig, settings: GgufConfig, *, num_tokens: int, mask_id: int) -> None:
    """Give a ``gguf.GGUFWriter`` the tokenizer's keys and the mask token.

    Args:
        writer: before its header is written.
        target: whose tokenizer it is.
        settings: ``tokenizer_from`` and ``pre_tokenizer`` count.
        num_tokens: V, rows of the target's embedding; ids without a token get a placeholder.
        mask_id: of the drafter.

    Raises:
        GgufError: a tokenizer of a kind that is not written here, one that is cut in an unknown way, or a file to copy
            from that is none or has another number of tokens.
    """
    if settings.tokenizer_from is not None:
        _copy(writer, GgufFile(absolute(settings.tokenizer_from)), num_tokens)
    else:
        _convert(writer, target, settings.pre_tokenizer, num_tokens)
    writer.kv_data[0].pop(MASK_KEY, None)  # a mask token of the target's own would be another one
    writer.add_mask_token_id(mask_id)


def _copy(writer: Any, file: GgufFile, num_tokens: int) -> None:
    if file.num_tokens != num_tokens:
        raise GgufError(
            f"export.gguf.tokenizer_from={file.path}: has {file.num_tokens} tokens, the drafter's target has "
            f"{num_tokens}. Name a GGUF of the very target."
        )
    types = gguf_package().GGUFValueType
    for key in file.keys:
        if not key.startswith("tokenizer."):
            continue
        kind = file.kind(key)
        if kind.startswith("ARRAY["):
            writer.add_key_value(key, file.value(key), types.ARRAY, sub_type=types[kind[6:-1]])
        else:
            writer.add_key_value(key, file.value(key), types[kind])


def _convert(writer: Any, target: TargetConfig, pre_tokenizer: str | None, num_tokens: int) -> None:
    folder = metadata_folder(target)
    description = _description(folder)
    name = pre_tokenizer or pre_tokenizer_name(description)
    if name is None:
        raise GgufError(
            f"{folder / TOKENIZER_FILE}: cuts text in a way whose llama.cpp name is not known here. {COPY_ADVICE} Or "
            "give the name itself (tokenizer.ggml.pre of the target's GGUF) with export.gguf.pre_tokenizer."
        )
    texts, kinds = _tokens(load_tokenizer(target), num_tokens)
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(name)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    # merges, special ids, whether bos and eos are added, and the chat templates
    special = gguf_package().SpecialVocab(folder, load_merges=True, n_vocab=num_tokens)
    special.add_to_gguf(writer, quiet=True)


def _description(folder: Path) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE tokenizer."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise GgufError(f"{folder}: has no {TOKENIZER_FILE}, and other tokenizers are not converted. {COPY_ADVICE}")
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GgufError(f"{path}: not readable as JSON ({error}). Fetch the file again.") from error
    model = description.get("model") or {}
    decoder = description.get("decoder") or {}
    if model.get("type") != "BPE" or decoder.get("type") != "ByteLevel":
        raise GgufError(
            f"{path}: a {model.get('type')} tokenizer with decoder {decoder.get('type')}; only byte-level BPE is "
            f"converted. {COPY_ADVICE}"
        )
    return description


def pre_tokenizer_name(description: dict[str, Any]) -> str | None:
    """llama.cpp's name for the way in which a ``tokenizer.json`` cuts text before merging; None if it has none here.

    Told by what is done and not by whose tokenizer it is, so retrained vocabularies are known too.
    """
    top = description.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", [top]) if top.get("type") == "Sequence" else [top]
    done = tuple(step for step in map(_step, steps) if step)
    if done == (_TRIPLES,) and description["model"].get("ignore_merges"):
        return "llama-bpe"  # the same cut as glm4, but whole words are looked up before merging
    return _NAMES.get(done)


def _step(step: dict[str, Any]) -> str:
    """One step of cutting: a regular expression, ``digits``, ``bytes``, or nothing; ``?`` for anything else."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes" if step.get("use_regex", True) else ""
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str((step.get("pattern") or {}).get("Regex", "?"))
    return "?"


def _tokens(tokenizer: Any, num_tokens: int) -> tuple[list[str], list[int]]:
    """Text and GGUF type of every id below V."""
    kinds = gguf_package().TokenType
    by_id = {index: text for text, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    texts, types = [], []
    for index in range(num_tokens):
        if index not in by_id:
            texts.append(f"[PAD{index}]")
            types.append(int(kinds.UNUSED))
            continue
        text = by_id[index]
        texts.append(text)
        if index not in added:
            types.append(int(kinds.NORMAL))
        else:
            control = added[index].special or (text.startswith("<|") and text.endswith("|>"))
            types.append(int(kinds.CONTROL if control else kinds.USER_DEFINED))
    return texts, types
