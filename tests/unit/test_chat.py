"""Rendering prompts and marking what is supervised."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_gen.chat import ChatRenderer, PromptRefusedError, join_turn
from dflash2_train.config import ConfigError
from tests.toy_target import BOS, PLAIN_TEMPLATE, WORDS, write_tokenizer

ASK = [{"role": "user", "content": "w1 w2"}]
TWO_TURNS = [*ASK, {"role": "assistant", "content": "w3"}, {"role": "user", "content": "w4"}]


def words(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def test_a_template_that_writes_bos_gives_exactly_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    renderer = ChatRenderer.open(tmp_path, enable_thinking=None)
    assert renderer.tokenizer("w1")["input_ids"][0] == BOS, "the tokenizer alone would add one"
    assert words(renderer.prompt_ids(ASK)) == "<bos> <user> w1 w2 <end> <assistant>"


def test_a_prompt_of_several_turns_keeps_them_in_order(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ids = ChatRenderer.open(tmp_path, enable_thinking=None).prompt_ids(TWO_TURNS)
    assert words(ids) == "<bos> <user> w1 w2 <end> <assistant> w3 <end> <user> w4 <end> <assistant>"


def test_what_the_generation_prompt_supplies_is_prompt_and_unsupervised(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    prompt = ChatRenderer.open(tmp_path, enable_thinking=False).prompt_ids(ASK)
    assert words(prompt[-2:]) == "<think> </think>"
    ids, mask = join_turn(prompt, [9, 10, 1])
    assert ids.tolist() == [*prompt, 9, 10, 1]
    assert mask.tolist() == [False] * len(prompt) + [True] * 3


def test_a_thinking_mode_that_the_template_ignores_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, PLAIN_TEMPLATE)
    with pytest.raises(ConfigError, match="data.enable_thinking=True"):
        ChatRenderer.open(tmp_path, enable_thinking=True)


def test_a_conversation_that_the_template_refuses_is_named_with_the_reason(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    renderer = ChatRenderer.open(tmp_path, enable_thinking=None)
    with pytest.raises(PromptRefusedError, match="no system turn"):
        renderer.prompt_ids([{"role": "system", "content": "w1"}, *ASK])


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer.open(tmp_path, enable_thinking=None)


@pytest.mark.parametrize("parts", [([], [1]), ([1], [])])
def test_a_turn_without_prompt_or_answer_is_refused(parts: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        join_turn(*parts)


def test_hashes_follow_tokenizer_and_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a")
    write_tokenizer(tmp_path / "b", PLAIN_TEMPLATE)
    first = ChatRenderer.open(tmp_path / "a", enable_thinking=None)
    second = ChatRenderer.open(tmp_path / "b", enable_thinking=None)
    assert first.tokenizer_hash == second.tokenizer_hash
    assert first.template_hash != second.template_hash
