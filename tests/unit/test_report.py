"""Counting, the report's formats, and a whole evaluation: equality, resuming, exit codes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dflash2_train.config import ConfigError, RunConfig, UserError, to_plain
from dflash2_train.evaluate import cli, measure
from dflash2_train.evaluate.holdout import load_holdout
from dflash2_train.evaluate.plots import write_acceptance_plot
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord, PromptRecord, ResultsFile
from dflash2_train.evaluate.render import print_report, to_markdown
from dflash2_train.evaluate.report import EvalReport, build_report
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.run_control import only_run_in
from dflash2_train.runner import loop
from dflash2_train.runner.verify import Verdict
from tests.integration.forked import finish, fork_ranks_of

NUM_DRAFTED = 7
SCRIPT = (0, 3, 7, 2)
NUM_PROMPTS = 3
PROTOCOL = {"experiment": "tiny", "num_drafted": NUM_DRAFTED, "dtype": "float32", "temperature": 1.0}


def decoded(accepted: tuple[int, ...], seconds: float = 1.0) -> DecodeRecord:
    rounds = [[NUM_DRAFTED, m, m + 1] for m in accepted]
    output = 1 + sum(m + 1 for m in accepted)
    return DecodeRecord(
        token_ids=list(range(output)),
        finish_reason="length",
        rounds=rounds,
        seconds={"prefill": seconds, "context": 0.0, "draft": seconds, "verify": 2 * seconds, "sample": 0.0},
    )


def measured(prompt_id: str, accepted: tuple[int, ...], *, num_prompt_tokens: int = 10) -> PromptRecord:
    greedy = decoded(accepted)
    baseline = replace(greedy, rounds=[], seconds={"prefill": 1.0, "verify": 6.0, "sample": 0.0})
    return PromptRecord(
        prompt_id=prompt_id,
        num_prompt_tokens=num_prompt_tokens,
        greedy=greedy,
        baseline=baseline,
        equality=EqualityRecord(equal=True),
        sampled=decoded(accepted[:1]),
    )


def two_prompt_report() -> EvalReport:
    records = [measured("a", SCRIPT), measured("b", (7, 7), num_prompt_tokens=300)]
    return build_report(records, protocol=PROTOCOL, run={"evaluation": {"git": None}, "drafter": None})


def test_scripted_rounds_give_the_figures_worked_out_by_hand() -> None:
    part = build_report([measured("a", SCRIPT)], protocol=PROTOCOL, run={}).greedy
    assert part.rates.acceptance_length_pooled == 4.0
    assert part.rates.accepted_per_round == 3.0
    assert (part.counts.accepted, part.counts.proposed, part.counts.committed, part.counts.rounds) == (12, 28, 16, 4)
    assert part.counts.accepted_histogram == [1, 0, 1, 1, 0, 0, 0, 1]
    assert part.counts.accepted_per_position == [3, 3, 2, 1, 1, 1, 1]
    assert part.counts.reached_per_position == [4, 3, 3, 2, 1, 1, 1]
    assert part.rates.plain_rates == [0.75, 0.75, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert part.rates.conditional_rates == [0.75, 1.0, 2 / 3, 0.5, 1.0, 1.0, 1.0]


def test_pooled_and_per_request_means_differ_and_are_both_shown() -> None:
    report = two_prompt_report()
    assert report.greedy.rates.acceptance_length_pooled == pytest.approx(32 / 6)
    assert report.greedy.rates.acceptance_length_per_request == pytest.approx((4 + 8) / 2)
    markdown = to_markdown(report)
    assert "5.333 | 32 committed / 6 rounds" in markdown
    assert "6.000 | mean over 2 prompts" in markdown


def test_buckets_add_up_to_the_whole() -> None:
    part = two_prompt_report().greedy
    assert [(bucket.min_tokens, bucket.max_tokens) for bucket in part.buckets] == [(0, 128), (256, 512)]
    for key in ("prompts", "rounds", "accepted", "proposed", "output_tokens"):
        assert sum(getattr(bucket.counts, key) for bucket in part.buckets) == getattr(part.counts, key)


def test_speed_compares_decoding_without_prefill() -> None:
    report = build_report([measured("a", SCRIPT)], protocol=PROTOCOL, run={})
    assert report.greedy.speed.decode_tokens_per_second == pytest.approx(16 / 3)
    assert report.greedy.speed.tokens_per_second == pytest.approx(17 / 4)
    assert report.greedy.speed.ms_per_step == pytest.approx(750)
    assert report.baseline is not None
    assert report.baseline.ms_per_step == pytest.approx(6000 / 16)
    assert report.speedup == pytest.approx(2.0)


def test_prompts_that_end_with_the_prefill_have_no_rounds_and_no_rate() -> None:
    part = build_report([measured("a", ())], protocol=PROTOCOL, run={}).greedy
    assert part.counts.prompts_without_rounds == 1
    assert part.rates.acceptance_length_pooled is None
    assert part.rates.conditional_rates == [None] * NUM_DRAFTED


def test_json_round_trip_keeps_everything_and_another_schema_is_refused() -> None:
    report = two_prompt_report()
    value = json.loads(json.dumps(report.to_json()))
    assert EvalReport.from_json(value) == report
    value["schema_version"] = 999
    with pytest.raises(ValueError, match="schema_version=999"):
        EvalReport.from_json(value)


@pytest.mark.parametrize(
    ("dtype", "gap", "failures"), [("float32", 0.01, 1), ("bfloat16", 0.01, 0), ("bfloat16", 0.6, 1)]
)
def test_a_departure_fails_in_float32_and_in_bfloat16_only_beyond_the_gap(
    dtype: str, gap: float, failures: int
) -> None:
    equality = EqualityRecord(equal=False, first_difference=5, num_departures=1, largest_gap=gap)
    record = replace(measured("a", SCRIPT), equality=equality)
    report = build_report([record], protocol={**PROTOCOL, "dtype": dtype}, run={}).equality
    assert report is not None
    assert (report.prompts_equal, len(report.failures), report.largest_gap) == (0, failures, gap)


def test_console_and_plot_show_every_pass(tmp_path: Path) -> None:
    report = two_prompt_report()
    console = Console(record=True, width=160, file=io.StringIO())
    print_report(report, console)
    text = console.export_text()
    assert "acceptance, greedy" in text and "acceptance, sampled at temperature 1.0" in text
    assert "2 of 2 prompts equal" in text
    write_acceptance_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_cut_by_a_crash_is_measured_again_and_other_settings_have_another_file(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, {"k": 7})
    results.append(measured("a", SCRIPT))
    results.append(measured("b", SCRIPT))
    whole = results.path.read_bytes()
    results.path.write_bytes(whole[:-20])
    again = ResultsFile(tmp_path, {"k": 7})
    assert list(again.records) == ["a"]
    again.append(measured("b", SCRIPT))
    assert results.path.read_bytes() == whole
    assert ResultsFile(tmp_path, {"k": 3}).records == {}
    results.path.write_text("not results\n")
    with pytest.raises(ConfigError, match="Move the file away"):
        ResultsFile(tmp_path, {"k": 7})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Run dflash2-gen-data"),
        ("", "holds no prompts"),
        ('{"prompt_id": "a"}\n', "holdout.jsonl:1"),
        ('{"prompt_id": "a", "prompt_ids": []}\n', "at least one token"),
        (2 * '{"prompt_id": "a", "prompt_ids": [1]}\n', "twice"),
    ],
)
def test_unusable_holdout_files_are_refused_with_the_next_step(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "holdout.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_holdout(tmp_path)


@pytest.fixture
def evaluation(tiny_config: RunConfig, tmp_path: Path) -> RunConfig:
    """A tiny target, drafter and hold-out on the disk, and the configuration that names them."""
    torch.manual_seed(1)
    config = tiny_config
    config.target.name = str(tmp_path / "target")
    llama = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=[93, 94],
    )
    LlamaForCausalLM(llama).save_pretrained(config.target.name)
    shape = DrafterShape.from_config(config)
    drafter = Drafter(shape)
    folder = Path(config.export.output_dir)
    folder.mkdir()
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name != "mask_embedding"}
    save_file(tensors, folder / "model.safetensors")
    torch.save(torch.ones(32), folder / "mask_embedding.pt")
    published = shape.to_published("float32", bos_token_id=None, eos_token_id=[93, 94], pad_token_id=None)
    (folder / "config.json").write_text(json.dumps(published))
    root = Path(config.data.root)
    root.mkdir()
    rows = [{"prompt_id": f"p{i}", "messages": [], "prompt_ids": [5 * i + 1, 7, 30 + i]} for i in range(NUM_PROMPTS)]
    (root / "holdout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.eval.temperature = 1.0
    config.eval.draft_sampling = "selector"
    return config


def test_a_second_evaluation_into_the_same_folder_is_refused_while_the_first_runs(evaluation: RunConfig) -> None:
    folder = Path(evaluation.eval.output_dir)
    with (
        only_run_in(folder),
        pytest.raises(UserError, match="in use by another dflash2-eval .* another eval.output_dir"),
    ):
        cli.evaluate(evaluation)
    assert not (folder / "report.json").exists()
    assert cli.evaluate(evaluation) == 0


def test_an_interrupted_evaluation_continues_and_a_finished_one_decodes_nothing(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    real = measure.generate

    def counted(model: object, drafter: object, prompt_ids: list[int], *rest: object) -> object:
        calls.append(prompt_ids)
        if len(calls) == 4:  # warm-up, two passes of the first prompt, then the second prompt
            raise KeyboardInterrupt
        return real(model, drafter, prompt_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        cli.evaluate(evaluation)
    assert cli.evaluate(evaluation) == 0
    first_prompt = [1, 7, 30]
    assert calls.count(first_prompt) == 3, "the first prompt was measured once, and warmed up with once"
    num_calls = len(calls)
    assert cli.evaluate(evaluation) == 0
    assert len(calls) == num_calls
    report = EvalReport.from_json(json.loads((Path(evaluation.eval.output_dir) / "report.json").read_text()))
    assert report.equality is not None and report.equality.prompts_equal == NUM_PROMPTS
    assert report.greedy.counts.output_tokens == report.baseline.output_tokens  # type: ignore[union-attr]
    assert report.sampled is not None and report.sampled.counts.prompts == NUM_PROMPTS
    assert report.protocol["stop_ids"] == [93, 94]
    assert (Path(evaluation.eval.output_dir) / "acceptance.png").exists()


def test_prompts_longer_than_the_context_are_counted_shown_and_in_no_mean(evaluation: RunConfig) -> None:
    path = Path(evaluation.data.root) / "holdout.jsonl"
    folder, rows = Path(evaluation.eval.output_dir), path.read_text()
    assert cli.evaluate(evaluation) == 0
    before = EvalReport.from_json(json.loads((folder / "report.json").read_text()))
    room = 128 - evaluation.eval.max_new_tokens - 3  # the target's context, less the answer and one block
    for length in (room, room + 1, 200):  # the first one just fits
        rows += json.dumps({"prompt_id": f"of {length}", "prompt_ids": [7] * length}) + "\n"
    path.write_text(rows)
    assert cli.evaluate(evaluation) == 0
    report = EvalReport.from_json(json.loads((folder / "report.json").read_text()))
    assert (report.greedy.counts.prompts, report.too_long, report.protocol["prompts"]) == (4, 2, 6)
    assert report.greedy.per_request[:3] == before.greedy.per_request
    assert [(cell.requests.asked, cell.requests.too_long) for cell in read_run(folder).cells] == 3 * [(4, 2)]
    for name in ("report.md", "report.html"):
        assert "2 prompts do not fit the context of 128 tokens" in (folder / name).read_text()
    path.write_text(rows.splitlines()[-1] + "\n")
    with pytest.raises(ConfigError, match="none of the 1 prompts of hold-out, the shortest of 200 tokens"):
        cli.evaluate(evaluation)


def test_another_thinking_mode_than_that_of_training_stands_in_every_form_of_the_report(evaluation: RunConfig) -> None:
    record = {"source": {"training": {"cache": {"enable_thinking": True}}}}
    (Path(evaluation.export.output_dir) / "run.json").write_text(json.dumps(record))
    evaluation.data.enable_thinking = False
    assert cli.evaluate(evaluation) == 0
    folder, words = (
        Path(evaluation.eval.output_dir),
        "Measured with enable_thinking=False, but trained on text with True",
    )
    assert f"**{words}.**" in (folder / "report.md").read_text()
    assert words in (folder / "report.html").read_text()
    assert read_run(folder).labels == [f"{words}."]


def test_ranks_share_the_prompts_and_the_first_reports_them_all(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train.evaluate import ranks

    monkeypatch.setattr(ranks.Ranks, "wait", lambda self: None)
    for rank in (1, 0):  # the last to finish is the first rank
        me = ranks.Ranks(rank=rank, count=2, device=torch.device("cpu"))
        monkeypatch.setattr(ranks, "open_ranks", lambda me=me, **_: me)
        assert cli.evaluate(evaluation) == 0
    folder = Path(evaluation.eval.output_dir)
    lines = [len(path.read_text().splitlines()) - 1 for path in sorted(folder.glob("results-*.jsonl"))]
    assert len(lines) == 2 and min(lines) > 0 and sum(lines) == NUM_PROMPTS, "each prompt is in one rank's file"
    report = EvalReport.from_json(json.loads((folder / "report.json").read_text()))
    assert report.equality is not None and report.equality.prompts_equal == NUM_PROMPTS


@pytest.mark.slow
def test_two_processes_share_an_evaluation_and_one_continues_it(evaluation: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_plain(evaluation)))
    finish(fork_ranks_of("tests.integration.run_evaluation", [str(path)], 2))
    folder = Path(evaluation.eval.output_dir)
    first = json.loads((folder / "report.json").read_text())
    results = sorted(folder.glob("results-*.jsonl"))
    assert len(results) == 2
    whole = results[1].read_bytes()
    results[1].write_bytes(whole[: whole.rindex(b"{") + 9])  # the second rank was killed while it wrote
    finish(fork_ranks_of("tests.integration.run_evaluation", [str(path)], 1))
    again = EvalReport.from_json(json.loads((folder / "report.json").read_text()))
    assert again.greedy.counts == EvalReport.from_json(first).greedy.counts
    assert again.equality is not None and again.equality.prompts_equal == NUM_PROMPTS


def test_a_wrongly_accepted_token_fails_the_evaluation_and_is_named(
    evaluation: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def accept_one(draft_ids: torch.Tensor, target_logits: torch.Tensor) -> Verdict:
        num_accepted = min(1, draft_ids.shape[1])  # plain decoding has no drafts
        return Verdict(torch.tensor([num_accepted]), target_logits[:, num_accepted].argmax(dim=-1))

    monkeypatch.setattr(loop, "verify_greedy", accept_one)
    assert cli.evaluate(evaluation) == cli.EXIT_NOT_EQUAL
    assert "FAILED p0: first difference at output token 1" in capsys.readouterr().out
    report = EvalReport.from_json(json.loads((Path(evaluation.eval.output_dir) / "report.json").read_text()))
    assert report.equality is not None and report.equality.largest_gap > 0.5


def test_a_drafter_that_is_not_there_is_refused_with_the_next_step(evaluation: RunConfig) -> None:
    (Path(evaluation.export.output_dir) / "mask_embedding.pt").unlink()
    with pytest.raises(ConfigError, match="mask_embedding.pt is missing. Run dflash2-export"):
        cli.evaluate(evaluation)


def test_drafting_more_than_the_exported_block_allows_is_refused(evaluation: RunConfig) -> None:
    evaluation.eval.num_drafted = 4
    with pytest.raises(ConfigError, match="block_size 4 allows 3 at most"):
        cli.evaluate(evaluation)
