"""Filters, the hash split, caps, shares and near-duplicates: what is chosen, whatever the order of the input."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_gen.near_duplicates import drop_near_duplicates
from data_gen.prompt_filters import RowFilter, in_holdout
from data_gen.prompt_report import PromptReport
from data_gen.prompt_selection import share_out
from data_gen.prompts import PromptRecord, load_prompts, make_prompts, prompt_id
from dflash2_train.config import ConfigError, DataConfig, PromptSourceConfig, SamplingConfig

WORDS = "amber birch cedar delta ember flint grove heath inlet jolly kayak lemon maple north olive pearl".split()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write(path: Path, texts: list[str], **fields: Any) -> PromptSourceConfig:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return PromptSourceConfig(kind="jsonl", path=str(path), prompt_column="prompt", name=path.stem, **fields)


def data(train: list[PromptSourceConfig], holdout: list[PromptSourceConfig], **fields: Any) -> DataConfig:
    config = DataConfig(
        root="unused",
        train_prompts=train,
        holdout_prompts=holdout,
        sampling=SamplingConfig(max_tokens=8, seed=3),
        max_prompt_tokens=32,
        **fields,
    )
    config.check()
    return config


def record(text: str, tools: list[dict[str, Any]] | None = None) -> PromptRecord:
    messages = user(text)
    return PromptRecord(
        prompt_id=prompt_id(messages, tools), source="t", license="x", messages=messages, split="train", tools=tools
    )


def held_out(tmp_path: Path) -> list[PromptSourceConfig]:
    return [write(tmp_path / "held.jsonl", ["An entirely different prompt that is held out."])]


# --- filters ---


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"min_chars": 6}, "short", "below min_chars=6"),
        ({"max_chars": 4}, "short", "above max_chars=4"),
        ({"min_words": 3}, "two words", "below min_words=3"),
        ({"max_words": 1}, "two words", "above max_words=1"),
        ({"min_chars": 5, "max_chars": 5, "min_words": 1, "max_words": 1}, "short", ""),
        ({}, "x" * 1_000_000, "above max_chars=200000"),
    ],
)
def test_length_limits_are_inclusive_and_a_megabyte_never_reaches_the_tokenizer(
    fields: dict[str, Any], text: str, reason: str
) -> None:
    assert RowFilter(PromptSourceConfig(kind="jsonl", **fields), "train").unwanted(user(text)) == reason


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Please explain in two sentences how a heat pump warms a house in winter.", True),
        ("Bitte erkläre in zwei Sätzen, wie eine Wärmepumpe im Winter ein Haus heizt.", False),
        ("请用两句话解释热泵在冬天如何给房子供暖。请写得简单一些,让孩子也能听懂。", False),
        ("3 + 4 = ?", True),  # too short to tell
    ],
)
def test_the_language_filter_keeps_what_it_should_and_what_it_cannot_tell(text: str, kept: bool) -> None:
    pytest.importorskip("py3langid")
    row_filter = RowFilter(PromptSourceConfig(kind="jsonl", languages=["en"]), "train")
    assert row_filter.unwanted(user(text)) == ("" if kept else "language not in en")


def test_a_column_chooses_rows_and_filtered_rows_are_counted_apart_from_faulty_ones(tmp_path: Path) -> None:
    rows = [{"prompt": f"Prompt {i}", "language": "English" if i % 4 else "German", "ok": i < 9} for i in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"language": ["English"], "ok": ["True"]}
    source = PromptSourceConfig(kind="jsonl", path=str(path), prompt_column="prompt", where=where)
    _, report = load_prompts([source], max_rejected_share=0.0)
    assert report.sources[0].filtered == {"language not in English": 3, "ok not in True": 3}
    assert report.sources[0].kept == 6
    source.where = {"langauge": ["English"]}
    with pytest.raises(ConfigError, match="no column 'langauge', which where names; there are: language, ok, prompt"):
        load_prompts([source])
    source.where = {"language": ["Dutch"]}
    with pytest.raises(ConfigError, match=r"no row is left.*12 filtered.*Loosen its filters"):
        load_prompts([source])


def test_too_few_rows_for_a_hold_out_share_are_told_to_raise_the_share(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Prompt {i}"}) + "\n" for i in range(12)))
    source = PromptSourceConfig(kind="jsonl", path=str(path), prompt_column="prompt", holdout_share=1e-9)
    with pytest.raises(ConfigError, match="no row is left.*Give both sides a larger holdout_share"):
        load_prompts([source], split="holdout")


# --- the hash split ---


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95])
def test_the_split_is_disjoint_complete_and_near_its_share(share: float) -> None:
    number = 12_501
    conversations = [user(f"Question number {i}") for i in range(number)]
    train, holdout = (
        RowFilter(PromptSourceConfig(kind="jsonl", holdout_share=share), split) for split in ("train", "holdout")
    )
    sides = [(not train.unwanted(entry), not holdout.unwanted(entry)) for entry in conversations]
    assert all(in_train != in_holdout_too for in_train, in_holdout_too in sides)
    found = sum(in_holdout_too for _, in_holdout_too in sides) / number
    assert abs(found - share) < 4 * (share * (1 - share) / number) ** 0.5  # four standard errors


def test_a_growing_share_only_adds_to_the_holdout() -> None:
    conversations = [user(f"Question number {i}") for i in range(300)]
    sides = [[in_holdout(entry, share) for entry in conversations] for share in (0.1, 0.3)]
    assert all(large or not small for small, large in zip(*sides, strict=True))


def test_all_rows_of_one_conversation_fall_on_one_side() -> None:
    for i in range(50):
        first = user(f"Question number {i}?")
        longer = [{"role": "system", "content": "Hi"}, *first, {"role": "assistant", "content": "A"}, *user("And then")]
        assert in_holdout(first, 0.5) == in_holdout(longer, 0.5) == in_holdout(user(f"question NUMBER {i}"), 0.5)


def test_one_source_gives_both_sides_of_a_plan_whatever_the_order_of_its_rows(tmp_path: Path) -> None:
    texts = [f"Question number {i}" for i in range(400)]
    plans = []
    for name in ("given", "shuffled"):
        source = write(tmp_path / f"{name}.jsonl", texts, holdout_share=0.2)
        source.name = "same"
        plans.append(make_prompts(data([source], [source])))
        random.Random(1).shuffle(texts)
    assert plans[0].train == plans[1].train
    assert plans[0].holdout == plans[1].holdout
    assert len(plans[0].train) + len(plans[0].holdout) == 400
    assert plans[0].report.sources[0].filtered == {"on the other side of the split": len(plans[0].holdout)}


def test_two_shares_for_the_same_rows_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["One"], holdout_share=0.2)
    other = write(tmp_path / "a.jsonl", ["One"], holdout_share=0.1)
    with pytest.raises(ConfigError, match=r"holdout_share=0\.2: data\.holdout_prompts splits the same rows at 0\.1"):
        data([source], [other])


# --- caps and shares ---


def test_two_sources_of_a_hundred_both_stand_under_a_cap_of_fifty_and_a_seed_repeats_it(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(100)]) for name in ("apples", "pears")]
    plans = [make_prompts(data(order, held_out(tmp_path), max_prompts=50)) for order in (sources, sources[::-1])]
    assert plans[0].train == plans[1].train
    assert len(plans[0].train) == 50
    number = Counter(entry.source for entry in plans[0].train)
    assert min(number.values()) > 10 and set(number) == {"apples", "pears"}
    assert sum(counts.unused for counts in plans[0].report.sources) == 150


def test_a_cap_keeps_the_same_prompts_whatever_the_order_and_the_copies_of_its_rows(tmp_path: Path) -> None:
    texts = [f"Prompt number {i}" for i in range(60)]
    copies = [text.upper() for text in texts[::3]] + [f" {text} " for text in texts[::4]]
    kept, numbers = [], []
    for seed in range(5):
        rows = texts + copies
        random.Random(seed).shuffle(rows)
        source = write(tmp_path / "rows.jsonl", rows, max_prompts=20)
        records, report = load_prompts([source], seed=7)
        kept.append([entry.prompt_id for entry in records])
        counts = report.sources[0]
        numbers.append((counts.rows, counts.kept, counts.duplicates, counts.capped))
    assert len({tuple(ids) for ids in kept}) == 1
    assert len(set(numbers)) == 1
    assert numbers[0][:2] == (95, 20)


def test_weights_give_the_shares_of_the_total_and_a_short_source_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    sizes = {"a": (90, 1.0), "b": (90, 3.0), "c": (5, 2.0)}
    sources = [
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(size)], weight=weight)
        for name, (size, weight) in sizes.items()
    ]
    plan = make_prompts(data(sources, held_out(tmp_path), max_prompts=45))
    assert Counter(entry.source for entry in plan.train) == {"a": 10, "b": 30, "c": 5}
    with pytest.raises(ConfigError, match=r"weight=\[1\.0, 3\.0, 2\.0\]: weights share out data\.max_prompts"):
        data(sources, held_out(tmp_path))
    with pytest.raises(ConfigError, match=r"holdout_prompts\[0\]\.weight=1\.0: only training prompts"):
        data(held_out(tmp_path), sources[:1])
    with pytest.raises(ConfigError, match=r"evaluation_prompts\[0\]\.holdout_share=0\.5: all prompts of a benchmark"):
        data(held_out(tmp_path), [], evaluation_prompts=[write(tmp_path / "e.jsonl", ["A"], holdout_share=0.5)])


def test_shares_add_up_never_exceed_what_is_there_and_stay_within_one_of_the_proportion() -> None:
    assert share_out(10, [100, 100, 100], [1.4, 1.0, 1.0]) == [4, 3, 3]  # the rest goes to 2.94, not to 4.12
    rng = random.Random(0)
    for _ in range(500):
        number = rng.randint(1, 6)
        available = [rng.choice([0, 1, 7, 50, 1000]) for _ in range(number)]
        weights = [rng.choice([0.1, 1.0, 2.5, 7.0]) for _ in range(number)]
        total = rng.randint(1, 1500)
        given = share_out(total, available, weights)
        assert sum(given) == min(total, sum(available))
        assert all(0 <= got <= there for got, there in zip(given, available, strict=True))
        open_rates = [given[i] / weights[i] for i in range(number) if given[i] < available[i]]
        full_rates = [given[i] / weights[i] for i in range(number) if given[i] == available[i]]
        slack = 2 / min(weights) + 1e-9  # rounding to whole prompts
        assert not open_rates or max(open_rates) - min(open_rates) <= slack
        assert not open_rates or not full_rates or max(full_rates) <= min(open_rates) + slack


# --- near-duplicates, evaluation prompts, and the sum of it all ---


def long_text(seed: int, number: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(WORDS)}{rng.randint(0, 99)}" for _ in range(number))


def test_a_long_copy_with_one_word_changed_goes_and_short_or_templated_prompts_stay() -> None:
    text = long_text(1)
    near = text.replace(text.split()[30], "changed")
    far = " ".join("changed" if i % 6 == 0 else word for i, word in enumerate(text.split()))
    stay = [text, far, long_text(2), "What is 3 + 4?", "What is 3 - 4?", "What is 3 + 5?", "Name a river in France."]
    kept, dropped = drop_near_duplicates([record(entry) for entry in [*stay, near]], 0.8)
    assert [entry.messages for entry in kept] == [user(entry) for entry in stay]
    assert [(gone.messages, like) for gone, like in dropped] == [(user(near), record(text).prompt_id)]


def test_the_same_text_with_other_tools_is_no_near_duplicate() -> None:
    tools = [[{"type": "function", "function": {"name": name}}] for name in ("add", "find")]
    assert drop_near_duplicates([record(long_text(1), entry) for entry in tools], 0.8)[1] == []


def test_which_of_two_near_duplicates_stays_does_not_depend_on_the_order(tmp_path: Path) -> None:
    text = long_text(1)
    texts = [text.replace(text.split()[i], "changed") for i in range(20, 40, 2)] + [long_text(i) for i in range(2, 9)]
    plans = []
    for _ in range(2):
        plans.append(make_prompts(data([write(tmp_path / "rows.jsonl", texts)], held_out(tmp_path))))
        texts.reverse()
    assert plans[0].train == plans[1].train
    assert len(plans[0].train) < len(texts) - 5
    assert plans[0].report.sources[0].near_duplicates == len(texts) - len(plans[0].train)
    off = make_prompts(data([write(tmp_path / "rows.jsonl", texts)], held_out(tmp_path), near_duplicates=None))
    assert len(off.train) == len(texts)


def test_evaluation_prompts_stay_out_of_training_and_the_report_says_which_set_was_met(tmp_path: Path) -> None:
    benchmark = "Claire makes a three egg omelet every morning for breakfast, so how many dozens in four weeks?"
    held = "Name the seven colours of the rainbow in the order in which they appear."
    train = write(
        tmp_path / "train.jsonl", [f"Question number {i}" for i in range(5)] + [benchmark.upper(), f"Please: {held}"]
    )
    evaluation = write(tmp_path / "gsm8k.jsonl", [benchmark])
    plan = make_prompts(data([train], [write(tmp_path / "held.jsonl", [held])], evaluation_prompts=[evaluation]))
    assert len(plan.train) == 5
    assert {(entry.reference, entry.rule) for entry in plan.report.removed} == {
        ("hold-out", "contains a hold-out turn"),
        ("evaluation prompts", "same user turn"),
    }
    assert plan.report.totals() == {"train": 5, "holdout": 1, "evaluation": 1}
    assert "overlap with the evaluation prompts, same user turn: 1 removed" in plan.report.lines()
    assert [entry.split for entry in plan.holdout] == ["holdout"]


def test_a_source_with_every_fate_adds_up_and_its_report_survives_json(tmp_path: Path) -> None:
    held = "Name the seven colours of the rainbow in the order in which they appear."
    text = long_text(1)
    rows = [f"Question number {i}" for i in range(40)] + ["QUESTION number 1", "x", held, text, f"{text} more"]
    first = write(tmp_path / "first.jsonl", ["question NUMBER 2"])
    second = write(tmp_path / "second.jsonl", rows, min_chars=2, max_prompts=41)
    with open(second.path, "a") as file:
        file.write("{broken\n")
    config = data([first, second], [write(tmp_path / "held.jsonl", [held])], max_prompts=30)
    report = make_prompts(config).report
    counts = report.sources[1]
    assert counts.rows == len(rows) + 1
    assert (counts.rejected.total(), counts.filtered.total(), counts.capped) == (1, 1, 1)
    assert counts.duplicates == 2  # of a row of its own and of the first source
    assert counts.kept + counts.overlap.total() + counts.near_duplicates + counts.unused == 41
    assert report.totals()["train"] == 30
    written = json.loads(json.dumps(report.to_dict()))
    assert PromptReport.from_dict(written) == report
    assert str(tmp_path) not in json.dumps(written)
