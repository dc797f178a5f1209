"""Tasks, draft lengths and temperatures with the built-in runner: the turns, the counts, resuming, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.evaluate import cli
from dflash2_train.evaluate.cell_tables import cell_tables
from dflash2_train.evaluate.compare import UnlikeRunsError, compare
from dflash2_train.evaluate.gate import judge
from dflash2_train.evaluate.grid import measure
from dflash2_train.evaluate.grid.plan import PLAIN, Script, load_scripts, units_of
from dflash2_train.evaluate.plots import draw_runs
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.room import Room
from dflash2_train.evaluate.runs import Acceptance, Cell, EvalRun, RequestCounts
from dflash2_train.evaluate.series import series_of
from dflash2_train.evaluate.server.chat_ids import open_chat
from dflash2_train.runner import loop
from dflash2_train.runner.verify import Verdict
from tests.grid_case import make_grid_case, write_rows
from tests.toy_target import BOS, END, WORDS, write_tokenizer

USER, ASSISTANT, THINK = WORDS.index("<user>"), WORDS.index("<assistant>"), WORDS.index("<think>")
TOKENS = 8


def word(number: int) -> int:
    return WORDS.index(f"w{number}")


@pytest.fixture
def evaluation(tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A tiny target with tokenizer, its drafter, a task of one turn and one of two. Reports come without plots."""
    monkeypatch.setattr("dflash2_train.evaluate.plots.draw_runs", lambda runs: None)
    torch.manual_seed(1)
    return make_grid_case(tiny_config, tmp_path)


def run_of(config: RunConfig) -> EvalRun:
    return read_run(Path(config.eval.output_dir) / "runner")


def answers_of(config: RunConfig) -> list[dict[str, Any]]:
    (path,) = (Path(config.eval.output_dir) / "runner").glob("answers-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_every_task_k_and_temperature_is_a_cell_with_its_plain_baseline(evaluation: RunConfig) -> None:
    assert cli.evaluate(evaluation) == 0
    run = run_of(evaluation)
    assert [(cell.task, cell.temperature, cell.num_drafted, cell.method) for cell in run.cells] == [
        (task, temperature, drafted, "drafter" if drafted else "autoregressive")
        for task in ("one", "two")
        for temperature in (0.0, 1.0)
        for drafted in (None, 1, 3)
    ]
    for cell in run.cells:
        assert cell.requests.answered == {"one": 3, "two": 4}[cell.task]
        assert cell.seconds == pytest.approx(sum((cell.seconds_by_part or {}).values()))
        if cell.acceptance is not None:
            assert len(cell.acceptance.accepted_per_position) == cell.num_drafted
            assert cell.acceptance.proposed == cell.acceptance.rounds * (cell.num_drafted or 0)
            rows = cell.per_request or []
            assert sum(row[1] for row in rows) == cell.acceptance.rounds
            assert sum(row[2] for row in rows) == cell.acceptance.accepted
    words = " ".join(run.labels)
    assert "14 of 14 answers equal" in words, "two K, three answers of one task and four of the other"
    assert "equality does not apply to sampled answers" in words
    assert "warm-up" in words


def test_the_second_turn_is_asked_with_the_tokens_of_the_first_answer(evaluation: RunConfig) -> None:
    evaluation.eval.sweep.temperatures = [0.0]
    asked: list[list[int]] = []
    real = measure.plain_decode

    def noted(model: Any, prompt_ids: list[int], *rest: Any) -> Any:
        asked.append(prompt_ids)
        return real(model, prompt_ids, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "plain_decode", noted)
        assert cli.evaluate(evaluation) == 0
    (unit,) = (row for row in answers_of(evaluation) if row["prompt_id"] == "two-0")
    first, second = unit["turns"]["0"]
    kept = [token for token in first["decoded"]["token_ids"] if token != END]
    opening = [BOS, USER, word(3), END, ASSISTANT]
    expected = [*opening, *kept, END, USER, word(20), word(21), END, ASSISTANT]
    assert expected in asked
    assert second["num_prompt_tokens"] == len(expected)


def test_an_answer_that_stopped_does_not_end_twice(evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template writes the end of an answer, so the decoder's own stop token is dropped."""
    asked: list[list[int]] = []

    def stops(model: Any, prompt_ids: list[int], settings: Any, generator: Any) -> Any:
        asked.append(prompt_ids)
        return loop.GenerationResult(token_ids=[9, END], finish_reason="stop", timings=loop.Clock(model.device).timings)

    monkeypatch.setattr(measure, "plain_decode", stops)
    script = Script(prompt_id="a", prompt_ids=[5], follow_ups=[[END, USER, 6, END, ASSISTANT]])
    settings = loop.DecodeSettings(max_new_tokens=TOKENS, num_drafted=1, stop_ids=frozenset({END}))

    class Model:
        device = torch.device("cpu")

    grid = measure.Grid(
        target_model=Model(),  # type: ignore[arg-type]
        drafter=None,  # type: ignore[arg-type]
        settings=lambda drafted, temperature: settings,
        drafted=[1],
        baseline=True,
        room=Room(context=100, answer=TOKENS, block=1),
        seed=0,
    )
    measure.answer(grid, script, PLAIN, 0.0)
    assert asked == [[5], [5, 9, END, USER, 6, END, ASSISTANT]]


@pytest.mark.parametrize(("thinking", "prompt"), [(False, True), (True, False), (None, False)])
def test_thinking_is_asked_for_in_the_prompt(evaluation: RunConfig, thinking: bool | None, prompt: bool) -> None:
    evaluation.data.enable_thinking = thinking
    assert (THINK in load_scripts(evaluation)[0].scripts[0].prompt_ids) == prompt


def test_a_template_that_drops_answers_cannot_ask_a_second_turn(evaluation: RunConfig) -> None:
    forgetful = "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }} {% endif %}"
    write_tokenizer(Path(evaluation.target.name), forgetful + "{% endfor %}")
    chat = open_chat(evaluation.target, None)
    with pytest.raises(ConfigError, match="no second turn can"):
        chat.follow_ups([{"role": "user", "content": "w1"}], ["w2"])


def test_every_decoder_begins_in_turn_and_the_warm_up_is_in_no_figure(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation.eval.tasks = evaluation.eval.tasks[:1]
    calls: list[tuple[str, int, float, int]] = []
    real = measure.Grid.decode

    def noted(self: measure.Grid, prompt_ids: list[int], drafted: int, settings: Any, seed: int) -> Any:
        result = real(self, prompt_ids, drafted, settings, seed)
        calls.append((str(prompt_ids), drafted, settings.temperature, len(result.token_ids)))
        return result

    monkeypatch.setattr(measure.Grid, "decode", noted)
    assert cli.evaluate(evaluation) == 0
    warm, measured = calls[:6], calls[6:]
    assert {(drafted, temperature) for _, drafted, temperature, _ in warm} == {
        (drafted, temperature) for drafted in (0, 1, 3) for temperature in (0.0, 1.0)
    }
    assert len(measured) == 18
    for temperature in (0.0, 1.0):
        firsts = [one[1] for one in measured[::3] if one[2] == temperature]
        assert sorted(firsts) == [0, 1, 3], "over three prompts each decoder is once the first"
    for cell in run_of(evaluation).cells:
        mine = [one for one in measured if one[1] == (cell.num_drafted or 0) and one[2] == cell.temperature]
        assert cell.output_tokens == sum(one[3] for one in mine)


def test_a_killed_evaluation_continues_and_a_finished_one_loads_no_model(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation.eval.tasks = evaluation.eval.tasks[:1]
    whole = Path(evaluation.eval.output_dir).with_name("whole")
    folder = evaluation.eval.output_dir
    evaluation.eval.output_dir = str(whole)
    assert cli.evaluate(evaluation) == 0
    evaluation.eval.output_dir = folder
    done: list[str] = []
    real = measure.measure_unit

    def counted(grid: Any, unit: Any) -> Any:
        if len(done) == 4:
            done.append("interrupted")
            raise KeyboardInterrupt
        done.append(unit.key)
        return real(grid, unit)

    monkeypatch.setattr(measure, "measure_unit", counted)
    with pytest.raises(KeyboardInterrupt):
        cli.evaluate(evaluation)
    (path,) = (Path(folder) / "runner").glob("answers-*.jsonl")
    path.write_bytes(path.read_bytes()[:-15])  # the last line was cut by the kill
    assert cli.evaluate(evaluation) == 0
    assert done.count("interrupted") == 1 and len(done) == 1 + 6 + 1, "six units, the torn one twice"
    first, second = (read_run(one / "runner") for one in (whole, Path(folder)))
    assert [cell.acceptance for cell in first.cells] == [cell.acceptance for cell in second.cells]
    monkeypatch.setattr("dflash2_train.evaluate.grid.run.open_models", None)
    assert cli.evaluate(evaluation) == 0


def test_prompts_longer_than_the_context_are_counted_and_in_no_mean(evaluation: RunConfig, tmp_path: Path) -> None:
    evaluation.eval.sweep.temperatures = [0.0]
    long = {"id": "long", "prompt": " ".join(["w1"] * 125)}
    tail = {"id": "tail", "turns": ["w1", " ".join(["w2"] * 120)]}
    evaluation.eval.tasks[0].path = write_rows(tmp_path / "a.jsonl", [{"id": "short", "prompt": "w1 w2"}, long])
    evaluation.eval.tasks[1].path = write_rows(tmp_path / "b.jsonl", [tail])
    assert cli.evaluate(evaluation) == 0
    for cell in run_of(evaluation).cells:
        assert (cell.requests.asked, cell.requests.answered, cell.requests.too_long) == (1, 1, 1)
        assert "1 prompts do not fit the context of 128 tokens" in cell.labels[0]
        assert cell.output_tokens <= TOKENS
    evaluation.eval.tasks[0].path = write_rows(tmp_path / "c.jsonl", [long])
    with pytest.raises(ConfigError, match="none of the 1 prompts of one"):
        cli.evaluate(evaluation)


def test_a_wrongly_accepted_token_fails_the_evaluation_and_is_named(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def accept_one(draft_ids: torch.Tensor, target_logits: torch.Tensor) -> Verdict:
        num_accepted = min(1, draft_ids.shape[1])  # plain decoding has no drafts
        return Verdict(torch.tensor([num_accepted]), target_logits[:, num_accepted].argmax(dim=-1))

    monkeypatch.setattr(loop, "verify_greedy", accept_one)
    assert cli.evaluate(evaluation) == cli.EXIT_NOT_EQUAL
    assert "FAILED one one-0, turn 1, K=1" in capsys.readouterr().out


def test_an_empty_prompt_file_and_a_drafter_of_another_vocabulary_are_refused(
    evaluation: RunConfig, tmp_path: Path
) -> None:
    evaluation.eval.tasks[0].path = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match=r"eval\.tasks\[0\].path=.*holds no prompts"):
        cli.evaluate(evaluation)
    path = Path(evaluation.export.output_dir) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 97}))
    with pytest.raises(ConfigError, match="vocab_size=97.*made for another target"):
        cli.evaluate(evaluation)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_speculative_tokens", [1, 4], "between 1 and drafter.block_size - 1 = 3"),
        ("num_speculative_tokens", [0], "between 1 and"),
        ("num_speculative_tokens", [2, 2], "different numbers"),
        ("temperatures", [-0.1], "at least 0"),
    ],
)
def test_a_sweep_that_cannot_be_measured_is_refused(
    evaluation: RunConfig, key: str, value: list[float], words: str
) -> None:
    setattr(evaluation.eval.sweep, key, value)
    with pytest.raises(ConfigError, match=words):
        evaluation.check()


def test_an_exported_drafter_of_a_shorter_block_refuses_the_k_of_the_sweep(evaluation: RunConfig) -> None:
    evaluation.eval.sweep.num_speculative_tokens = [1, 5]
    with pytest.raises(ConfigError, match="num_speculative_tokens=5: the drafter's block_size 4 allows 3 at most"):
        cli.evaluate(evaluation)


def test_the_hold_out_can_be_swept_without_a_tokenizer(evaluation: RunConfig) -> None:
    evaluation.eval.tasks = []
    (Path(evaluation.target.name) / "tokenizer.json").unlink()
    Path(evaluation.data.root).mkdir()
    rows = [{"prompt_id": f"p{i}", "messages": [], "prompt_ids": [5 * i + 1, 7, 30 + i]} for i in range(2)]
    write_rows(Path(evaluation.data.root) / "holdout.jsonl", rows)
    assert cli.evaluate(evaluation) == 0
    assert {cell.task for cell in run_of(evaluation).cells} == {"hold-out"}
    assert not list(Path(evaluation.eval.output_dir).glob("results-*")), "the plain evaluation's files are its own"


def test_tables_and_plots_show_every_k_and_temperature_and_compare_pairs_like_with_like(
    evaluation: RunConfig,
) -> None:
    assert cli.evaluate(evaluation) == 0
    run = run_of(evaluation)
    assert [one.name for one in series_of([run])] == ["runner, autoregressive", "runner, K=1", "runner, K=3"]
    means, conditional, cycle = cell_tables(series_of([run]))
    assert [row[:3] for row in cycle.rows if row[0] == "one" and row[1] == "0"] == [
        ("one", "0", "plain"),
        ("one", "0", "1"),
        ("one", "0", "3"),
    ]
    assert len(means.rows) == len(conditional.rows) == 8
    markdown = (Path(evaluation.eval.output_dir) / "runner" / "report.md").read_text()
    assert "| one, T=1 |" in markdown and "runner, K=3" in markdown
    for shown in ([run], [run, run]):
        png = draw_runs(shown)
        assert png is not None and png.startswith(b"\x89PNG")
    comparison = compare(run, run)
    assert len(comparison.tasks) == 8
    assert all(one.base.num_drafted == one.other.num_drafted and one.difference == 0 for one in comparison.tasks)
    verdict = judge(run, run, evaluation.eval.gate)
    assert "one at concurrency 1, temperature 1, K=3" in {task.task for task in verdict.tasks}
    short = [cell for cell in run.cells if cell.num_drafted == 1 and cell.task == "one" and cell.temperature == 0]
    long = [cell for cell in run.cells if cell.num_drafted == 3 and cell.task == "one" and cell.temperature == 0]
    one, other = (
        EvalRun(kind=run.kind, label=run.label, protocol=run.protocol, cells=cells) for cells in (short, long)
    )
    with pytest.raises(UnlikeRunsError, match="num_drafted is 1 and 3"):
        compare(one, other)


def test_a_task_that_was_trained_on_is_refused_before_models_load_and_labelled_where_that_is_allowed(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt_id": "p", "split": "train", "messages": [{"role": "user", "content": "w1 w8"}]}
    plan = Path(evaluation.data.root) / "prompts.jsonl"
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps(row) + "\n")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="one: one-1 .same user turn"):
        patch.setattr("dflash2_train.evaluate.grid.run.open_models", lambda *_: pytest.fail("models were loaded"))
        cli.evaluate(evaluation)
    evaluation.eval.allow_trained_prompts = True
    assert cli.evaluate(evaluation) == 0
    assert any(label.startswith("NOT HELD OUT: 1 of 1") for label in run_of(evaluation).labels)


def test_units_follow_the_conversations_and_move_the_first_decoder_on(evaluation: RunConfig) -> None:
    units = units_of(load_scripts(evaluation), [0.0, 1.0])
    assert [unit.key for unit in units[:4]] == ["one#0 at 0", "one#0 at 1", "one#1 at 0", "one#1 at 1"]
    assert [unit.order([0, 1, 3])[0] for unit in units[:6]] == [0, 1, 1, 3, 3, 0]


def test_the_means_conditional_rates_and_times_of_a_cell_are_those_worked_out_by_hand() -> None:
    accepted = Acceptance(rounds=6, proposed=18, accepted=9, accepted_per_position=[5, 3, 1])
    cell = Cell(
        task="one",
        method="drafter",
        num_drafted=3,
        concurrency=1,
        temperature=0.0,
        acceptance=accepted,
        requests=RequestCounts(asked=2, answered=2),
        output_tokens=17,
        seconds=3.0,
        seconds_by_part={"prefill": 1.5, "context": 0.3, "draft": 0.6, "verify": 0.48, "sample": 0.12},
        per_request=[[0, 4, 4, 10], [1, 2, 5, 10]],
    )
    run = EvalRun(kind="runner", label="runner", protocol={}, cells=[cell])
    means, conditional, cycle = (table.rows[0] for table in cell_tables(series_of([run])))
    assert means[5].startswith("2.500 [2.000, 3.500]"), "1 + 9 accepted / 6 rounds"
    assert means[6].startswith("2.750 [2.000, 3.500]"), "the mean of 1 + 4/4 and 1 + 5/2"
    assert conditional[3:] == ("83.3", "60.0", "33.3"), "5 of 6, 3 of 5, 1 of 3"
    assert cycle[4:] == ("100.0", "50.0", "80.0", "20.0", "250.0", "10.0", "5.7")


def test_the_report_of_a_sweep_names_the_k_that_decodes_fastest_and_what_it_gains() -> None:
    def measured(drafted: int | None, seconds: float) -> Cell:
        counts = Acceptance(rounds=50, proposed=50 * (drafted or 0), accepted=50, accepted_per_position=[])
        return Cell(
            task="one",
            method="drafter" if drafted else "autoregressive",
            num_drafted=drafted,
            concurrency=1,
            temperature=0.0,
            acceptance=counts if drafted else None,
            requests=RequestCounts(asked=1, answered=1),
            output_tokens=101,
            seconds=seconds + 1,
            seconds_by_part={"prefill": 1.0, "verify": seconds},
        )

    def note(*cells: Cell) -> str:
        run = EvalRun(kind="runner", label="runner", protocol={}, cells=list(cells))
        return cell_tables(series_of([run]))[2].notes[-1]

    plain, short, long = measured(None, 10.0), measured(3, 8.0), measured(7, 16.0)
    assert note(plain, short, long) == "temperature 0: K=3 decodes fastest here, 12.5 tokens/s, 1.25x plain decoding"
    assert "plain decodes fastest here, 10.0 tokens/s" in note(plain, measured(3, 20.0), long)
    other = replace(measured(7, 2.0), task="two")
    assert "K=7 decodes fastest here, 11.1 tokens/s" in note(plain, measured(3, 9.5), long, other), "over both tasks"
    assert "fastest" not in note(plain, short), "nothing to choose from"
