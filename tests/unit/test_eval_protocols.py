"""The protocols under conf/ are those of the published cards, and every one of them composes."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from dflash2_train.config import ConfigError, EvalConfig, RunConfig
from dflash2_train.evaluate.tasks import PLACEHOLDER, load_task
from tests.families import CONF, load

PROTOCOLS = sorted(path.stem for path in (CONF / "eval" / "protocol").glob("*.yaml"))
OF_THE_RUNNER = ("tasks_runner", "sweep")
ADDRESS = "eval.server.url=http://127.0.0.1:8000"


def experiment(name: str, *overrides: str) -> RunConfig:
    return load("+experiment=glm53_flash", f"+eval/protocol={name}", ADDRESS, *overrides)


def protocol(name: str, *overrides: str) -> EvalConfig:
    return experiment(name, *overrides).eval


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_composes_and_writes_into_a_folder_of_its_own(name: str) -> None:
    settings = protocol(name)
    assert settings.mode == ("runner" if name in OF_THE_RUNNER else "server")
    assert Path(settings.output_dir).name == name


@pytest.mark.parametrize(
    ("name", "prompts", "tokens", "concurrency", "drafted"),
    [
        ("holdout500", 500, 1024, [16], None),
        ("holdout500_c1", 100, 1024, [1], None),
        ("mt4096", 500, 4096, [16], None),
        ("k4", 500, 1024, [16], 4),
    ],
)
def test_the_hold_out_protocols_are_the_published_ones(
    name: str, prompts: int, tokens: int, concurrency: list[int], drafted: int | None
) -> None:
    settings = protocol(name)
    assert (settings.max_prompts, settings.max_new_tokens, settings.num_drafted) == (prompts, tokens, drafted)
    assert (settings.temperature, settings.top_p, settings.server.concurrency) == (1.0, 0.95, concurrency)
    assert settings.tasks == []


def test_the_task_protocols_differ_in_samples_and_concurrency_alone() -> None:
    one, eight, many = (protocol(f"tasks_{name}") for name in ("c1", "c8", "c32"))
    assert [task.name for task in one.tasks] == ["GSM8K", "MATH-500", "HumanEval", "MBPP", "MT-Bench"]
    assert one.tasks == eight.tasks == many.tasks
    assert [(part.max_prompts, part.server.concurrency) for part in (one, eight, many)] == [
        (128, [1]),
        (1024, [8]),
        (1024, [32]),
    ]
    assert {part.max_new_tokens for part in (one, eight, many)} == {4096}
    assert "\\boxed{}" in one.tasks[0].prompt and "\n" in one.tasks[0].prompt


MATHS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# One row of each data set with the columns of its public card, by id, configuration and split; and what is asked of it.
PUBLIC = {
    ("openai/gsm8k", "main", "test"): (
        {"question": "1 + 1?", "answer": "#### 2"},
        ("0", ["1 + 1?" + MATHS]),
    ),
    ("HuggingFaceH4/MATH-500", None, "test"): (
        {
            "problem": "$x$?",
            "solution": "s",
            "answer": "1",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/1.json",
        },
        ("test/1.json", ["$x$?" + MATHS]),
    ),
    ("openai/openai_humaneval", None, "test"): (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"},
        (
            "HumanEval/0",
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ],
        ),
    ),
    ("google-research-datasets/mbpp", "sanitized", "test"): (
        {"source_file": "", "task_id": 2, "prompt": "Sort.", "code": "", "test_imports": [], "test_list": ["a"]},
        ("2", ["Sort."]),
    ),
    ("HuggingFaceH4/mt_bench_prompts", None, "train"): (
        {"prompt": ["Write.", "Again."], "prompt_id": 7, "category": "writing", "reference": []},
        ("7", ["Write.", "Again."]),
    ),
}


def test_the_five_tasks_ask_what_the_public_data_sets_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, subset: str | None, *, split: str, revision: str | None) -> list[dict[str, Any]]:
        asked.append((path, subset, split))
        return [PUBLIC[path, subset, split][0]]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for place, config in enumerate(protocol("tasks_c1").tasks):
        (task,) = load_task(config, f"eval.tasks[{place}]", 128)
        (one,) = task.conversations
        expected = PUBLIC[asked[-1]][1]
        assert (one.prompt_id, [one.opening[0]["content"], *one.further_turns]) == expected
    assert asked == list(PUBLIC)


def test_a_note_in_place_of_a_prompt_is_never_measured(tmp_path: Path) -> None:
    config = protocol("speedbench").tasks[0]
    config.path = str(tmp_path / "qualitative.jsonl")
    rows = [
        {"question_id": "a", "category": "coding", "messages": [{"role": "user", "content": text} for text in turns]}
        for turns in (["Sort.", "Faster."], ["Sort.", f"{PLACEHOLDER} USING SPECDEC_BENCH"])
    ]
    Path(config.path).write_text(json.dumps(rows[0]) + "\n")
    (task,) = load_task(config, "eval.tasks[0]")
    assert (task.category, task.conversations[0].further_turns) == ("coding", ["Faster."])
    Path(config.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="row 2: holds a note in place of the prompt"):
        load_task(config, "eval.tasks[0]")


def test_the_runner_asks_the_tasks_of_the_server_and_sweeps_the_hold_out() -> None:
    assert protocol("tasks_runner").tasks == protocol("tasks_c1").tasks
    sweep = protocol("sweep")
    assert (sweep.sweep.num_speculative_tokens, sweep.sweep.temperatures) == ([1, 3, 5, 7], [0.0, 0.6, 1.0])
    assert sweep.tasks == []


def test_a_value_on_the_command_line_wins_over_the_protocol() -> None:
    assert protocol("holdout500", "eval.server.concurrency=[8]").server.concurrency == [8]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("server.url", "", "address of a running server"),
        ("server.engine", "tgi", "must be one of"),
        ("server.concurrency", [], "different positive numbers"),
        ("server.concurrency", [4, 4], "different positive numbers"),
        ("server.label", "a/b", "names a folder"),
        ("sweep.temperatures", [0.0, 1.0], "needs eval.mode=runner"),
        ("server.tries", 0, "must be positive"),
        ("num_drafted", 8, "between 1 and"),
        ("gate.tolerance", -1.0, "must not be negative"),
        ("mode", "both", "must be one of"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(key: str, value: Any, words: str) -> None:
    config = experiment("holdout500")
    *parents, name = key.split(".")
    setattr(reduce(getattr, parents, config.eval), name, value)
    with pytest.raises(ConfigError, match=words):
        config.check()


def test_sglang_is_not_asked_for_a_template_that_hides_its_counts() -> None:
    config = experiment("holdout500")
    config.eval.server.engine, config.eval.server.template = "sglang", "server"
    with pytest.raises(ConfigError, match="Use client"):
        config.check()
