"""Prompts: the starter set, row checks and counts, order and caps, and the hold-out kept out of training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_gen.prompt_report import RemovedPrompt
from data_gen.prompts import PromptRecord, find_overlap, load_prompts, make_prompts, prompt_id
from dflash2_train.config import ConfigError, DataConfig, PromptSourceConfig, SamplingConfig
from dflash2_train.overlap import holdout_hash, split_words, user_turns, word_runs

STARTER_TRAIN = 1024
STARTER_HOLDOUT = 64
KINDS = {"question", "instruction", "maths", "code", "rewrite", "list", "dialogue"}
HELD_OUT = "Name the seven colours of the rainbow in the order in which they appear."


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def record(text: str, split: str = "train") -> PromptRecord:
    messages = user(text)
    return PromptRecord(prompt_id=prompt_id(messages), source="test", license="x", messages=messages, split=split)


def remove_holdout(
    train: list[PromptRecord], holdout: list[PromptRecord]
) -> tuple[list[PromptRecord], list[RemovedPrompt]]:
    removed = find_overlap(train, [("hold-out", holdout)])
    gone = {entry.prompt_id for entry in removed}
    return [entry for entry in train if entry.prompt_id not in gone], removed


def write_rows(path: Path, rows: list[Any]) -> PromptSourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSourceConfig(kind="jsonl", path=str(path))


def numbered(path: Path, name: str, count: int) -> PromptSourceConfig:
    return write_rows(path, [{"messages": user(f"{name} {i}"), "source": name} for i in range(count)])


def starter(split: str) -> PromptSourceConfig:
    return PromptSourceConfig(kind="starter", split=split)


@pytest.fixture(scope="module")
def starter_sets() -> tuple[list[PromptRecord], list[PromptRecord]]:
    return load_prompts([starter("train")])[0], load_prompts([starter("holdout")], split="holdout")[0]


def test_the_starter_sets_are_complete_and_every_row_is_usable(
    starter_sets: tuple[list[PromptRecord], list[PromptRecord]],
) -> None:
    train, holdout = starter_sets
    assert (len(train), len(holdout)) == (STARTER_TRAIN, STARTER_HOLDOUT)
    assert {entry.license for entry in train + holdout} == {"Apache-2.0"}
    assert {entry.split for entry in holdout} == {"holdout"}


def test_the_starter_sets_share_no_prompt_and_no_run_of_eight_words(
    starter_sets: tuple[list[PromptRecord], list[PromptRecord]],
) -> None:
    train, holdout = starter_sets
    turns = [{turn for entry in entries for turn in user_turns(entry.messages)} for entries in starter_sets]
    texts = [
        {run for entry in entries for message in entry.messages for run in word_runs(split_words(message["content"]))}
        for entries in starter_sets
    ]
    assert turns[0] & turns[1] == set()
    assert texts[0] & texts[1] == set()
    assert remove_holdout(train, holdout) == (train, [])


def test_both_starter_sets_hold_all_kinds_in_the_same_proportions(repo_root: Path) -> None:
    counts = []
    for name in ("starter_train", "starter_holdout"):
        lines = (repo_root / "data_gen/prompt_sets" / f"{name}.jsonl").read_text().splitlines()
        counts.append(Counter(json.loads(line)["kind"] for line in lines))
    assert set(counts[0]) == KINDS
    assert counts[0] == {kind: number * STARTER_TRAIN // STARTER_HOLDOUT for kind, number in counts[1].items()}


def test_ids_depend_on_the_messages_alone_and_the_order_not_on_the_input(tmp_path: Path) -> None:
    rows = [{"id": f"given-{i}", "messages": user(f"Count to {i}")} for i in range(20)]
    forward, _ = load_prompts([write_rows(tmp_path / "a.jsonl", rows)])
    relabelled = [{**row, "id": "other", "kind": "x"} for row in reversed(rows)]
    backward, _ = load_prompts([write_rows(tmp_path / "b.jsonl", relabelled)])
    assert [entry.prompt_id for entry in forward] == [entry.prompt_id for entry in backward]
    assert len({entry.prompt_id for entry in forward}) == 20
    assert prompt_id(user("Count to 1")) != prompt_id(user("count to 1"))
    assert all(len(entry.prompt_id) == 16 for entry in forward)


def test_sources_mix_before_the_cap_and_the_seed_decides_what_it_keeps(tmp_path: Path) -> None:
    both = [numbered(tmp_path / "a.jsonl", "apples", 100), numbered(tmp_path / "b.jsonl", "pears", 100)]
    records, _ = load_prompts(both, seed=1)
    assert {entry.source for entry in records[:50]} == {"apples", "pears"}
    assert records == load_prompts(both, seed=1)[0]
    assert records != load_prompts(both, seed=2)[0]
    both[0].max_prompts = 30
    capped, report = load_prompts(both, seed=1)
    assert [entry for entry in capped if entry.source == "apples"] == [e for e in records if e.source == "apples"][:30]
    assert (report.sources[0].kept, report.sources[0].capped) == (30, 70)
    assert report.sources[1].capped == 0


def test_every_row_ends_kept_as_a_duplicate_or_rejected_with_a_reason(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "Yes."}
    rows = [
        {"messages": user("What is 3 + 4?")},
        {"messages": user("  what is 3 +  4? ")},  # duplicate
        {"messages": user("What is 3 - 4?"), "source": "sums", "license": "MIT"},  # other text
        {"messages": [*user("Ready?"), reply, *user("Go on.")]},
        {"messages": [*user("Ready?"), reply, {"role": "assistant", "content": None}]},  # ends where the target goes on
        {"messages": [reply]},
        {"messages": [{"role": "bot", "content": "Hi"}]},
        {"messages": ["text"]},
        {"messages": user(" \n")},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": user("broken \ud83d")},
        {"messages": user("\x00\x01\x02 PNG")},
        {"messages": user("\x03\x04\x05\x06\x07\x08")},
        {"messages": []},
        {"messages": None},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    source.license = "CC-BY-4.0"
    records, report = load_prompts([source], max_rejected_share=0.7)
    (counts,) = report.sources
    assert counts.rejected == {
        "no user turn": 1,
        "unknown role": 2,
        "empty content": 1,
        "content is not text": 2,
        "binary content": 2,
        "no messages": 2,
    }
    assert (counts.rows, counts.kept, counts.duplicates) == (15, 4, 1)
    assert counts.first_rejected[:2] == ["rows.jsonl:6: no user turn", "rows.jsonl:7: unknown role 'bot'"]
    assert user("Ready?") in [entry.messages for entry in records]
    assert {(entry.source, entry.license) for entry in records} == {("sums", "MIT"), ("rows.jsonl", "CC-BY-4.0")}
    assert counts.licenses == {"MIT": 1, "CC-BY-4.0": 3}
    assert "15 rows, 4 kept, 1 duplicates" in str(report)
    assert "2 rejected (unknown role)" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["totals"] == {"train": 4}


def test_too_many_faulty_rows_end_the_run_with_the_first_causes_and_fewer_do_not(tmp_path: Path) -> None:
    source = numbered(tmp_path / "rows.jsonl", "apples", 18)
    with open(source.path, "a") as file:
        file.write("{broken\n[1]\n")
    assert load_prompts([source], max_rejected_share=0.1)[1].sources[0].rejected.total() == 2
    with pytest.raises(ConfigError, match=r"2 of 20 rows were rejected.*0\.09.*rows\.jsonl:19: not JSON.*:20: a line"):
        load_prompts([source], max_rejected_share=0.09)


def test_a_prompt_of_an_earlier_source_is_a_duplicate_in_a_later_one(tmp_path: Path) -> None:
    first = numbered(tmp_path / "a.jsonl", "apples", 3)
    second = write_rows(tmp_path / "b.jsonl", [{"messages": user("APPLES 1")}, {"messages": user("pears")}])
    records, report = load_prompts([first, second])
    assert len(records) == 4
    assert report.sources[1].duplicates == 1


def test_plain_text_of_a_prompt_column_becomes_one_user_turn(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Sing.", "messages": user("Not this.")}, {"prompt": 3}])
    source.prompt_column = "prompt"
    records, report = load_prompts([source], max_rejected_share=0.5)
    assert [entry.messages for entry in records] == [user("Sing.")]
    assert report.sources[0].rejected == {"content is not text": 1}


def test_a_local_folder_is_read_through_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": user(f"Say {i}"), "license": "MIT"} for i in range(5)]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train-00000.parquet")
    source = PromptSourceConfig(kind="datasets", path=str(tmp_path / "set"), split="train")
    records, report = load_prompts([source])
    assert sorted(entry.messages[0]["content"] for entry in records) == [f"Say {i}" for i in range(5)]
    assert (records[0].source, records[0].license) == ("set train", "MIT")
    source.split = "absent"
    with pytest.raises(ConfigError, match="split='absent'"):
        load_prompts([source])
    source.split, source.messages_column = "train", "turns"
    with pytest.raises(ConfigError, match="set train row 0: no column 'turns'"):
        load_prompts([source])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"messages": [{"role": "user", "content": "Hi"}]}\n{"messages": [\n', r"rows\.jsonl:2: not JSON"),
        (
            '{"messages": [{"role": "user", "content": "Hi"}]}\n\n{"text": "Hi"}\n',
            r"rows\.jsonl:3: no column 'messages'",
        ),
        ('["Hi"]\n', r"rows\.jsonl:1: a line must hold a JSON object, not a list"),
        ("\n", r"rows\.jsonl\): has no rows"),
        ("", r"rows\.jsonl\): has no rows"),
        ('{"messages": []}\n', r"all 1 rows were rejected \(1 no messages\)"),
    ],
)
def test_what_cannot_be_used_stops_with_file_line_and_rule(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load_prompts([PromptSourceConfig(kind="jsonl", path=str(path))])


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not UTF-8"):
        load_prompts([PromptSourceConfig(kind="jsonl", path=str(path))])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "xml"}, r"data\.train_prompts\[0\]\.kind='xml'"),
        ({"kind": "starter", "split": "test"}, r"split='test'"),
        ({"kind": "jsonl"}, r"path=''"),
        ({"kind": "jsonl", "path": "absent.jsonl"}, r"path='absent.jsonl': No such file"),
        ({"kind": "datasets", "path": "owner/name"}, r"split=''"),
        (
            {"kind": "datasets", "path": "owner/name", "split": "train"},
            r"revision=None: owner/name may change.*git ls-",
        ),
        ({"kind": "datasets", "path": "owner/name", "split": "train", "revision": "main"}, r"revision='main'"),
        ({"kind": "starter", "split": "train", "roles": {"human": "person"}}, r"roles\.human='person'"),
        ({"kind": "starter", "split": "train", "holdout_share": 1.0}, r"holdout_share=1\.0"),
        ({"kind": "starter", "split": "train", "min_chars": 9, "max_chars": 8}, r"max_chars=8: .* min_chars=9"),
        ({"kind": "starter", "split": "train", "max_prompts": 0}, r"max_prompts=0: must be positive"),
    ],
)
def test_a_source_that_cannot_be_right_is_refused_by_its_key(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_prompts([PromptSourceConfig(**fields)])


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.holdout_prompts=\[\]"):
        load_prompts([], split="holdout")


def test_copies_of_a_holdout_prompt_are_removed_and_a_near_miss_is_kept() -> None:
    holdout = [record(HELD_OUT, "holdout"), record("Tell me more.", "holdout")]
    variant = "  name the SEVEN colours of the rainbow, in the order in which\nthey appear "
    longer = f"Here is a task for today. {HELD_OUT} Then write a short story of ten sentences about one of them. " + (
        "The story should be set in a small town by the sea and end with a surprise that nobody saw coming at all."
    )
    # 8-word runs: 15 words make 8 of them, of which 3 (38 %) and 2 (25 %) stand in the hold-out.
    overlapping = "Name the seven colours of the rainbow in the order that you happen to like"
    near_miss = "Name the seven colours of the rainbow in the manner that a painter would like"
    short_inside = "Tell me more. I want to know how whales sleep."
    texts = [HELD_OUT, variant, longer, overlapping, near_miss, short_inside]
    kept, removed = remove_holdout([record(text) for text in texts], holdout)
    assert [entry.messages for entry in kept] == [user(near_miss), user(short_inside)]
    assert [entry.rule for entry in removed] == [
        "same user turn",
        "same user turn",
        "contains a hold-out turn",
        "shares 8-word runs",
    ]
    assert {entry.reference_id for entry in removed} == {holdout[0].prompt_id}


def test_a_holdout_prompt_in_a_later_user_turn_is_found_and_an_assistant_turn_is_not_searched() -> None:
    holdout = [record(HELD_OUT, "holdout")]
    middle = [*user("Hello"), {"role": "assistant", "content": "Hi"}, *user(HELD_OUT.upper())]
    said = [*user("Hello"), {"role": "assistant", "content": HELD_OUT}, *user("Thanks")]
    entries = [
        PromptRecord(prompt_id=prompt_id(messages), source="t", license="x", messages=messages, split="train")
        for messages in (middle, said)
    ]
    kept, removed = remove_holdout(entries, holdout)
    assert [entry.messages for entry in kept] == [said]
    assert [entry.prompt_id for entry in removed] == [prompt_id(middle)]


def test_texts_without_latin_words_are_still_told_apart() -> None:
    holdout = [record("?!", "holdout"), record("请用一句话介绍你自己和你的家乡", "holdout")]
    kept, _ = remove_holdout([record("!?"), record("?!"), record("好的。请用一句话介绍你自己和你的家乡!谢谢")], holdout)
    assert [entry.messages for entry in kept] == [user("!?")]


def data_config(train: PromptSourceConfig, holdout: PromptSourceConfig) -> DataConfig:
    return DataConfig(
        root="unused",
        train_prompts=[train],
        holdout_prompts=[holdout],
        sampling=SamplingConfig(max_tokens=8, seed=3),
        max_prompt_tokens=32,
    )


def test_the_plan_keeps_the_holdout_out_of_training_and_lists_what_it_removed(tmp_path: Path) -> None:
    rows = [{"messages": user(text)} for text in ("One.", "Two.", HELD_OUT)]
    plan = make_prompts(
        data_config(
            write_rows(tmp_path / "train.jsonl", rows),
            write_rows(tmp_path / "holdout.jsonl", [{"messages": user(HELD_OUT.lower())}]),
        )
    )
    assert {entry.messages[0]["content"] for entry in plan.train} == {"One.", "Two."}
    assert [entry.split for entry in plan.holdout] == ["holdout"]
    assert plan.holdout_hashes == [holdout_hash(user(f"  {HELD_OUT}"))]
    assert plan.report.to_dict()["removed"] == [
        {
            "prompt_id": prompt_id(user(HELD_OUT)),
            "source": "train.jsonl",
            "rule": "same user turn",
            "reference": "hold-out",
            "reference_id": plan.holdout[0].prompt_id,
        }
    ]
    assert plan.report.totals() == {"train": len(plan.train), "holdout": len(plan.holdout)}
    assert "overlap with the hold-out, same user turn: 1 removed" in plan.report.lines()


def test_a_plan_whose_training_prompts_are_the_holdout_is_refused() -> None:
    with pytest.raises(ConfigError, match="all 64 prompts overlap"):
        make_prompts(data_config(starter("holdout"), starter("holdout")))
