"""Losslessness on a real target: float32 greedy text as transformers' own generate writes it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from dflash2_train.pretrained import load_pretrained
from dflash2_train.runner import DecodeSettings, packed_linears, plain_decode_batch
from tests.decoding import Oracle, run_loop

NEW_TOKENS, NUM_DRAFTED, TAPS = 24, 7, (9, 19, 28)
QUESTIONS = ("Why is the sky blue?", "Write a haiku about copper, then explain each of its lines to a child.", "2+2?")


def own_text(target: PreTrainedModel, ids: list[int]) -> list[int]:
    """What transformers writes."""
    with torch.inference_mode():
        written = target.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS + NUM_DRAFTED + 1,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return [int(token) for token in written[0, len(ids) :]]


@pytest.mark.slow
def test_smollm2_writes_the_text_of_transformers_whatever_is_drafted(repo_root: Path) -> None:
    folder = repo_root / "targets" / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("the small target is not there; launch/target.sh makes it")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = load_pretrained(folder, torch.float32)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    prompts = [list(tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"]) for one in chats]
    truths = [own_text(target, ids) for ids in prompts]
    settings = DecodeSettings(max_new_tokens=NEW_TOKENS, num_drafted=NUM_DRAFTED, stop_ids=frozenset())
    expected = [truth[:NEW_TOKENS] for truth in truths]
    for context in (nullcontext(), packed_linears(target)):
        with context:
            right = cycle([7, 0, 3, 5, 1])
            lengths = [len(ids) for ids in prompts]
            oracle = Oracle(truths, lengths, right, NUM_DRAFTED, vocab_size=target.config.vocab_size)
            assert [one.token_ids for one in run_loop(target, oracle, TAPS, prompts, settings)] == expected
            assert [one.token_ids for one in plain_decode_batch(target, prompts, settings)] == expected
