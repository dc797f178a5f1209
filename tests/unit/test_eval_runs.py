"""Results in one form: reading, comparing, the gate, and what the reports show of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash2_train.config import GateConfig, RunConfig, UserError
from dflash2_train.evaluate import cli
from dflash2_train.evaluate.commands import run_command
from dflash2_train.evaluate.compare import UnlikeRunsError, compare
from dflash2_train.evaluate.gate import judge
from dflash2_train.evaluate.html import to_html
from dflash2_train.evaluate.intervals import PAIRED, POOLED_ROUNDS, PROMPTS, difference_interval, length_interval
from dflash2_train.evaluate.publish import print_tables, runs_markdown, write_runs_report
from dflash2_train.evaluate.readers import UnreadableRunError, read_run
from dflash2_train.evaluate.runs import Acceptance, Cell, EvalRun, RequestCounts, pool
from dflash2_train.evaluate.tables import Table, tables_of
from dflash2_train.export import formats
from dflash2_train.train import export_result

REFERENCE_RUNS = Path(__file__).resolve().parents[3] / "shared" / "data" / "reference_runs"
K = 3


def cell(
    per_prompt: list[tuple[int, int]],
    *,
    task: str = "GSM8K",
    concurrency: int = 16,
    method: str = "drafter",
    seconds: float = 10.0,
    told: bool = True,
    **changes: Any,
) -> Cell:
    """A cell in which prompt i had (rounds, accepted); every round accepts from the first position on."""
    rounds, accepted = (sum(column) for column in zip(*per_prompt, strict=True))
    return Cell(
        **{
            "task": task,
            "method": method,
            "concurrency": concurrency,
            "temperature": 1.0,
            "acceptance": Acceptance(
                rounds=rounds,
                proposed=K * rounds,
                accepted=accepted,
                accepted_per_position=[min(rounds, accepted), max(0, min(rounds, accepted - rounds)), 0],
            ),
            "requests": RequestCounts(asked=len(per_prompt), answered=len(per_prompt)),
            "output_tokens": rounds + accepted + len(per_prompt),
            "seconds": seconds,
            "prompts_sha256": "aa",
            "per_request": [[i, *one, 100 * (i + 1)] for i, one in enumerate(per_prompt)] if told else None,
            **changes,
        }
    )


def plain_cell(**changes: Any) -> Cell:
    asked = RequestCounts(asked=40, answered=40)
    plain = {"acceptance": None, "per_request": None, "output_tokens": 500, "requests": asked}
    return cell([(1, 0)] * 40, method="autoregressive", **{**plain, **changes})


def run(*cells: Cell, label: str = "ours", **protocol: Any) -> EvalRun:
    conditions = {"hardware": "4x GPU", "target": "t", "max_new_tokens": 64, "top_p": 0.95, "num_drafted": K}
    return EvalRun(kind="server", label=label, protocol={**conditions, **protocol}, cells=list(cells))


STEADY = [(100, 100 + number % 3) for number in range(40)]
BETTER = [(100, 110 + number % 3) for number in range(40)]

PUBLISHED = {
    "label": "tiny-k2",
    "url": "http://127.0.0.1:1",
    "prompts": 4,
    "ok": 4,
    "fail": 0,
    "concurrency": 2,
    "max_tokens": 8,
    "wall_s": 2.0,
    "output_tokens": 40,
    "output_tok_per_s": 20.0,
    "drafts": 20.0,
    "draft_tokens": 40.0,
    "accepted_tokens": 18.0,
    "mean_acceptance_length": 1.9,
    "draft_token_acceptance_rate": 0.45,
    "per_position_acceptance_rate": {"0": 0.6, "1": 0.3},
}
PUBLISHED_PLAIN = {
    **PUBLISHED,
    "label": "tiny-plain",
    "drafts": 0.0,
    "draft_tokens": 0.0,
    "accepted_tokens": 0.0,
    "mean_acceptance_length": None,
    "draft_token_acceptance_rate": None,
    "per_position_acceptance_rate": {},
}


def written(tmp_path: Path, value: Any, name: str = "run.json") -> Path:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_run_survives_its_json() -> None:
    one = run(cell(STEADY), plain_cell())
    assert EvalRun.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_published_results_of_both_kinds_are_read(tmp_path: Path) -> None:
    (drafted,) = read_run(written(tmp_path, PUBLISHED)).cells
    assert drafted.acceptance == Acceptance(rounds=20, proposed=40, accepted=18, accepted_per_position=[12, 6])
    assert (drafted.concurrency, drafted.output_tokens, drafted.tokens_per_second) == (2, 40, 20.0)
    (plain,) = read_run(written(tmp_path, PUBLISHED_PLAIN)).cells
    assert (plain.acceptance, plain.method) == (None, "autoregressive")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**PUBLISHED, "mean_acceptance_length": 2.1}, "mean_acceptance_length is 2.1, the counts give 1.9"),
        ({**PUBLISHED, "accepted_tokens": 20.0}, "the counts give 2.0"),
        ({**PUBLISHED, "per_position_acceptance_rate": {"0": 0.3, "1": 0.6}}, "rates by position"),
        ({**PUBLISHED, "per_position_acceptance_rate": {"0": 0.9}}, "rates by position"),
        ({**PUBLISHED, "per_position_acceptance_rate": {"0": 0.9, "2": 0.0}}, "key '1' is missing"),
        ({"schema_version": 99, "cells": []}, "schema_version=99"),
        ({"kind": "server", "schema_version": 1, "cells": [{}]}, "can be read"),
        ([], "not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_results_that_contradict_themselves_or_are_none_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(UnreadableRunError, match=words):
        read_run(written(tmp_path, content))
    with pytest.raises(UnreadableRunError, match="no such file"):
        read_run(tmp_path / "gone.json")


@pytest.mark.skipif(not REFERENCE_RUNS.is_dir(), reason="the published raw results are not here")
def test_every_published_raw_result_gives_its_own_figures_and_one_report(tmp_path: Path) -> None:
    paths = sorted(REFERENCE_RUNS.glob("*.json"))
    runs = [read_run(path) for path in paths]
    for path, one in zip(paths, runs, strict=True):
        stated = json.loads(path.read_text())
        (only,) = one.cells
        length = None if only.acceptance is None else only.acceptance.length
        assert (length is None) == (stated["mean_acceptance_length"] is None)
        assert length is None or length == pytest.approx(stated["mean_acceptance_length"], abs=5e-4)
        assert only.tokens_per_second == pytest.approx(stated["output_tok_per_s"], rel=1e-3)
    write_runs_report(tmp_path, "Published", runs)
    text = (tmp_path / "report.md").read_text()
    by_label = {one.label: one for one in runs}
    assert "3.626 [" in text and "1,405.4 (1.56x)" in text
    difference = compare(by_label["incoai-k7-b300"], by_label["dflash2F-k7"]).tasks[0]
    assert difference.difference == pytest.approx(-0.006, abs=1e-3)
    assert difference.verdict == "within the noise"
    assert compare(by_label["incoai-k7-b300"], by_label["dflash2E-k7-b300"]).tasks[0].verdict == "below the noise"
    with pytest.raises(UnlikeRunsError, match="num_drafted is 7 and 4"):
        compare(by_label["dflash2F-k7"], by_label["dflash2F-k4"])


def test_cells_of_categories_pool_to_sums_and_prompts_stay_apart() -> None:
    whole = pool([cell([(10, 5), (10, 15)], category="a"), cell([(20, 10)], category="b")])
    assert whole.acceptance is not None
    assert (whole.acceptance.rounds, whole.acceptance.accepted) == (40, 30)
    assert [row[0] for row in whole.per_request or []] == [0, 1, 2]
    assert (whole.requests.asked, whole.seconds) == (3, 20.0)


def test_the_interval_over_prompts_has_the_width_of_the_standard_error() -> None:
    one = cell([(100, 100 + 20 * (number % 2)) for number in range(100)])
    interval = length_interval(one)
    assert interval is not None and interval.basis == PROMPTS
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.1 / 100**0.5, rel=0.15)
    assert interval.low < 2.1 < interval.high


def test_the_interval_over_rounds_stands_in_and_says_that_it_is_a_lower_bound() -> None:
    one = cell(STEADY, told=False)
    interval = length_interval(one)
    assert interval is not None and interval.basis == POOLED_ROUNDS
    histogram = one.acceptance.histogram if one.acceptance else None
    assert histogram is not None
    mean = sum(m * rounds for m, rounds in enumerate(histogram)) / 4000
    deviation = (sum(rounds * (m - mean) ** 2 for m, rounds in enumerate(histogram)) / 4000) ** 0.5
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * deviation / 4000**0.5, rel=0.15, abs=1e-3)
    nothing = Acceptance(rounds=10, proposed=30, accepted=5, accepted_per_position=[])
    assert length_interval(cell(STEADY, told=False, acceptance=nothing)) is None


def test_runs_of_the_same_prompts_are_drawn_in_pairs_so_that_hard_prompts_cancel() -> None:
    hard = [(100, 20 * number) for number in range(15)]
    harder = [(100, 20 * number + 3) for number in range(15)]
    paired = difference_interval(cell(hard), cell(harder))
    apart = difference_interval(cell(hard), cell(harder, prompts_sha256="bb"))
    assert paired is not None and apart is not None
    assert paired.basis == PAIRED and apart.basis == PROMPTS
    assert paired.low > 0.02 and paired.high < 0.04
    assert apart.low < 0 < apart.high


def test_a_comparison_says_what_lies_above_below_and_within_the_noise() -> None:
    assert compare(run(cell(STEADY)), run(cell(BETTER))).tasks[0].verdict == "above the noise"
    assert compare(run(cell(BETTER)), run(cell(STEADY))).tasks[0].verdict == "below the noise"
    (same,) = compare(run(cell(STEADY)), run(cell(STEADY, seconds=5.0))).tasks
    assert (same.verdict, same.difference, same.speed_ratio) == ("within the noise", 0.0, 2.0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (run(cell(STEADY), hardware="8x GPU"), "hardware is 4x GPU and 8x GPU"),
        (run(cell(STEADY), hardware=None), "hardware is 4x GPU and not recorded"),
        (run(cell(STEADY), num_drafted=4), "num_drafted is 3 and 4"),
        (run(cell(STEADY), max_new_tokens=128), "max_new_tokens is 64 and 128"),
        (run(cell(STEADY, prompts_sha256="bb")), "prompts_sha256 is aa and bb"),
        (run(cell(STEADY, concurrency=1)), "concurrency is 16 and 1"),
        (run(cell(STEADY, temperature=0.0)), "temperature is 1.0 and 0.0"),
        (run(cell(STEADY, task="MBPP")), "nothing in common"),
    ],
)
def test_unlike_runs_are_refused_and_labelled_when_they_are_wanted(other: EvalRun, words: str) -> None:
    with pytest.raises(UnlikeRunsError, match=words):
        compare(run(cell(STEADY)), other)
    if words != "nothing in common":
        comparison = compare(run(cell(STEADY)), other, allow_unlike=True)
        assert words in str(comparison.unlike[0])
        assert "UNLIKE" in runs_markdown("x", tables_of([run(cell(STEADY)), other], [comparison]), plot_name=None)


def test_k_does_not_count_where_one_of_the_runs_does_not_draft_with_it() -> None:
    plain = run(plain_cell(), label="plain", num_drafted=None)
    (task,) = compare(plain, run(cell(STEADY))).tasks
    assert task.difference is None and task.verdict == "no acceptance to compare"
    compare(run(cell(STEADY, method="mtp"), num_drafted=2), run(cell(STEADY)))


def test_the_gate_fails_a_drop_beyond_the_noise_and_nothing_less() -> None:
    settings = GateConfig()
    assert judge(run(cell(STEADY)), run(cell(STEADY), label="base"), settings).passed
    assert judge(run(cell(BETTER)), run(cell(STEADY), label="base"), settings).passed
    verdict = judge(run(cell(STEADY)), run(cell(BETTER), label="base"), settings)
    assert not verdict.passed
    assert "acceptance length 2.110 -> 2.010" in verdict.lines()[1]
    assert judge(run(cell(STEADY)), run(cell(BETTER), label="base"), GateConfig(tolerance=0.2)).passed
    noisy = [(100, 100 + 90 * (number % 2)) for number in range(4)]
    slightly = [(100, 96 + 90 * (number % 2 == 0)) for number in range(4)]
    assert judge(run(cell(slightly)), run(cell(noisy), label="base"), settings).passed, "a drop within the noise"


def test_the_gate_fails_what_was_not_measured_or_lost_requests() -> None:
    base = run(cell(STEADY), cell(STEADY, task="MBPP"))  # of the same label, as two runs of one experiment are
    assert judge(base, run(cell(STEADY)), GateConfig()).passed, "more than the baseline has is no fault"
    verdict = judge(run(cell(STEADY)), base, GateConfig())
    passed = {task.task: task.passed for task in verdict.tasks}
    assert passed == {"GSM8K at concurrency 16": True, "MBPP at concurrency 16": False}
    broken = cell(STEADY, requests=RequestCounts(asked=40, answered=39, failed={"timeout": 1}))
    assert not judge(run(broken), run(cell(STEADY), label="base"), GateConfig()).passed


def test_tables_hold_the_figures_of_the_cards() -> None:
    runs = [
        run(plain_cell(), plain_cell(task="MBPP"), label="plain"),
        run(cell(STEADY, seconds=2.0), cell(BETTER, task="MBPP", category="easy"), label="ours"),
    ]
    tables = {table.title: table for table in tables_of(runs)}
    acceptance = tables["Acceptance length by task"]
    assert acceptance.header == ("task", "ours")
    assert [row[0] for row in acceptance.rows] == ["GSM8K", "MBPP", "mean over the rows"]
    assert acceptance.rows[0][1].startswith("2.010 [")
    assert acceptance.rows[2][1] == "2.060"
    throughput = tables["Throughput, output tokens/s"]
    assert throughput.rows[0] == ("GSM8K", "16", "1", "50.0", "4,039.5 (80.79x)")
    positions = tables["Accepted by position, % of rounds: ours"]
    assert positions.rows[1] == ("MBPP / easy", "16", "4000", "100.0", "11.0", "0.0", "2.110")
    lengths = tables["By prompt length: ours"]
    assert sum(int(row[4]) for row in lengths.rows) == 8000, "buckets add up to the whole"


def test_a_speed_up_is_never_taken_from_other_hardware_prompts_limits_or_concurrency() -> None:
    others = (
        run(plain_cell(), hardware="other"),
        run(plain_cell(concurrency=1)),
        run(plain_cell(prompts_sha256="bb")),
        run(plain_cell(), max_new_tokens=9),
    )
    for plain in others:
        text = runs_markdown("x", tables_of([plain, run(cell(STEADY))]), plot_name=None)
        assert "x)" not in text.split("## Throughput")[1].split("##")[0]


def test_runs_of_one_label_at_other_concurrencies_share_a_column() -> None:
    runs = [run(cell(STEADY, concurrency=1)), run(cell(STEADY, concurrency=8)), run(cell(STEADY), label="other")]
    tables = {table.title: table for table in tables_of(runs)}
    throughput = tables["Throughput, output tokens/s"]
    assert throughput.header[3:] == ("ours", "other")
    assert [row[1] for row in throughput.rows] == ["1", "8", "16"]
    unlike = [run(cell(STEADY)), run(cell(STEADY, concurrency=1), max_new_tokens=9)]
    assert tables_of(unlike)[1].header == ("task", "ours", "ours #2")


def test_html_escapes_everything_and_stands_alone() -> None:
    page = to_html("<b>", [Table(title="a & b", header=("<i>",), rows=[("<script>x</script>",)], notes=['"n"'])])
    assert "<script>" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page and "http" not in page


def test_the_report_of_runs_writes_markdown_html_and_plots(tmp_path: Path) -> None:
    runs = [run(cell(STEADY), label="base"), run(cell(BETTER), cell(BETTER, concurrency=1), plain_cell(), label="ours")]
    tables = write_runs_report(tmp_path, "Two runs", runs, [compare(runs[0], run(cell(BETTER)))])
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64" in (tmp_path / "report.html").read_text()
    assert "above the noise" in (tmp_path / "report.md").read_text()
    console = Console(record=True, width=200, file=io.StringIO())
    print_tables(tables, console)
    assert "Acceptance length by task" in console.export_text()


def test_the_commands_compare_report_and_gate_and_return_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = written(tmp_path, run(cell(BETTER), label="better").to_json(), "better.json")
    steady = written(tmp_path, run(cell(STEADY), label="steady").to_json(), "steady.json")
    unlike = written(tmp_path, run(cell(STEADY), hardware="x", label="elsewhere").to_json(), "unlike.json")
    assert run_command(["compare", str(steady), str(better), "--out", str(tmp_path / "out")]) == 0
    assert "above the noise" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()
    assert run_command(["compare", str(steady), str(unlike)]) == 2
    assert "hardware is 4x GPU and x" in capsys.readouterr().err
    assert run_command(["compare", str(steady), str(unlike), "--allow-unlike"]) == 0
    assert "UNLIKE" in capsys.readouterr().out
    assert run_command(["compare", str(steady)]) == 2
    assert run_command(["gate", str(better), "--baseline", str(steady)]) == 0
    assert run_command(["gate", str(steady), "--baseline", str(better)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert run_command(["report", str(better), str(unlike), "--out", str(tmp_path / "both")]) == 0
    assert run_command(["gate", str(steady), "--baseline", str(tmp_path / "gone.json")]) == 2


def test_gate_settings_are_checked() -> None:
    with pytest.raises(UserError, match="eval.gate.confidence=1.5"):
        GateConfig(confidence=1.5).check()
    with pytest.raises(UserError, match="needs a run to hold against"):
        GateConfig(after_training=True).check()


def test_training_ends_with_the_gates_exit_code_when_it_is_told_to(
    tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(formats, "export_drafter", lambda _: tmp_path)
    monkeypatch.setattr(cli, "evaluate", lambda _: 1)
    assert export_result(tiny_config) == 0
    tiny_config.eval.gate = GateConfig(after_training=True, baseline="base.json")
    assert export_result(tiny_config) == 1
