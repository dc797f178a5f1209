"""Held back is a conversation, whole and for good: whatever else is captured, in whatever order."""

from __future__ import annotations

import random

import pytest

from data_gen.cache.row_plan import Document
from data_gen.cache.split import by_place, conversation_of, split_documents
from data_gen.turns import row_id
from dflash2_train.config import ConfigError


def documents(conversations: int, *, repeats: int = 2, turns: int = 2) -> list[Document]:
    names = [row_id(f"{n:016x}", r, t) for n in range(conversations) for r in range(repeats) for t in range(turns)]
    return [Document(sample_id=name, num_tokens=9, num_supervised=4) for name in sorted(names)]


def conversations(some: list[Document]) -> set[str]:
    return {conversation_of(document.sample_id) for document in some}


def test_a_sample_id_tells_its_conversation_and_a_foreign_id_is_its_own() -> None:
    assert conversation_of(row_id("0123456789abcdef", 11, 3)) == "0123456789abcdef"
    for name in ("sample-7", "doc", "a-b-c"):
        assert conversation_of(name) == name


def test_all_answers_to_a_prompt_land_on_one_side_and_every_answer_on_one() -> None:
    everything = documents(40)
    kept, back = split_documents(everything, share=0.3, seed=0)
    assert not conversations(list(kept)) & conversations(back)
    assert sorted([*kept, *back], key=lambda one: one.sample_id) == everything
    assert list(kept) == [one for one in everything if one in kept]  # their order stays


def test_about_the_share_is_held_back_and_another_seed_holds_back_others() -> None:
    everything = documents(600, repeats=1, turns=1)
    backs = [conversations(split_documents(everything, share=0.2, seed=seed)[1]) for seed in (0, 1)]
    assert all(90 < len(back) < 150 for back in backs)
    assert len(backs[0] & backs[1]) < 60


def test_more_data_or_a_larger_share_moves_no_conversation_back_into_training() -> None:
    some, more = documents(60), documents(90)
    held = conversations(split_documents(some, share=0.1, seed=4)[1])
    assert held <= conversations(split_documents(more, share=0.1, seed=4)[1])
    assert held <= conversations(split_documents(some, share=0.3, seed=4)[1])


def test_the_order_of_validation_is_not_that_of_the_cache() -> None:
    everything = documents(30)
    shuffled = list(everything)
    random.Random(1).shuffle(shuffled)
    assert by_place(shuffled, 0) == by_place(everything, 0) != everything
    assert by_place(everything, 0)[:4] == split_documents(everything, share=0.5, seed=0)[1][:4]


def test_without_a_share_training_gets_the_list_as_it_was() -> None:
    everything = documents(3)
    assert split_documents(everything, share=0.0, seed=0) == (everything, [])


@pytest.mark.parametrize(("share", "side"), [(1e-9, "validation"), (1 - 1e-9, "training")])
def test_a_share_that_leaves_one_side_empty_is_refused_with_the_way_out(share: float, side: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.validation\.share={share}: of 40 .* none is left for {side}"):
        split_documents(documents(40), share=share, seed=0)
