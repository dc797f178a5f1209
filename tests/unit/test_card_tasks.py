"""Results of tasks and sweeps reach model card, provenance, comparisons and the gate, from their record alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash2_train.config import RunConfig, UserError
from dflash2_train.evaluate import cli
from dflash2_train.evaluate.commands import run_command
from dflash2_train.export.commands import dispatch
from dflash2_train.export.hf import export_hf
from dflash2_train.export.record import read_record
from dflash2_train.export.rewrite import add_found_reports, rewrite_papers
from dflash2_train.provenance import sha256_file
from tests.cases import RECORD, card_of, edit_json, make_drafter, make_target_info
from tests.grid_case import make_grid_case, write_rows
from tests.reports import MEASURED, write_report

RATES = {3: (0.5, 0.25, 0.0), 2: (0.5, 0.25), 1: (0.5,)}


@pytest.fixture
def folder(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "out"))


def cell(task: str, drafted: int | None, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A task's cell: 100 rounds in which half accept the first draft; plain decoding without a K."""
    counts = [int(100 * rate) for rate in RATES[drafted or 3]]
    acceptance = {
        "rounds": 100,
        "proposed": 100 * (drafted or 0),
        "accepted": sum(counts),
        "accepted_per_position": counts,
    }
    found = {
        "task": task,
        "category": None,
        "method": "drafter" if drafted else "autoregressive",
        "num_drafted": drafted,
        "concurrency": 1,
        "temperature": temperature,
        "acceptance": acceptance if drafted else None,
        "requests": {"asked": 5, "answered": 5, "too_long": 0, "retried": 0, "failed": {}},
        "prompt_tokens": 50,
        "output_tokens": 105,
        "seconds": 12.0,
        # 100 tokens after the first ones: in 10 s plainly, in 8 s with drafts
        "seconds_by_part": {
            "prefill": 2.0,
            "context": 0.0,
            "draft": 1.0 if drafted else 0.0,
            "verify": 7.0,
            "sample": 0,
        }
        if drafted
        else {"prefill": 2.0, "context": 0.0, "draft": 0.0, "verify": 10.0, "sample": 0.0},
        "prompts_sha256": task[0] * 64,
        "prefix_hit_rate": None,
        "per_request": None,
        "labels": [],
    }
    return {**found, **changes}


def tasks_report(path: Path, folder: Path, cells: list[dict[str, Any]], **protocol: Any) -> Path:
    """``report.json`` of tasks and sweeps as dflash2-eval writes it, about the drafter in ``folder``."""
    drafted = sorted({one["num_drafted"] for one in cells if one["num_drafted"]})
    covered = {
        "experiment": "tiny",
        "mode": "runner",
        "engine": "built-in runner",
        "hardware": "a processor, 2 cores",
        "dtype": "float32",
        "device": "cpu",
        "num_drafted": drafted[0] if len(drafted) == 1 else None,
        "draft_lengths": drafted,
        "temperatures": sorted({one["temperature"] for one in cells}),
        "concurrency": 1,
        "max_new_tokens": 64,
        "drafter_sha256": {name: sha256_file(folder / name) for name in MEASURED},
        **protocol,
    }
    report = {
        "schema_version": 1,
        "kind": "runner",
        "label": "runner",
        "protocol": covered,
        "cells": cells,
        "labels": ["warm-up is in no figure", "greedy equality: 10 of 10 answers equal plain greedy decoding"],
        "equality": {"rule": "token for token", "prompts_checked": 10, "prompts_equal": 10, "failures": []},
        "run": {"evaluation": {"time_utc": "2026-01-04T00:00:00+00:00", "config": {"run_dir": "/home/somebody/x"}}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report))
    return path


def test_tasks_of_one_evaluation_go_from_the_runner_to_card_provenance_comparison_and_gate(
    tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash2_train.evaluate.plots.draw_runs", lambda runs: None)
    config = make_grid_case(tiny_config, tmp_path)
    folder = Path(config.export.output_dir)
    shutil.rmtree(folder)
    export_hf(make_drafter(config), config, make_target_info(config), folder, run_record=RECORD)
    long = {"id": "long", "prompt": " ".join(["w1"] * 125)}
    config.eval.tasks[0].path = write_rows(tmp_path / "one.jsonl", [{"id": "a", "prompt": "w1 w9"}, long])
    assert cli.evaluate(config) == 0
    measured = Path(config.eval.output_dir) / "runner" / "report.json"
    cells = [one for one in json.loads(measured.read_text())["cells"] if one["method"] == "drafter"]
    (name,) = add_found_reports(config, folder)
    card, text = card_of(folder), (folder / "PROVENANCE.txt").read_text()
    assert read_record(folder)["evaluations"][0]["report_sha256"] == sha256_file(measured)
    for one in cells:
        counts = one["acceptance"]
        figure = f"{1 + counts['accepted'] / counts['rounds']:.3f}"
        row = f"| {one['task']} | {one['temperature']:g} | {one['num_drafted']} | 1 | {one['requests']['answered']} |"
        assert f"{row} {figure} ({counts['accepted'] + counts['rounds']} / {counts['rounds']} rounds)" in card
        assert f"prompts of {one['task']}: sha256 {one['prompts_sha256']}" in text
    assert "Up to 1 prompts of a pass do not fit the context and are in none of these figures." in card
    assert "1, 3 tokens were drafted a round; the drafter was trained for 3." in card
    assert f"{name} (runner): acceptance length one (temperature 0.0, K=1)" in text
    assert dispatch(["verify-provenance", str(folder)]) == 0
    capsys.readouterr()
    assert run_command(["compare", str(measured.parent), str(measured.parent)]) == 0
    assert "two, T=1, K=3" in capsys.readouterr().out
    assert run_command(["gate", str(measured), "--baseline", str(measured)]) == 0


def test_the_card_shows_each_task_by_k_and_says_what_was_not_measured(folder: Path, tmp_path: Path) -> None:
    cells = [cell("maths", k) for k in (None, 1, 3)] + [cell("code", 3), cell("code", 3, temperature=1.0)]
    report = tasks_report(tmp_path / "report.json", folder, cells)
    holdout = write_report(tmp_path / "holdout.json", folder)
    assert dispatch(["card", str(folder), "--evaluation", str(report), str(holdout)]) == 0
    card = card_of(folder)
    assert (
        "| maths | 0 | 3 | 1 | 5 | 1.750 (175 / 100 rounds) | not measured | 25.0% (75 of 300) | 12.5 | 1.25x |" in card
    )
    assert "| maths | 0 | 1 | 1 | 5 | 1.500 (150 / 100 rounds)" in card
    assert (
        "| code | 1 | 3 | 1 | 5 | 1.750 (175 / 100 rounds) | not measured | 25.0% (75 of 300) | 12.5 | not measured |"
        in card
    )
    assert "| acceptance length, K=3 | greedy, 1 in flight | T=1, 1 in flight |" in card
    assert "| maths | 1.750 | not measured |\n| code | 1.750 | 1.750 |" in card
    assert "| built-in runner | 1.750 (maths, 1 in flight), 1.750 (code, greedy, 1 in flight)," in card
    assert "of all rounds | 1 | 2 | 3 |\n|---|---|---|---|\n| maths, 1 in flight | 50.0% | 25.0% | 0.0% |" in card
    assert "Acceptance by position is shown for the largest K." in card
    assert card.count("10 of 10 answers") == 1, "said once"
    assert "- warm-up is in no figure" in card
    assert dispatch(["verify-provenance", str(folder)]) == 0


def test_measurements_of_other_prompts_stand_beside_each_other_and_of_the_same_replace(
    folder: Path, tmp_path: Path
) -> None:
    maths, code = ([cell(task, 3)] for task in ("maths", "code"))
    rewrite_papers(folder, [tasks_report(tmp_path / "a.json", folder, maths)])
    rewrite_papers(folder, [tasks_report(tmp_path / "b.json", folder, code)])
    assert len(read_record(folder)["evaluations"]) == 2, "the same settings, another task"
    (name,) = rewrite_papers(folder, [tasks_report(tmp_path / "c.json", folder, [cell("maths", 3, seconds=9.0)])])
    files = [entry["file"] for entry in read_record(folder)["evaluations"]]
    assert len(files) == 2 and files[-1] == name


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ([cell("maths", None)], "holds no measurement of a drafter"),
        ([cell("maths", 3, method="mtp")], "measured mtp, not this drafter"),
        ([cell("maths", 3, requests={})], "a field is missing"),
        ([{**cell("maths", 3), "acceptance": {**cell("maths", 3)["acceptance"], "accepted": 80}}], "contradict"),
    ],
)
def test_a_report_of_tasks_that_cannot_be_believed_changes_nothing(
    folder: Path, tmp_path: Path, cells: list[dict[str, Any]], text: str
) -> None:
    before = card_of(folder)
    with pytest.raises(UserError, match=text):
        rewrite_papers(folder, [tasks_report(tmp_path / "report.json", folder, cells)])
    assert card_of(folder) == before


def test_figures_that_were_taken_over_by_an_earlier_version_still_verify_and_changed_ones_do_not(
    folder: Path, tmp_path: Path
) -> None:
    from dflash2_train.export.evaluations import holds_numbers, read_report, summarise

    path = tasks_report(tmp_path / "report.json", folder, [cell("maths", 3)])
    summary = summarise(read_report(path), path)
    later = ("task", "num_drafted", "prompts_sha256", "speedup", "too_long")
    earlier = {key: value for key, value in summary["passes"][0].items() if key not in later}
    assert holds_numbers(summary, {"protocol": {"mode": "runner"}, "passes": [earlier]})
    assert not holds_numbers(summary, {"protocol": {}, "passes": [{**earlier, "rounds": 99}]})
    assert not holds_numbers(summary, {"protocol": {"unknown": 1}, "passes": [earlier]})
    assert not holds_numbers(summary, {"protocol": {}, "passes": [earlier, earlier]})


def test_the_gate_refuses_runs_of_which_one_left_long_prompts_out(folder: Path, tmp_path: Path) -> None:
    whole = tasks_report(tmp_path / "whole.json", folder, [cell("maths", 3)])
    part = tasks_report(tmp_path / "part.json", folder, [cell("maths", 3)])
    edit_json(part, cells=[cell("maths", 3, requests={"asked": 5, "answered": 5, "too_long": 2})])
    assert run_command(["gate", str(part), "--baseline", str(whole)]) == 2
    assert run_command(["gate", str(part), "--baseline", str(whole), "--allow-unlike"]) == 0


def test_the_gate_names_the_task_whose_acceptance_dropped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tasks_report(tmp_path / "base.json", folder, [cell("maths", 3), cell("code", 3)])
    poor = {"rounds": 100, "proposed": 300, "accepted": 20, "accepted_per_position": [20, 0, 0]}
    worse = tasks_report(tmp_path / "worse.json", folder, [cell("maths", 3), cell("code", 3, acceptance=poor)])
    assert run_command(["gate", str(worse), "--baseline", str(base)]) == 1
    told = capsys.readouterr().out
    assert "passed maths" in told and "FAILED code" in told and "1.750 -> 1.200" in told


def test_the_doctor_reads_what_was_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = rewrite_papers(folder, [tasks_report(tmp_path / "good.json", folder, [cell("maths", 3)])])
    assert dispatch(["doctor", str(folder)]) == 0
    assert "evaluation-" not in capsys.readouterr().out
    report = tasks_report(tmp_path / "bad.json", folder, [cell("code", 3)])
    edit_json(report, equality__failures=[{"prompt_id": "one"}, {"prompt_id": "two"}])
    rewrite_papers(folder, [report])
    assert dispatch(["doctor", str(folder)]) == 0
    assert "2 of 10 answers were not" in " ".join(capsys.readouterr().out.split())
    edit_json(folder / "run.json", evaluations=[{**read_record(folder)["evaluations"][0], "labels": []}])
    better = read_record(folder)["evaluations"]
    better[0]["passes"][0]["committed"] = 999
    edit_json(folder / "run.json", evaluations=better)
    assert dispatch(["doctor", str(folder)]) == 1
    assert f"{name}: other numbers" in " ".join(capsys.readouterr().out.split())
