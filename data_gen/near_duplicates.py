"""Prompts that are nearly equal: MinHash signatures in an LSH index.

Prompts are compared as sets of 5-word runs, punctuation marks being words. One word changed takes away 5 runs and adds
5, so at a threshold of 0.8 a prompt with one word changed is a copy from about 50 words on, and a shorter one only if
it is equal: sums that differ in a number, or questions that differ in a name, are different prompts. That is why the
filter is on for sets of any size.

Signatures are estimates. Of 200 random pairs each, 28 % were found at a similarity of 0.78, 92 % at 0.84 and all from
0.88 on. A prompt takes 2.8 KB of memory while the filter runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from data_gen.prompt_records import PromptRecord
from dflash2_train.provenance import sha256_json

RUN_WORDS = 5
NUM_HASHES = 128  # of a signature: standard error of the similarity 0.035 at 0.8
NUM_BANDS = 16  # of 8 hashes; rensa's own 8 bands miss two thirds of the pairs at 0.84, 32 take 1.9 KB more a prompt
_SEED = 42

# Scripts written without spaces count one word a character; a mark between words is a word.
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]|[^\W\u2e80-\u9fff\uac00-\ud7af]+|[^\w\s]")


def word_sets(record: PromptRecord) -> list[str]:
    """The runs by which a prompt is compared, of every turn that is not the assistant's.

    The assistant's turns are written anew. Prompts with different tools have no run in common.
    """
    turns = [message["content"] for message in record.messages if message["role"] != "assistant"]
    words = _WORD.findall("\n".join(turns).casefold())
    tools = sha256_json(record.tools)[:8] if record.tools else ""
    return [tools + " ".join(words[start : start + RUN_WORDS]) for start in range(max(1, len(words) - RUN_WORDS + 1))]


def drop_near_duplicates(
    records: Sequence[PromptRecord], threshold: float
) -> tuple[list[PromptRecord], list[tuple[PromptRecord, str]]]:
    """Part the prompts that resemble an earlier, kept one from the others; the order stays.

    Args:
        records: in the order that decides: the first of a group of copies is kept.
        threshold: Jaccard similarity, as estimated from the signatures.

    Returns:
        The kept prompts, and the dropped ones each with the id of a kept prompt that it resembles.
    """
    import rensa  # type: ignore[import-untyped]

    index = rensa.RMinHashDeduplicator(
        threshold=threshold, num_perm=NUM_HASHES, use_lsh=True, num_bands=NUM_BANDS, seed=_SEED
    )
    kept, dropped = [], []
    for record in records:
        signature = rensa.RMinHash(num_perm=NUM_HASHES, seed=_SEED)
        signature.update(word_sets(record))
        if index.add(record.prompt_id, signature):
            kept.append(record)
        else:
            dropped.append((record, min(index.get_duplicates(signature))))
    return kept, dropped
