"""Several turns: each is answered on the history that the target itself has written, and is a row of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_gen.answers import repeats_forever
from data_gen.backends.base import Completion, Failure, GenerationRequest
from data_gen.chat import ChatRenderer, PromptRefusedError
from data_gen.ledger import Ledger
from data_gen.prepare import job_of, prepare
from data_gen.turns import turn_points
from dflash2_train.config import ConfigError, RunConfig
from tests.regeneration import StubBackend, make_config, rows_of, run, with_data
from tests.toy_target import END, TEMPLATE, WORDS, write_tokenizer

THINK, THOUGHT = WORDS.index("<think>"), WORDS.index("</think>")
# Thinking of earlier turns is dropped, so the prompt of turn 1 does not continue turn 0's prompt and answer.
FORGETFUL = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}")
TOOLS = [{"type": "function", "function": {"name": "w7"}}]
THREE_TURNS = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w80 w80"},
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": "w81"},
    {"role": "user", "content": "w4"},
]


def words(ids: Any) -> str:
    return " ".join(WORDS[token] for token in ids)


def thinking(request: GenerationRequest) -> Completion:
    """Thinks w60, answers w61 and a word for the number of turns before."""
    before = request.prompt_ids.count(WORDS.index("<assistant>"))
    ids = [THINK, WORDS.index("w60"), THOUGHT, WORDS.index("w61"), WORDS.index(f"w{70 + before}"), END]
    return Completion(request_id=request.request_id, completion_ids=ids, finish_reason="stop")


@pytest.fixture
def config(tmp_path: Path, tiny_config: RunConfig) -> RunConfig:
    return make_config(tmp_path, tiny_config, [THREE_TURNS], FORGETFUL)


def by_turn(config: RunConfig) -> list[dict[str, Any]]:
    return sorted(rows_of(config).values(), key=lambda row: row["turn"])


def test_every_turn_is_a_row_with_the_prompt_as_rendered_and_the_answer_as_returned(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StubBackend(answer=thinking)
    totals = run(config, monkeypatch, backend)
    rows = by_turn(config)
    asked = {request.request_id: request for request in backend.requests}
    assert totals.completions == len(rows) == len(asked) == 3
    for row in rows:
        request = asked[row["row_id"]]
        assert row["prompt_ids"] == request.prompt_ids
        assert row["completion_ids"] == thinking(request).completion_ids
    assert len({row["seed"] for row in rows}) == 3
    assert words(rows[1]["prompt_ids"]) == (
        "<bos> <user> w1 w2 <end> <assistant> w61 w71 <end> <user> w3 <end> <assistant>"
    ), "the target's own answer is the history, without the thinking that the template drops"
    earlier = [*rows[0]["prompt_ids"], *rows[0]["completion_ids"]]
    assert rows[1]["prompt_ids"][: len(earlier)] != earlier


def test_a_template_that_keeps_thinking_shows_it_in_later_prompts(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, tiny_config, [THREE_TURNS[:3]])
    run(config, monkeypatch, StubBackend(answer=thinking))
    first, second = by_turn(config)
    earlier = [*first["prompt_ids"], *first["completion_ids"]]
    assert second["prompt_ids"][: len(earlier)] == earlier, "special tokens inside an answer survive; one end token"


def test_the_words_of_the_source_s_assistant_are_never_answers_nor_history(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, monkeypatch, StubBackend(answer=thinking))
    foreign = {WORDS.index("w80"), WORDS.index("w81")}
    assert all(foreign.isdisjoint([*row["prompt_ids"], *row["completion_ids"]]) for row in by_turn(config))


def test_turns_last_answers_the_end_alone_with_the_source_as_context(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(with_data(config, turns="last"), monkeypatch, StubBackend(answer=thinking))
    (row,) = by_turn(config)
    assert "w80 w80" in words(row["prompt_ids"]) and "w81" in words(row["prompt_ids"])
    assert not {WORDS.index("w80"), WORDS.index("w81")} & set(row["completion_ids"])


def test_a_cut_answer_ends_its_conversation_and_the_turns_after_it_are_counted(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_second(request: GenerationRequest) -> Completion:
        if request.request_id.endswith("-1"):
            return Completion(request_id=request.request_id, completion_ids=[7, 8, 9, 10, 11], finish_reason="length")
        return thinking(request)

    totals = run(config, monkeypatch, StubBackend(answer=cut_second))
    assert [row["turn"] for row in by_turn(config)] == [0, 1]
    assert totals.skipped == {"an earlier answer was cut or empty": 1}
    again = StubBackend()
    assert run(config, monkeypatch, again).completions == 2
    assert again.requests == [], "a conversation that cannot go on is finished"


def test_a_failed_turn_is_tried_again_on_the_stored_history(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_second(request: GenerationRequest) -> Completion | Failure:
        if request.request_id.endswith("-1"):
            return Failure(request_id=request.request_id, reason="lost")
        return thinking(request)

    config = with_data(config, max_failed_share=1.0)
    assert run(config, monkeypatch, StubBackend(answer=fail_second)).failed == {"lost": 1}
    second = StubBackend(answer=thinking)
    run(config, monkeypatch, second)
    assert [request.request_id[-1] for request in second.requests] == ["1", "2"], "turn 0 is not asked again"
    assert words(second.requests[0].prompt_ids).endswith("w61 w71 <end> <user> w3 <end> <assistant>")
    assert [row["turn"] for row in by_turn(config)] == [0, 1, 2]


def test_a_history_that_grows_beyond_the_limit_ends_the_conversation(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = run(with_data(config, max_prompt_tokens=13), monkeypatch, StubBackend(answer=thinking))
    assert [row["turn"] for row in by_turn(config)] == [0, 1]
    assert totals.skipped == {"longer than data.max_prompt_tokens=13": 1}


@pytest.mark.parametrize(
    ("roles", "points"),
    [
        ("u", [1]),
        ("su", [2]),
        ("uau", [1, 3]),
        ("suauau", [2, 4, 6]),
        ("au", [2]),  # a greeting stays
        ("uatau", [3, 5]),  # a call that the source's tool answered stays; what follows the result is written anew
        ("uu", [2]),
    ],
)
def test_turns_that_only_the_source_could_have_written_stay_context(roles: str, points: list[int]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[letter], "content": "w1"} for letter in roles]
    assert turn_points(messages, "all") == points
    assert turn_points(messages, "last") == points[-1:]


def test_tools_reach_the_template_and_one_that_ignores_them_is_refused(tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path / "with", TEMPLATE.replace("<bos>", "<bos>{% if tools %}{{ tools[0].function.name }} {% endif %}")
    )
    write_tokenizer(tmp_path / "without")
    ask = THREE_TURNS[:1]
    assert "w7" in words(ChatRenderer.open(tmp_path / "with", enable_thinking=None).prompt_ids(ask, TOOLS))
    with pytest.raises(PromptRefusedError, match="never reads tools"):
        ChatRenderer.open(tmp_path / "without", enable_thinking=None).prompt_ids(ask, TOOLS)


def test_a_template_that_swallows_a_system_turn_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if message.role != 'system' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    write_tokenizer(tmp_path, template)
    with pytest.raises(PromptRefusedError, match="leaves out the system turn"):
        ChatRenderer.open(tmp_path, enable_thinking=None).prompt_ids(
            [{"role": "system", "content": "w9"}, *THREE_TURNS[:1]]
        )


@pytest.mark.parametrize("fault", ["{{ 1 + message.content }}", "{{ message.content.nothing.more }}", "{{ [][3].x }}"])
def test_whatever_a_template_trips_over_rejects_the_row_and_not_the_run(tmp_path: Path, fault: str) -> None:
    write_tokenizer(tmp_path, "{% for message in messages %}" + fault + "{% endfor %}")
    with pytest.raises(PromptRefusedError, match="template: "):
        ChatRenderer.open(tmp_path, enable_thinking=None).prompt_ids(THREE_TURNS[:1])


def with_system_turns(bad: int, good: int) -> list[list[dict[str, str]]]:
    """The toy template raises for system turns."""
    single = [[{"role": "user", "content": f"w{n} w50"}] for n in range(bad + good)]
    return [[{"role": "system", "content": "w9"}, *turns] if n < bad else turns for n, turns in enumerate(single)]


def test_prompts_that_cannot_be_rendered_are_rejected_with_the_reason_and_the_counts_add_up(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, tiny_config, with_system_turns(2, 8), max_rejected_share=0.2)
    prepared = prepare(config)
    assert prepared.rejected == {"template: no system turn": 2}
    assert len(prepared.train) + prepared.rejected.total() == len(prepared.plan.train) == 10
    assert run(config, monkeypatch, StubBackend()).prompts == 8


def test_too_large_a_share_of_rejected_prompts_ends_the_run_with_the_first_causes(
    tmp_path: Path, tiny_config: RunConfig
) -> None:
    with pytest.raises(
        ConfigError, match=r"3 of 10 prompts cannot be asked.*\n  .* from train.jsonl: template: no system"
    ):
        prepare(make_config(tmp_path, tiny_config, with_system_turns(3, 7), max_rejected_share=0.2))


@pytest.mark.parametrize(
    ("tail", "endless"),
    [
        ([5], True),
        ([1, 2, 3, 4], True),
        (list(range(5)), False),  # four whole rounds of five do not fit into 16 tokens
        ([1, 1, 1, 1, 1, 1, 1, 2], False),
    ],
)
def test_an_endless_cycle_is_known_by_four_rounds_in_the_window(tail: list[int], endless: bool) -> None:
    assert repeats_forever([*range(40), *(tail * 16)], 16) is endless
    assert repeats_forever(tail * 3, 64) is False, "too short to judge"


def test_a_target_that_repeats_forever_is_dropped_and_one_that_stops_is_not(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(request: GenerationRequest) -> Completion:
        cut = request.seed % 2 == 0
        ids = [9] * 5 if cut else [9] * 4 + [END]
        return Completion(request_id=request.request_id, completion_ids=ids, finish_reason="length" if cut else "stop")

    config = make_config(tmp_path, tiny_config, repeat_window=4)
    totals = run(config, monkeypatch, StubBackend(answer=loop))
    assert totals.dropped == {"repeats": totals.cut}
    assert 0 < totals.cut < totals.completions


def test_a_job_array_answers_every_prompt_once_and_one_job_sees_all(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, tiny_config, [[{"role": "user", "content": f"w{n} w50"}] for n in range(30)])
    asked: list[str] = []
    for index in range(3):
        backend = StubBackend()
        run(with_data(config, shard_index=index, num_shards=3), monkeypatch, backend)
        asked += [request.request_id for request in backend.requests]
    assert len(asked) == len(set(asked)) == 30
    whole = StubBackend()
    totals = run(config, monkeypatch, whole)
    assert (totals.prompts, totals.completions, whole.requests) == (30, 30, [])
    messages = [json.loads(str(row["messages"])) for row in rows_of(config).values()]
    assert len({json.dumps(message) for message in messages}) == 30


def test_a_job_leaves_the_temporary_files_of_the_others_alone(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, tiny_config, [[{"role": "user", "content": f"w{n} w50"}] for n in range(30)])
    run(with_data(config, num_shards=2), monkeypatch, StubBackend())
    folder = Path(config.data.root) / "conversations"
    own, foreign = folder / ".shard-00008.parquet.1.tmp", folder / ".shard-00009.parquet.1.tmp"
    own.write_bytes(b"PAR1")
    foreign.write_bytes(b"PAR1")
    run(with_data(config, num_shards=2), monkeypatch, StubBackend())
    assert not own.exists() and foreign.exists()


def test_a_missing_answer_is_a_failure_and_dead_after_the_last_attempt_until_reopened(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(request: GenerationRequest) -> Completion | None:
        return None if request.prompt_ids[2] == WORDS.index("w3") else thinking(request)

    config = make_config(tmp_path, tiny_config, max_failed_share=1.0, max_attempts=2)
    for attempt in (1, 2):
        backend = StubBackend(answer=forget)
        totals = run(config, monkeypatch, backend)
        assert totals.failed == {"the engine returned no answer": 1}
        assert (totals.dead, len(backend.requests)) == (attempt - 1, 10 if attempt == 1 else 1)
    given_up = StubBackend()
    run(config, monkeypatch, given_up)
    assert given_up.requests == []
    reopened = StubBackend(answer=thinking)
    totals = run(with_data(config, retry_failed=True), monkeypatch, reopened)
    assert len(reopened.requests) == 1
    assert (totals.completions, totals.dead, totals.failed.total()) == (10, 0, 0)


def test_failures_above_the_limit_end_the_run_with_the_causes_and_keep_the_answers(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_some(request: GenerationRequest) -> Completion | Failure:
        bad = request.prompt_ids[2] < WORDS.index("w3")
        return Failure(request_id=request.request_id, reason="HTTP 400: no") if bad else thinking(request)

    config = make_config(tmp_path, tiny_config)
    with pytest.raises(RuntimeError, match=r"3 of 10 requests were not answered.*\n  .*HTTP 400: no"):
        run(config, monkeypatch, StubBackend(answer=fail_some))
    assert len(rows_of(config)) == 7
    assert len(Ledger(Path(config.data.root) / "conversations", job_of(config.data), 3).entries("failed")) == 3


def test_an_answer_that_comes_twice_stops_the_run(
    tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Completion] = []

    def twice(request: GenerationRequest) -> Completion:
        first.append(thinking(request))
        return first[0]

    with pytest.raises(RuntimeError, match="came twice"):
        run(make_config(tmp_path, tiny_config), monkeypatch, StubBackend(answer=twice))
