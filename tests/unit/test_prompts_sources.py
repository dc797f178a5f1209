"""Prompt files of every kind and layout give the same conversations, and a bad row costs that row alone."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_gen import prompt_rows, prompt_sources
from data_gen.prompt_columns import ColumnMap
from data_gen.prompt_report import EARLY_ROWS
from data_gen.prompt_rows import RowRejectedError
from data_gen.prompts import load_prompts
from dflash2_train.config import ConfigError, PromptSourceConfig

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int"}}}}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def jsonl(path: Path, rows: list[Any], **fields: Any) -> PromptSourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSourceConfig(kind="jsonl", path=str(path), **fields)


def contents(source: PromptSourceConfig, **options: Any) -> list[str]:
    """What the last user turns say, sorted."""
    return sorted(record.messages[-1]["content"] for record in load_prompts([source], **options)[0])


# --- layouts ---


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"messages": [{"role": "system", "content": "Be brief."}, *user("Hi there")]}, {}),
        ({"messages": json.dumps([{"role": "system", "content": "Be brief."}, *user("Hi there")])}, {}),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi there"}]},
            {
                "messages_column": "conversations",
                "role_key": "from",
                "content_key": "value",
                "roles": {"human": "user", "gpt": "assistant"},
            },
        ),
        ({"input": "Hi there", "context": "Be brief."}, {"prompt_column": "input", "system_column": "context"}),
        ({"messages": user("Hi there"), "context": "Be brief."}, {"system_column": "context"}),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, *user("Hi there")], "context": None},
            {"system_column": "context"},
        ),
    ],
)
def test_every_layout_of_columns_gives_the_same_conversation(row: dict[str, Any], fields: dict[str, Any]) -> None:
    read = ColumnMap(PromptSourceConfig(kind="jsonl", path="x", **fields)).read(row)
    assert read.messages == [{"role": "system", "content": "Be brief."}, *user("Hi there")]


def test_a_conversation_ends_with_its_last_user_turn_or_with_the_one_configured() -> None:
    turns = [
        {"role": "system", "content": ""},  # says nothing, so it is no turn
        *user("One"),
        {"role": "assistant", "content": "1"},
        *user("Two"),
        {"role": "assistant", "content": None},
    ]
    assert ColumnMap(PromptSourceConfig(kind="jsonl")).read({"messages": turns}).messages == turns[1:4]
    first = ColumnMap(PromptSourceConfig(kind="jsonl", max_user_turns=1)).read({"messages": turns})
    assert first.messages == turns[1:2]
    several = ColumnMap(PromptSourceConfig(kind="jsonl", prompt_column="turns")).read({"turns": ["One", "Two"]})
    assert several.messages == [*user("One"), *user("Two")]


def test_tools_as_list_as_json_text_bare_or_missing_are_read_alike(tmp_path: Path) -> None:
    given = [[TOOL], json.dumps([TOOL]), [TOOL["function"]], json.dumps([TOOL["function"]])]
    absent: list[Any] = [None, "", [], "[]"]
    rows = [{"q": "Add 1 and 2", "tools": tools} for tools in given]
    rows += [{"q": f"No tools {i}", "tools": tools} for i, tools in enumerate(absent)]
    rows += [{"q": "No column"}]
    source = jsonl(tmp_path / "rows.jsonl", rows, prompt_column="q", tools_column="tools")
    records, report = load_prompts([source])
    assert report.sources[0].rejected == {}
    assert report.sources[0].duplicates == 3  # the four ways to give the tools make one prompt
    with_tools = [record for record in records if record.tools]
    assert [(record.messages, record.tools) for record in with_tools] == [(user("Add 1 and 2"), [TOOL])]
    assert len([record for record in records if record.tools is None]) == 5


def test_the_same_words_with_other_tools_are_another_prompt(tmp_path: Path) -> None:
    other = {"name": "subtract"}
    rows = [{"prompt": "Go", "tools": [TOOL]}, {"prompt": "Go", "tools": [other]}, {"prompt": "Go"}]
    source = jsonl(tmp_path / "rows.jsonl", rows, prompt_column="prompt", tools_column="tools")
    assert len({record.prompt_id for record in load_prompts([source])[0]}) == 3


def test_unusual_rows_are_read_or_rejected_and_none_vanishes(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "assistant", "content": "Hello"}, *user("Hi")]},
        {"messages": [*user("Hi"), {"role": "bot", "content": "Hello"}, *user("Bye")]},
        {"messages": user("With a list"), "tools": [TOOL]},
        {"messages": user("With text"), "tools": json.dumps([TOOL])},
        {"messages": user("Without"), "tools": None},
        {"messages": [{"role": "user", "content": None}]},
        *({"messages": user(f"Plain {i}")} for i in range(4)),
    ]
    source = jsonl(tmp_path / "rows.jsonl", rows, tools_column="tools")
    _, report = load_prompts([source], max_rejected_share=0.2)
    assert report.sources[0].rejected == {"unknown role": 1, "content is not text": 1}
    assert report.sources[0].kept == 8
    source.roles = {"bot": "assistant"}
    records, report = load_prompts([source])
    assert report.sources[0].rejected == {"content is not text": 1}
    assert [message["role"] for record in records for message in record.messages].count("assistant") == 2


@pytest.mark.parametrize(
    ("row", "fields", "reason"),
    [
        ({"messages": [{"role": "bot", "content": "Hi"}, *user("Hi")]}, {}, "unknown role"),
        ({"messages": [{"content": "Hi"}]}, {}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, {}, "unknown role"),
        ({"messages": [None]}, {}, "unknown role"),
        ({"messages": "not a list"}, {}, "no messages"),
        ({"messages": "[" * 100_000}, {}, "no messages"),
        ({"messages": {"role": "user"}}, {}, "no messages"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, {}, "no user turn"),
        ({"messages": [{"role": "user", "text": "Hi"}]}, {}, "content is not text"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, {}, "content is not text"),
        ({"p": None}, {"prompt_column": "p"}, "content is not text"),
        ({"p": []}, {"prompt_column": "p"}, "no messages"),
        ({"p": "\u200b\n \t".replace("\u200b", "")}, {"prompt_column": "p"}, "empty content"),
        ({"p": "\ufffd\ufffd\ufffdPNG\x1a"}, {"prompt_column": "p"}, "binary content"),
        ({"p": "Hi", "t": "[{]"}, {"prompt_column": "p", "tools_column": "t"}, "tools are no list of functions"),
        (
            {"p": "Hi", "t": {"name": "f"}},
            {"prompt_column": "p", "tools_column": "t"},
            "tools are no list of functions",
        ),
        ({"p": "Hi", "t": [{"function": {}}]}, {"prompt_column": "p", "tools_column": "t"}, "tools are no list of"),
        ({"p": "Hi"}, {"prompt_column": "q"}, "no column 'q'"),
        ({"p": "Hi"}, {"prompt_column": "p", "system_column": "s"}, "no column 's'"),
        (
            {"messages": [{"role": "system", "content": "A"}, *user("Hi")], "s": "B"},
            {"system_column": "s"},
            "a system turn besides the system column",
        ),
    ],
)
def test_a_bad_row_is_rejected_with_its_reason(row: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRejectedError, match=reason) as caught:
        ColumnMap(PromptSourceConfig(kind="jsonl", path="x", **fields)).read(row)
    assert caught.value.reason.startswith(reason)


# --- files ---


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_jsonl_csv_and_parquet_of_the_same_rows_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": f'Line {i},\n"quoted" and über {"x" * 200_000 if i == 3 else ""}', "note": "-"} for i in range(7)
    ]
    jsonl(tmp_path / "rows.jsonl", rows)
    write_csv(tmp_path / "rows.csv", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [
        contents(
            PromptSourceConfig(kind=kind, path=str(tmp_path / f"rows.{kind}"), prompt_column="prompt", max_chars=None)
        )
        for kind in ("jsonl", "csv", "parquet")
    ]
    assert found[0] == sorted(row["prompt"] for row in rows)
    assert found[0] == found[1] == found[2]


def test_a_pattern_names_several_files(tmp_path: Path) -> None:
    for part in range(3):
        jsonl(tmp_path / f"part-{part}.jsonl", [{"messages": user(f"Part {part}")}])
    assert contents(PromptSourceConfig(kind="jsonl", path=str(tmp_path / "part-*.jsonl"))) == [
        "Part 0",
        "Part 1",
        "Part 2",
    ]
    for path, words in (("absent-*.jsonl", "no such file"), (".", "is a folder")):
        with pytest.raises(ConfigError, match=words):
            contents(PromptSourceConfig(kind="jsonl", path=str(tmp_path / path)))


def test_broken_lines_cost_themselves_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_rows, "MAX_LINE_BYTES", 2000)
    good = [json.dumps({"messages": user(f"Good {i}")}).encode() for i in range(4)]
    bad = [
        b'{"messages": [',
        b'{"messages": [{"role": "user", "content": "caf\xe9"}]}',
        bytes(range(1, 10)) + b"\xff\xfe",
        b"[1, 2]",
        b'{"a": ' + b"9" * 5000 + b"}",  # longer than a line may be
        b'{"a": ' + b"[" * 1900,  # deeper than the parser goes
        b"x" * 4000,  # exactly twice the limit
    ]
    lines = [good[0], *bad[:3], b"", good[1], *bad[3:], good[2], good[3]]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))  # and no newline at the end
    source = PromptSourceConfig(kind="jsonl", path=str(path))
    records, report = load_prompts([source], max_rejected_share=0.9)
    (counts,) = report.sources
    assert sorted(record.messages[0]["content"] for record in records) == [f"Good {i}" for i in range(4)]
    assert counts.rejected.total() == len(bad)
    assert counts.rejected["not UTF-8"] == 2
    assert counts.rejected["a line must hold a JSON object"] == 1
    assert [cause.split(" ")[0] for cause in counts.first_rejected] == [f"rows.jsonl:{n}:" for n in (2, 3, 4, 7, 8)]


def test_a_line_as_long_as_allowed_is_read_and_one_byte_more_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"messages": user("x" * 500)}).encode()
    monkeypatch.setattr(prompt_rows, "MAX_LINE_BYTES", len(line))
    path = tmp_path / "rows.jsonl"
    for content in (line, line + b"\n"):
        path.write_bytes(content)
        assert contents(PromptSourceConfig(kind="jsonl", path=str(path))) == ["x" * 500]
    path.write_bytes(line.replace(b"xx", b"xxx", 1) + b"\n" + json.dumps({"messages": user("next")}).encode())
    records, report = load_prompts([PromptSourceConfig(kind="jsonl", path=str(path))], max_rejected_share=0.5)
    assert [record.messages for record in records] == [user("next")]
    assert list(report.sources[0].rejected) == ["a line of more than 16 MiB"]


def test_broken_csv_rows_cost_themselves_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,note\nOne,a\nTwo\n\nThree,b,c\ncaf\xe9,d\n\x00\x01,e\nFour,f\n")
    source = PromptSourceConfig(kind="csv", path=str(path), prompt_column="prompt")
    records, report = load_prompts([source], max_rejected_share=0.9)
    assert sorted(record.messages[0]["content"] for record in records) == ["Four", "One"]
    assert report.sources[0].rejected == {
        "another number of fields than the header": 2,
        "content is not text": 1,
        "binary content": 1,
    }
    path.write_text("prompt,prompt\nOne,a\n")
    with pytest.raises(ConfigError, match="names a column twice"):
        load_prompts([source])


def test_parquet_text_that_is_not_utf8_costs_its_own_row_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    column = pyarrow.array([b"One", b"caf\xe9", b"Two"], pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "answer": ["a", "b", "c"]}), path)
    source = PromptSourceConfig(kind="parquet", path=str(path), prompt_column="prompt")
    records, report = load_prompts([source], max_rejected_share=0.5)
    assert sorted(record.messages[0]["content"] for record in records) == ["One", "Two"]
    assert report.sources[0].first_rejected == ["rows.parquet row 1: not UTF-8 (unexpected end of data)"]
    source.prompt_column = "question"
    with pytest.raises(ConfigError, match="no column 'question'. Name one of prompt, answer"):
        load_prompts([source])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="Name a whole Parquet file"):
        load_prompts([source])


def test_a_source_whose_first_rows_are_all_faulty_is_not_read_to_its_end(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "rows.jsonl", [{"text": "Hi"}] * (EARLY_ROWS + 10))
    with pytest.raises(ConfigError, match=f"all {EARLY_ROWS} rows were rejected.*there are: text"):
        load_prompts([source])


def test_only_the_named_columns_of_a_parquet_data_set_are_fetched(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"problem": "One?", "solution": "long", "kind": "a"}]).to_parquet(
        tmp_path / "train.parquet"
    )
    source = PromptSourceConfig(
        kind="datasets",
        path=str(tmp_path),
        split="train",
        prompt_column="problem",
        where={"kind": ["a"]},
        fetch_columns=["problem", "kind"],
    )
    rows = [row for _, row in prompt_sources.PromptSource(source).rows()]
    assert rows == [{"problem": "One?", "kind": "a"}]
    assert contents(source) == ["One?"]


def test_an_unpinned_hub_source_records_the_commit_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    class Builder:
        hash = "a1" * 20

        def as_streaming_dataset(self, split: str) -> list[dict[str, Any]]:
            return [{"messages": user(f"From {split}")}]

    def open_builder(path: str, **options: Any) -> Builder:
        assert (path, options) == ("owner/name", {"name": None, "revision": None})
        return Builder()

    monkeypatch.setattr(datasets, "load_dataset_builder", open_builder)
    source = PromptSourceConfig(
        kind="datasets", path="owner/name", split="train", allow_unpinned=True, name="ours", terms="gated"
    )
    records, report = load_prompts([source])
    assert [(record.source, record.messages) for record in records] == [("ours", user("From train"))]
    assert (report.sources[0].revision, report.sources[0].terms) == ("a1" * 20, "gated")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_files_with_random_damage_never_raise_anything_but_a_counted_rejection(tmp_path: Path, kind: str) -> None:
    rng = random.Random(0)
    for trial in range(60):
        path = tmp_path / f"{trial}.{kind}"
        rows = [{"prompt": f"Say, {i}"} for i in range(20)]
        jsonl(path, rows) if kind == "jsonl" else write_csv(path, rows)
        content = bytearray(path.read_bytes())
        first = 0 if kind == "jsonl" else len("prompt\r\n")  # without its header a CSV file is no CSV file
        for _ in range(rng.randint(1, 30)):
            at = rng.randrange(first, len(content))
            content[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 1, 5)))
        path.write_bytes(content)
        records, report = load_prompts(
            [PromptSourceConfig(kind=kind, path=str(path), prompt_column="prompt")], max_rejected_share=0.999
        )
        assert len(records) == report.sources[0].kept > 0
        for record in records:
            record.messages[0]["content"].encode()
