"""The model card says what was recorded and measured, and nothing else; adding an evaluation keeps every hash true."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash2_train.config import PromptSourceConfig, RunConfig, UserError
from dflash2_train.export import card_command
from dflash2_train.export.card import front_matter
from dflash2_train.export.commands import dispatch
from dflash2_train.export.hf import export_hf
from dflash2_train.export.record import changed_files, read_record, target_record
from dflash2_train.export.rewrite import add_found_reports, rewrite_papers
from dflash2_train.provenance import sha256_file
from tests.cases import RECORD, card_of, edit_json, make_drafter, make_target_info
from tests.reports import write_report


@pytest.fixture
def folder(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "out"))


def header(card: str) -> dict[str, Any]:
    """The card's metadata as the Hub parses it."""
    values: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return values


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in folder.iterdir()}


def test_each_server_gets_its_own_count_and_flags(folder: Path) -> None:
    card = card_of(folder)
    assert '--speculative-config \'{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": 3}\'' in card
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path THIS_FOLDER" in card
    assert "--speculative-num-draft-tokens 4" in card
    assert "--spec-type draft-dflash --spec-draft-model drafter.gguf --spec-draft-n-max 3" in card


def test_what_was_not_measured_or_recorded_is_said_so(folder: Path) -> None:
    card = card_of(folder)
    for name in ("built-in runner", "served by vLLM", "served by SGLang", "served by llama.cpp"):
        assert f"| {name} | not measured |" in card
    assert "Nothing has been measured with these files yet" in card
    assert "| wall time | not recorded |" in card
    assert "| steps | not recorded |" in card


def test_the_metadata_names_base_model_data_sets_and_licence(tiny_config: RunConfig, tmp_path: Path) -> None:
    hub = PromptSourceConfig(kind="datasets", path="owner/prompts", split="train", revision="0" * 40, license="mit")
    local = PromptSourceConfig(kind="datasets", path=str(tmp_path), split="train", license="mit")
    tiny_config.data.train_prompts = [hub, local]
    tiny_config.target.name = "owner/Big-Model"
    tiny_config.target.license = "My Licence v2"
    info = make_target_info(tiny_config)
    object.__setattr__(info, "revision", "f" * 40)
    out = export_hf(make_drafter(tiny_config), tiny_config, info, tmp_path / "out", run_record=RECORD)
    found = header(card_of(out))
    assert found["base_model"] == "owner/Big-Model"
    assert found["base_model_relation"] == "adapter"
    assert found["datasets"] == ["owner/prompts"]
    assert (found["license"], found["license_name"]) == ("other", "my-licence-v2")
    assert found["pipeline_tag"] == "text-generation"
    assert "speculative-decoding" in found["tags"]
    assert "vllm serve owner/Big-Model " in card_of(out)


def test_a_local_target_has_no_base_model_unless_the_configuration_names_one(tiny_config: RunConfig) -> None:
    info = make_target_info(tiny_config)
    tiny_config.target.name = "/models/secret/Big"
    record = {"target": target_record(tiny_config, info), "config": {}}
    assert not any(line.startswith("base_model") for line in front_matter(record))
    tiny_config.export.base_model = "owner/Big"
    record = {"target": target_record(tiny_config, info), "config": {}}
    assert "base_model: owner/Big" in front_matter(record)
    assert "secret" not in json.dumps(record)


def test_metadata_that_yaml_would_misread_is_quoted(tiny_config: RunConfig) -> None:
    info = make_target_info(tiny_config)
    tiny_config.export.base_model = "no: #1"
    record = {"target": target_record(tiny_config, info), "config": {}}
    assert yaml.safe_load("\n".join(front_matter(record)[1:-1]))["base_model"] == "no: #1"


def test_an_added_evaluation_is_shown_with_counts_positions_and_limits(folder: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "eval" / "report.json", folder)
    assert dispatch(["card", str(folder), "--evaluation", str(report)]) == 0
    card = card_of(folder)
    assert "| built-in runner | 2.667 (greedy, 1 in flight) |" in card  # (0 + 3 + 2 accepted + 3 rounds) / 3
    assert "2.667 (16 / 6 rounds) | 2.667 | 55.6% (10 of 18)" in card
    assert "of all rounds | 1 | 2 | 3 |\n|---|---|---|---|\n| greedy, 1 in flight | 66.7% | 66.7% | 33.3% |" in card
    assert (
        "given all before it | 1 | 2 | 3 |\n|---|---|---|---|\n| greedy, 1 in flight | 66.7% | 100.0% | 50.0% |" in card
    )
    assert "Only 2 prompts" in card
    assert "equal to plain decoding on 2 of 2 answers" in card
    assert "Nothing has been measured" not in card
    assert "| served by vLLM | not measured |" in card


def served(path: Path, folder: Path, **changes: Any) -> Path:
    """A served run of two cells as dflash2-eval writes it."""
    cell = {
        "task": "gsm8k",
        "category": None,
        "method": "drafter",
        "concurrency": 8,
        "temperature": 0.0,
        "acceptance": {"rounds": 100, "proposed": 300, "accepted": 150, "accepted_per_position": [80, 50, 20]},
        "requests": {"asked": 130, "answered": 128, "too_long": 0, "retried": 0, "failed": {"timeout": 2}},
        "output_tokens": 5000,
        "seconds": 10.0,
        "per_request": [[0, 10, 10, 5], [1, 10, 30, 5]],
        "labels": [],
    }
    protocol = {
        "mode": "server",
        "engine": "vllm 0.32.0",
        "hardware": "4x B300",
        "drafter_sha256": sha256_file(folder / "model.safetensors"),
        "num_drafted": 3,
        "max_new_tokens": 4096,
        "enable_thinking": None,
        "template": "client",
        "prefix_caching": "on, kept cold",
        "concurrency": [8, 32],
    }
    report = {
        "schema_version": 1,
        "kind": "server",
        "label": "ours",
        "protocol": {**protocol, **changes.get("protocol", {})},
        "cells": [{**cell, **changes.get("cell", {})}, {**cell, "category": "hard", "concurrency": 32}],
        "labels": ["hardware as configured"],
        "run": {"evaluation": {"time_utc": "2026-01-03T00:00:00+00:00"}, "server": {}},
    }
    path.write_text(json.dumps(report))
    return path


def test_a_served_run_stands_beside_the_runners_by_task_and_concurrency(folder: Path, tmp_path: Path) -> None:
    rewrite_papers(folder, [write_report(tmp_path / "a.json", folder), served(tmp_path / "b.json", folder)])
    card = card_of(folder)
    assert "| served by vLLM | 2.500 (gsm8k, 8 in flight), 2.500 (gsm8k / hard, 32 in flight) |" in card
    assert "### Served by vLLM: vllm 0.32.0, 4x B300" in card
    assert (
        "| gsm8k | 0 | 3 | 8 | 128 | 2.500 (250 / 100 rounds) | 3.000 | 50.0% (150 of 300) | 500.0 | not measured |"
        in card
    )
    assert "| gsm8k, 8 in flight | 80.0% | 50.0% | 20.0% |" in card
    assert "| gsm8k, 8 in flight | 80.0% | 62.5% | 40.0% |" in card
    assert "**4 requests failed**" in card
    assert "does not tell which drafter it loaded" in card
    assert "- hardware as configured" in card
    assert "| built-in runner | 2.667" in card
    assert dispatch(["verify-provenance", str(folder)]) == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protocol": {"drafter_sha256": "0" * 64}}, "another drafter"),
        ({"protocol": {"drafter_sha256": None}}, "does not say which drafter"),
        ({"cell": {"method": "mtp"}}, "measured mtp, not this drafter"),
        ({"cell": {"acceptance": None}}, "not this drafter"),
        (
            {"cell": {"acceptance": {"rounds": 1, "proposed": 3, "accepted": 3, "accepted_per_position": [1, 1, 0]}}},
            "contradict",
        ),
        ({"cell": {"requests": {}}}, "a field is missing"),
    ],
)
def test_a_served_run_of_something_else_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        rewrite_papers(folder, [served(tmp_path / "b.json", folder, **changes)])


def test_after_a_rewrite_every_hash_holds_and_the_weights_are_the_same_file(folder: Path, tmp_path: Path) -> None:
    before = (folder / "model.safetensors").stat()
    report = write_report(tmp_path / "report.json", folder)
    (name,) = rewrite_papers(folder, [report])
    record = read_record(folder)
    assert changed_files(folder, record) == []
    assert record["files"][name] == sha256_file(folder / name)
    assert record["evaluations"][0]["report_sha256"] == sha256_file(report)
    assert (folder / "model.safetensors").stat().st_ino == before.st_ino
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    assert dispatch(["verify-provenance", str(folder)]) == 0


def test_the_carried_report_has_the_counts_and_no_path_of_the_machine(folder: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", folder)
    (name,) = rewrite_papers(folder, [report])
    carried, given = json.loads((folder / name).read_text()), json.loads(report.read_text())
    assert carried["greedy"] == given["greedy"]
    assert "somebody" not in (folder / name).read_text()


def test_the_same_report_is_taken_once_and_a_newer_one_of_the_same_protocol_replaces_it(
    folder: Path, tmp_path: Path
) -> None:
    report = write_report(tmp_path / "report.json", folder)
    (old,) = rewrite_papers(folder, [report])
    assert rewrite_papers(folder, [report]) == []
    (new,) = rewrite_papers(folder, [write_report(tmp_path / "later.json", folder, accepted=(1, 1))])
    assert not (folder / old).exists()
    assert [entry["file"] for entry in read_record(folder)["evaluations"]] == [new]
    rewrite_papers(folder, [write_report(tmp_path / "other.json", folder, max_new_tokens=99)])
    assert len(read_record(folder)["evaluations"]) == 2


def test_failed_equality_and_another_thinking_mode_are_not_hidden(tiny_config: RunConfig, tmp_path: Path) -> None:
    record = {**RECORD, "source": {"training": {"cache": {"enable_thinking": True}}}}
    info = make_target_info(tiny_config)
    out = export_hf(make_drafter(tiny_config), tiny_config, info, tmp_path / "out", run_record=record)
    rewrite_papers(out, [write_report(tmp_path / "report.json", out, equal=False, enable_thinking=False)])
    assert "**2 failed**" in card_of(out)
    assert "Measured with enable_thinking=False, but trained on text with True" in card_of(out)


def damage(report: Path, kind: str) -> None:
    if kind == "missing":
        report.unlink()
    elif kind == "no json":
        report.write_text("# a report")
    elif kind == "a list":
        report.write_text("[]")
    elif kind == "version":
        edit_json(report, schema_version=99)
    elif kind == "no hashes":
        edit_json(report, protocol__drafter_sha256=...)
    elif kind == "other weights":
        edit_json(report, **{"protocol__drafter_sha256": {"model.safetensors": "0" * 64}})
    elif kind == "better length":
        edit_json(report, greedy__rates__acceptance_length_pooled=7.0)
    elif kind == "better counts":
        edit_json(report, greedy__counts__accepted=17)
    else:
        edit_json(report, greedy__counts=...)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "no such file"),
        ("no json", "not readable as JSON"),
        ("a list", "not a report of dflash2-eval"),
        ("version", "schema_version"),
        ("no hashes", "does not say which drafter"),
        ("other weights", "another drafter; model.safetensors differ"),
        ("better length", "contradict each other"),
        ("better counts", "contradict each other"),
        ("no counts", "a field is missing"),
    ],
)
def test_a_report_that_is_none_of_these_files_or_was_edited_changes_nothing(
    folder: Path, tmp_path: Path, kind: str, text: str
) -> None:
    report = write_report(tmp_path / "report.json", folder)
    damage(report, kind)
    before = hashes(folder)
    with pytest.raises(UserError, match=text):
        rewrite_papers(folder, [report])
    assert hashes(folder) == before
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_papers_of_an_edited_drafter_are_not_renewed(folder: Path) -> None:
    edit_json(folder / "config.json", is_causal=True)
    with pytest.raises(UserError, match=r"config\.json changed after the export"):
        rewrite_papers(folder, [])


def test_a_crash_between_the_two_renames_is_mended_by_the_next_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = write_report(tmp_path / "report.json", folder)
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    assert len(rewrite_papers(folder, [report])) == 1


def test_a_file_system_without_hard_links_gets_copies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    report = write_report(tmp_path / "report.json", folder)
    assert len(rewrite_papers(folder, [report])) == 1
    assert changed_files(folder, read_record(folder)) == []


def test_the_runs_own_report_is_found_and_one_of_other_weights_is_passed_over(
    tiny_config: RunConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert add_found_reports(tiny_config, folder) == []
    report = write_report(Path(tiny_config.eval.output_dir) / "report.json", folder)
    other = Path(tiny_config.eval.output_dir) / "mt4096" / "server" / "plain"
    other.mkdir(parents=True)
    served(other / "report.json", folder, protocol={"drafter_sha256": None})  # a baseline
    assert len(add_found_reports(tiny_config, folder)) == 1
    stamp = (folder / "run.json").stat().st_mtime_ns
    assert add_found_reports(tiny_config, folder) == []  # known already: nothing is touched
    assert (folder / "run.json").stat().st_mtime_ns == stamp
    edit_json(report, protocol__drafter_sha256={"model.safetensors": "0" * 64})
    before = hashes(folder)
    assert add_found_reports(tiny_config, folder) == []
    assert hashes(folder) == before


def test_served_runs_of_the_experiment_are_found_too(tiny_config: RunConfig, folder: Path) -> None:
    place = Path(tiny_config.eval.output_dir) / "server" / "ours"
    place.mkdir(parents=True)
    served(place / "report.json", folder)
    assert len(add_found_reports(tiny_config, folder)) == 1
    assert "| served by vLLM | 2.500" in card_of(folder)


def test_the_serving_commands_name_the_repository_once_it_is_known(folder: Path) -> None:
    assert card_command.main([str(folder), "--repo-id", "owner/tiny-DFlash2"]) == 0
    assert '"model": "owner/tiny-DFlash2"' in card_of(folder)
    assert "THIS_FOLDER --speculative" not in card_of(folder)
