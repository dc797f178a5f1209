"""A stored plan is met again as it was; other settings, files or code, or a damaged store, lead to a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_gen import prompts
from data_gen.prompt_records import PromptPlan
from data_gen.prompt_store import PROMPTS_FILE, REPORT_FILE, plan_fingerprint, read_plan
from data_gen.prompts import plan_prompts
from dflash2_train.config import DataConfig, PromptSourceConfig, SamplingConfig

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def write(path: Path, texts: list[str]) -> PromptSourceConfig:
    rows = [{"prompt": text, "tools": TOOLS if index % 2 else None} for index, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSourceConfig(kind="jsonl", path=str(path), prompt_column="prompt", tools_column="tools")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(
        root=str(tmp_path / "run" / "data"),
        train_prompts=[write(tmp_path / "train.jsonl", [f"Übung {i}\u2028 für heute" for i in range(9)])],
        holdout_prompts=[write(tmp_path / "held.jsonl", ["An entirely different prompt."])],
        evaluation_prompts=[write(tmp_path / "eval.jsonl", ["Übung 3, für heute!"])],
        sampling=SamplingConfig(max_tokens=8, seed=3),
        max_prompt_tokens=32,
    )


def fail(config: DataConfig) -> PromptPlan:
    raise AssertionError("planned anew")


def test_a_second_start_reads_the_plan_back_whole(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_prompts(config)
    assert len(first.train) == 8
    assert {record.split for record in first.holdout} == {"holdout"}
    monkeypatch.setattr(prompts, "make_prompts", fail)
    assert plan_prompts(config) == first
    assert sorted(path.name for path in Path(config.root).iterdir()) == [PROMPTS_FILE, REPORT_FILE]


def test_the_report_on_disk_adds_up_and_names_no_folder(config: DataConfig, tmp_path: Path) -> None:
    plan_prompts(config)
    text = (Path(config.root) / REPORT_FILE).read_text()
    report = json.loads(text)
    assert report["totals"] == {"train": 8, "holdout": 1, "evaluation": 1}
    assert report["sources"][0]["overlap"] == {"evaluation prompts: same user turn": 1}
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_prompts", 5), ("near_duplicates", None), ("evaluation_prompts", []), ("max_rejected_share", 0.2)],
)
def test_another_setting_plans_anew(config: DataConfig, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_prompts(config)
    setattr(config, name, value)
    assert read_plan(config) is None
    plan_prompts(config)
    monkeypatch.setattr(prompts, "make_prompts", fail)
    plan_prompts(config)


def test_a_setting_that_does_not_shape_the_plan_leaves_it_alone(config: DataConfig) -> None:
    before = plan_fingerprint(config)
    config.max_num_seqs, config.max_prompt_tokens, config.sampling.max_tokens = 7, 99, 16
    assert plan_fingerprint(config) == before
    config.sampling.seed = 4
    assert plan_fingerprint(config) != before


def test_a_changed_file_plans_anew(config: DataConfig, tmp_path: Path) -> None:
    plan_prompts(config)
    write(tmp_path / "train.jsonl", ["Something longer than it was before", "And one more"] * 9)
    assert len(plan_prompts(config).train) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_store_plans_anew(config: DataConfig, damage: str) -> None:
    first = plan_prompts(config)
    path = Path(config.root) / PROMPTS_FILE
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-9] if damage == "cut" else content.replace(b"heute", b"jetzt", 1))
    assert read_plan(config) is None
    assert plan_prompts(config) == first


def test_a_hub_set_that_moved_on_does_not_change_a_run_that_began(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    heads = iter("ab")

    class Builder:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.hash = next(heads) * 40

        def as_streaming_dataset(self, split: str) -> list[dict[str, Any]]:
            return [{"messages": [{"role": "user", "content": f"As of {self.hash}"}]}]

    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    config.train_prompts = [
        PromptSourceConfig(kind="datasets", path="owner/name", split="train", allow_unpinned=True, license="MIT")
    ]
    first = plan_prompts(config)
    assert first.report.sources[0].revision == "a" * 40
    assert plan_prompts(config) == first
