"""Prompts that were trained on do not pass for a measurement, and another thinking mode is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.evaluate.tasks import Conversation, Task
from dflash2_train.evaluate.trained_on import check_tasks
from dflash2_train.export.evaluations import thinking_notes

LONG = "List three ways in which a small shop can save water in summer"
PLANTED = {
    "a copy": "Name the capital of Norway.",
    "other case and space": "name  the CAPITAL of norway",
    "inside a longer turn": f"Please help me. {LONG}. Thank you.",
}


def task(*turns: str, further: str | None = None) -> Task:
    conversations = [
        Conversation(
            prompt_id=f"row-{number}",
            opening=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": turn}],
            further_turns=[further] if further else [],
        )
        for number, turn in enumerate(turns)
    ]
    return Task(name="quiz", category=None, conversations=conversations)


def plan_of(config: RunConfig, train: dict[str, str], holdout: dict[str, str] | None = None) -> Path:
    """The plan of prompts as dflash2-gen-data stores it."""
    splits = [("train", train), ("holdout", holdout or {})]
    rows = [
        {
            "prompt_id": name,
            "source": "s",
            "license": "l",
            "split": split,
            "messages": [{"role": "user", "content": text}],
        }
        for split, prompts in splits
        for name, text in prompts.items()
    ]
    path = Path(config.data.root) / "prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


QUIZ = task("Name the capital of Norway.", LONG)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_task_of_which_training_saw_a_prompt_is_refused_by_name(tiny_config: RunConfig, kind: str) -> None:
    plan_of(tiny_config, {"p1": "How do birds fly?", "p2": PLANTED[kind]})
    with pytest.raises(ConfigError, match=r"1 of 2 training prompts .* quiz: row-\d .* training prompt p2") as caught:
        check_tasks(tiny_config, [QUIZ])
    assert "eval.allow_trained_prompts=true" in str(caught.value)


def test_a_further_turn_that_was_trained_on_counts_like_the_first(tiny_config: RunConfig) -> None:
    plan_of(tiny_config, {"p1": "How do birds fly?"})
    with pytest.raises(ConfigError, match="same user turn as training prompt p1"):
        check_tasks(tiny_config, [task("Something else entirely.", further="how do birds fly")])


def test_a_near_miss_and_the_hold_out_itself_are_no_overlap(tiny_config: RunConfig) -> None:
    plan_of(tiny_config, {"p1": "Name the capital of Sweden."}, holdout={"h1": "Name the capital of Norway."})
    (label,) = check_tasks(tiny_config, [QUIZ])
    assert label.startswith("none of the 1 training prompts")


def test_wording_around_the_prompts_of_a_task_is_no_overlap_and_the_prompt_inside_it_is(tiny_config: RunConfig) -> None:
    around = "Please reason step by step, and put your final answer within \\boxed{}."
    questions = [f"A shop sells {n} kinds of tea in bags of {n + 7} grams; how much is that?" for n in range(2, 12)]
    asked = task(*(f"{question}\n{around}" for question in questions))
    plan_of(tiny_config, {"p1": f"What is 3 + 4? {around}"})
    assert check_tasks(tiny_config, [asked])[0].startswith("none of the 1")
    plan_of(tiny_config, {"p1": f"What is 3 + 4? {around}", "p2": questions[4]})
    with pytest.raises(ConfigError, match=r"1 of 2 training prompts .* quiz: row-\d \(shares 8-word runs"):
        check_tasks(tiny_config, [asked])


def test_measured_all_the_same_the_result_says_that_it_is_not_held_out(tiny_config: RunConfig) -> None:
    plan_of(tiny_config, PLANTED)
    tiny_config.eval.allow_trained_prompts = True
    (label,) = check_tasks(tiny_config, [QUIZ])
    assert label.startswith("NOT HELD OUT: 3 of 3 training prompts")


def test_without_a_record_of_training_prompts_the_result_says_that_nothing_was_checked(tiny_config: RunConfig) -> None:
    (label,) = check_tasks(tiny_config, [QUIZ])
    assert "was not checked" in label


def test_the_hold_out_alone_needs_no_check(tiny_config: RunConfig) -> None:
    alone = Conversation(prompt_id="a", opening=[], further_turns=[], prompt_ids=[1, 2])
    assert check_tasks(tiny_config, [Task(name="hold-out", category=None, conversations=[alone])]) == []


@pytest.mark.parametrize("line", ["{", "[]", '{"split": "train", "prompt_id": "p"}'])
def test_a_damaged_record_of_training_prompts_is_named_by_its_line(tiny_config: RunConfig, line: str) -> None:
    path = plan_of(tiny_config, {"p1": "How do birds fly?"})
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: not a prompt"):
        check_tasks(tiny_config, [QUIZ])


def test_another_thinking_mode_than_that_of_training_is_said_and_the_same_one_is_not() -> None:
    record = {"source": {"training": {"cache": {"enable_thinking": True}}}}
    assert thinking_notes(record, False) == ["Measured with enable_thinking=False, but trained on text with True."]
    assert thinking_notes(record, True) == []
    assert thinking_notes(None, False) == [], "nothing is known of a drafter without a record"
