"""Measuring a server over HTTP: figures are exact; what goes wrong is an error or counted, never a wrong mean."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash2_train import provenance
from dflash2_train.config import ConfigError, EvalTaskConfig, RunConfig
from dflash2_train.evaluate import cli
from dflash2_train.evaluate.holdout import load_holdout, prompts_hash
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.runs import Acceptance, Cell, EvalRun
from dflash2_train.evaluate.server import cell as cell_module
from dflash2_train.evaluate.server.chat_ids import open_renderer
from dflash2_train.evaluate.server.connection import ServerError
from dflash2_train.evaluate.server.counters import CounterError, read_vllm
from dflash2_train.evaluate.server.exposition import parse_samples
from dflash2_train.evaluate.server.run import measure_server, over_limit, run_folder
from dflash2_train.evaluate.tasks import load_task, load_tasks
from tests.counting_server import MODEL, CountingServer, CountingSglang, accepted_of
from tests.toy_target import PLAIN_TEMPLATE, write_tokenizer

PROMPTS = [[5 * number + 1, 7, 30 + number, *range(number % 3)] for number in range(9)]
K = 3


@pytest.fixture
def config(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The tiny experiment with nine hold-out prompts, in server mode; the address is set by the test."""
    monkeypatch.setattr(cell_module, "MAX_READINGS", 8)
    monkeypatch.setattr(provenance, "git_state", lambda: {"commit": None, "uncommitted_sha256": None})
    root = Path(tiny_config.data.root)
    root.mkdir(parents=True)
    rows = [{"prompt_id": f"p{number}", "prompt_ids": ids} for number, ids in enumerate(PROMPTS)]
    (root / "holdout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = tiny_config.eval
    settings.mode = "server"
    settings.max_new_tokens = 40
    settings.server.concurrency = [2]
    settings.server.settle_s = 0.01
    settings.server.backoff_s = 0.01
    settings.server.hardware = "2x test"
    return tiny_config


def measured(config: RunConfig, server: CountingServer, **changes: Any) -> EvalRun:
    """The run of ``server`` with keys of eval.server changed."""
    config.eval.server.url = server.url
    for key, value in changes.items():
        setattr(config.eval.server, key, value)
    config.check()
    return measure_server(config)


def expected(prompts: list[list[int]]) -> Acceptance:
    """What the rounds of ``prompts`` add up to."""
    rounds = [accepted for prompt in prompts for accepted in accepted_of(prompt, K)]
    return Acceptance(
        rounds=len(rounds),
        proposed=K * len(rounds),
        accepted=sum(rounds),
        accepted_per_position=[sum(accepted > place for accepted in rounds) for place in range(K)],
    )


def only(run: EvalRun) -> Cell:
    (cell,) = run.cells
    return cell


def test_figures_are_differences_of_counters_and_hold_nothing_of_earlier_or_of_the_warm_up(config: RunConfig) -> None:
    with CountingServer() as server:
        cell = only(measured(config, server))
        asked = [body["prompt"] for body in server.bodies]
    assert cell.acceptance == expected(PROMPTS)
    assert cell.acceptance.length == 1 + cell.acceptance.accepted / cell.acceptance.rounds
    assert cell.output_tokens == sum(1 + sum(one) + len(one) for one in (accepted_of(p, K) for p in PROMPTS))
    assert cell.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert (cell.requests.asked, cell.requests.answered, cell.requests.failed) == (9, 9, {})
    assert len(asked) == 2 + len(PROMPTS), "two requests of warm-up, then every prompt once"
    assert cell.prefix_hit_rate == 0.0
    assert cell.tokens_per_second == pytest.approx(cell.output_tokens / cell.seconds)


def test_counts_that_come_after_the_answer_are_waited_for(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "MAX_READINGS", 60)
    with CountingServer(lag_s=0.1) as server:
        cell = only(measured(config, server))
    assert cell.acceptance == expected(PROMPTS)


def test_every_concurrency_is_kept_and_measured_on_its_own(config: RunConfig) -> None:
    with CountingServer(delay_s=0.05) as server:
        run = measured(config, server, concurrency=[1, 4])
        assert server.most_busy == 4
    assert [cell.concurrency for cell in run.cells] == [1, 4]
    assert run.cells[0].acceptance == run.cells[1].acceptance == expected(PROMPTS)
    assert run.cells[0].seconds > run.cells[1].seconds


def test_counts_that_answers_carry_agree_with_the_counters_and_give_rows_a_prompt(config: RunConfig) -> None:
    with CountingServer(tells_requests=True) as server:
        cell = only(measured(config, server))
    assert cell.acceptance == expected(PROMPTS)
    assert cell.per_request == [
        [number, len(accepted_of(prompt, K)), sum(accepted_of(prompt, K)), len(prompt)]
        for number, prompt in enumerate(PROMPTS)
    ]
    assert cell.labels == []


def test_the_hold_out_has_the_hash_that_the_runner_gives_it(config: RunConfig) -> None:
    (task,) = load_tasks(config)
    assert task.prompts_sha256 == prompts_hash(load_holdout(Path(config.data.root)))


def without_salt(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Request bodies in an order of their own; those in flight together arrive in any."""
    return sorted(({**body, "cache_salt": ""} for body in bodies), key=lambda body: str(body["prompt"]))


def test_a_plain_server_is_the_baseline_with_the_same_prompts_and_limits(config: RunConfig) -> None:
    with CountingServer() as server:
        drafted = only(measured(config, server))
        sent = without_salt(server.bodies)
    with CountingServer(num_drafted=None) as server:
        run = measured(config, server, method="autoregressive")
        plain_sent = without_salt(server.bodies)
    plain = only(run)
    assert plain.acceptance is None
    assert plain.output_tokens == 5 * len(PROMPTS)
    assert plain.prompts_sha256 == drafted.prompts_sha256
    assert sent == plain_sent
    assert run.protocol["num_drafted"] is None


def test_every_sampling_field_is_sent_so_that_no_server_default_decides(config: RunConfig) -> None:
    config.eval.temperature, config.eval.top_p, config.eval.min_p = 1.0, 0.95, 0.02
    with CountingServer() as server:
        measured(config, server)
        body = server.bodies[-1]
        salts = [body["cache_salt"] for body in server.bodies]
    assert {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.02,
        "repetition_penalty": 1.0,
    }
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (40, False, False)
    assert len(set(salts)) == len(salts), "a shared salt would let prompts meet in the prefix cache"


UNFIT: list[tuple[str, Callable[[], CountingServer], dict[str, Any], str]] = [
    ("no speculation", lambda: CountingServer(num_drafted=None), {}, "does not speculate"),
    ("a baseline that drafts", CountingServer, {"method": "autoregressive"}, "speculates with K=3"),
    (
        "K above block_size - 1",
        lambda: CountingServer(num_drafted=4, positions=[9, 8, 7, 6]),
        {},
        "block_size 4 trained 3",
    ),
    ("no counters page", lambda: CountingServer(has_metrics=False), {}, "there is no such page"),
    ("another model", CountingServer, {"model": "other"}, "serves \\['toy'\\]"),
    ("busy with others", lambda: CountingServer(running=2), {}, "busy with 2 requests"),
]


@pytest.mark.parametrize(("make", "changes", "words"), [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_a_server_that_cannot_be_measured_is_refused_with_the_reason(
    config: RunConfig, make: Callable[[], CountingServer], changes: dict[str, Any], words: str
) -> None:
    with make() as server, pytest.raises((ServerError, CounterError), match=words):
        measured(config, server, **changes)
    assert not (run_folder(config) / "report.json").exists()


def test_another_k_than_the_protocol_names_is_refused(config: RunConfig) -> None:
    config.eval.num_drafted = 2
    with CountingServer() as server, pytest.raises(ServerError, match="drafts K=3, eval.num_drafted=2"):
        measured(config, server)


def test_a_metrics_page_without_this_models_counters_is_refused() -> None:
    with pytest.raises(CounterError, match="no counter vllm:generation_tokens_total of model 'toy'"):
        read_vllm('vllm:generation_tokens_total{model_name="other"} 5\n', MODEL, "http://x")
    with pytest.raises(CounterError, match="not a line of Prometheus metrics"):
        read_vllm("<html>a proxy</html>\n", MODEL, "http://x")


def test_engines_of_one_server_are_added_up_and_labels_may_hold_anything() -> None:
    page = (
        'vllm:generation_tokens_total{engine="0",model_name="toy"} 5.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="toy"} 7.0\n'
        'other{text="a \\"b\\", {c}"} NaN\n'
    )
    assert read_vllm(page, MODEL, "http://x").output_tokens == 12
    assert list(parse_samples(page))[-1].labels == {"text": 'a "b", {c}'}


@pytest.mark.parametrize("start_time", [1000.0, None], ids=["start time told", "start time not told"])
def test_a_restart_half_way_voids_the_measurement(config: RunConfig, start_time: float | None) -> None:
    with CountingServer(start_time=start_time) as server:

        def restart_once(number: int, _body: dict[str, Any]) -> None:
            if number == 6:
                server.restart()

        server.fault = restart_once
        with pytest.raises(CounterError, match="restarted during the measurement"):
            measured(config, server)
    assert not (run_folder(config) / "report.json").exists()


def test_requests_of_others_void_figures_that_rest_on_counters(config: RunConfig) -> None:
    with CountingServer() as server:

        def another_client(number: int, _body: dict[str, Any]) -> None:
            if number == 6:
                server.finished += 1
                server.rounds += 40

        server.fault = another_client
        with pytest.raises(ServerError, match="1 requests of others ran during the measurement"):
            measured(config, server)
        server.tells_requests, server.fault = True, lambda number, body: another_client(number - len(PROMPTS) - 2, body)
        cell = only(measured(config, server))
    assert cell.acceptance == expected(PROMPTS), "the answers' own counts stand in"
    assert any("throughput is not the server's own" in label for label in cell.labels)


def test_passing_faults_are_tried_again_and_every_try_is_on_record(config: RunConfig) -> None:
    def refuse_twice(number: int, _body: dict[str, Any]) -> tuple[int, bytes] | None:
        return {4: (429, b"slow down"), 5: (503, b"loading")}.get(number)

    with CountingServer(fault=refuse_twice) as server:
        run = measured(config, server, tries=3)
    cell = only(run)
    assert (cell.requests.answered, cell.requests.retried, cell.requests.failed) == (9, 2, {})
    assert cell.acceptance == expected(PROMPTS)
    assert "the server's counters include 2 tries that failed" in cell.labels
    lines = [json.loads(line) for line in next(run_folder(config).glob("requests-*.jsonl")).read_text().splitlines()]
    assert sorted(cause for line in lines for cause in line["causes"]) == ["HTTP 429", "HTTP 503"]
    assert sum(line["tries"] for line in lines) == 11


def test_failures_are_counted_by_cause_never_averaged_over_and_fail_the_command(config: RunConfig) -> None:
    def fail_some(number: int, _body: dict[str, Any]) -> tuple[int, bytes] | None:
        if number == 5:
            time.sleep(1.6)  # longer than the client waits
        return {3: (500, b"boom"), 4: (400, b"no"), 6: (200, b"<html>"), 7: (200, b'{"choices": []}')}.get(number)

    with CountingServer(fault=fail_some) as server:
        run = measured(config, server, timeout_s=1.0)
        cell = only(run)
    assert cell.requests.asked == 9
    assert cell.requests.answered == 4
    assert cell.requests.failed == {
        "HTTP 400": 1,
        "HTTP 500": 1,
        "no answer in the response": 1,
        "not JSON": 1,
        "timeout": 1,
    }
    assert cell.requests.retried == 0
    assert "5 of 9 requests failed" in cell.labels
    assert "5 of 9 requests failed" in over_limit(run, config.eval)[0]
    config.eval.server.max_failed_share = 0.6
    assert over_limit(run, config.eval) == []


def test_a_server_that_answers_nothing_is_an_error(config: RunConfig) -> None:
    with (
        CountingServer(fault=lambda *_: (500, b"boom")) as server,
        pytest.raises(ServerError, match="none of 2 requests of the warm-up was answered, the last: HTTP 500"),
    ):
        measured(config, server)
    config.eval.server.url = "http://127.0.0.1:9"
    with pytest.raises(ServerError, match="Start the server, or correct eval.server.url"):
        measure_server(config)


def test_a_denied_request_ends_the_run_at_once(config: RunConfig) -> None:
    with (
        CountingServer(fault=lambda *_: (401, b"no key")) as server,
        pytest.raises(ServerError, match="HTTP 401.*api_key_env"),
    ):
        measured(config, server, tries=5)
    assert len(server.bodies) <= 2


def test_prompts_that_do_not_fit_the_context_are_counted_and_not_sent(config: RunConfig) -> None:
    with CountingServer(max_model_len=44) as server:  # 40 to answer with, prompts of 3 to 5 tokens
        cell = only(measured(config, server))
        sent = [len(body["prompt"]) for body in server.bodies]
    short = [prompt for prompt in PROMPTS if len(prompt) <= 4]
    assert (cell.requests.too_long, cell.requests.asked) == (len(PROMPTS) - len(short), len(short))
    assert cell.acceptance == expected(short)
    assert max(sent[2:]) == 4
    with CountingServer(max_model_len=20) as server, pytest.raises(ServerError, match="too long for the context of 20"):
        measured(config, server)


def test_a_key_reaches_the_server_and_no_file(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "s3cret-value")
    with CountingServer() as server:
        measured(config, server, api_key_env="TEST_KEY")
        assert server.headers[-1]["Authorization"] == "Bearer s3cret-value"
    for path in Path(config.eval.output_dir).rglob("*"):
        assert not path.is_file() or b"s3cret-value" not in path.read_bytes()
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ConfigError, match="that variable is not set"):
        measure_server(config)


class TalkativeServer(CountingServer):
    """A vLLM in development mode, which tells everything about itself."""

    def page(self, path: str) -> tuple[int, bytes]:
        if not path.startswith("/server_info"):
            return super().page(path)
        info = {
            "vllm_config": {
                "speculative_config": {"method": "dflash", "model": "ours", "num_speculative_tokens": 3},
                "parallel_config": {"tensor_parallel_size": 4, "master_ip": "10.1.2.3"},
                "model_config": {"model": "toy", "hf_token": "s3cret-value"},
            },
            "vllm_env": {"VLLM_API_ACCESS": "s3cret-value"},
            "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA B300\nGPU 1: NVIDIA B300"},
        }
        return 200, json.dumps(info).encode()


def test_hardware_and_flags_are_read_from_a_server_that_tells_and_nothing_else_of_it_is_kept(
    config: RunConfig,
) -> None:
    with TalkativeServer() as server:
        run = measured(config, server, hardware="")
    assert run.protocol["hardware"] == "2x NVIDIA B300"
    assert run.protocol["flags"] == {
        "model_config": {"model": "toy"},
        "parallel_config": {"tensor_parallel_size": 4},
        "speculative_config": {"method": "dflash", "model": "ours", "num_speculative_tokens": 3},
    }
    text = (run_folder(config) / "report.json").read_text()
    assert "s3cret-value" not in text and "10.1.2.3" not in text
    assert run.labels == []


def test_finished_measurements_are_kept_while_the_same_server_process_runs(config: RunConfig) -> None:
    with CountingServer() as server:
        first = measured(config, server, concurrency=[1])
        asked = len(server.bodies)
        again = measured(config, server, concurrency=[1])
        assert len(server.bodies) == asked
        assert again.cells == first.cells
        server.restart()  # another process, which may have loaded another drafter
        measured(config, server, concurrency=[1])
        assert len(server.bodies) == 2 * asked


def test_a_result_under_other_conditions_is_not_overwritten(config: RunConfig) -> None:
    with CountingServer() as server:
        measured(config, server)
        before = (run_folder(config) / "report.json").read_bytes()
        config.eval.max_new_tokens = 30
        with pytest.raises(ConfigError, match="max_new_tokens 40 -> 30.*Name another label"):
            measured(config, server)
        assert (run_folder(config) / "report.json").read_bytes() == before
        assert len(measured(config, server, label="shorter").cells) == 1


def test_a_gauge_left_by_an_aborted_request_does_not_void_the_measurement(config: RunConfig) -> None:
    with CountingServer() as server:

        def give_up_the_last(number: int, _body: dict[str, Any]) -> tuple[int, bytes] | None:
            if number < len(PROMPTS):
                return None
            server.running = 1
            return 500, b"aborted"

        server.fault = give_up_the_last
        cell = only(measured(config, server, concurrency=[1]))
    assert cell.requests.failed == {"HTTP 500": 1}
    assert cell.acceptance == expected(PROMPTS[:-1])


def test_an_address_with_a_password_is_refused_and_not_repeated(config: RunConfig) -> None:
    config.eval.server.url = "http://user:s3cret@host:1"
    with pytest.raises(ConfigError, match="must not carry a password") as refused:
        config.check()
    assert "s3cret" not in str(refused.value)


def test_a_warm_prefix_cache_is_seen_and_said(config: RunConfig) -> None:
    with CountingServer(prefix_caching=True) as server:

        def hit(_number: int, body: dict[str, Any]) -> None:
            server.prefix_hits += 1

        server.fault = hit
        run = measured(config, server, cold_prefix_cache=False)
        assert "cache_salt" not in server.bodies[-1]
    cell = only(run)
    assert cell.prefix_hit_rate == pytest.approx(len(PROMPTS) / sum(len(prompt) for prompt in PROMPTS))
    assert any("came from the prefix cache" in label for label in cell.labels)
    assert run.protocol["prefix_caching"] == "on"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_second_turn_is_asked_with_the_answer_before_it(config: RunConfig, tmp_path: Path) -> None:
    rows = [{"question_id": 81, "turns": ["first one", "second"]}, {"question_id": 82, "turns": ["alone"]}]
    path = write_rows(tmp_path / "bench.jsonl", rows)
    config.eval.tasks = [EvalTaskConfig(name="MT", path=path, turns_column="turns")]
    with CountingServer(tells_requests=True) as server:
        cell = only(measured(config, server, template="server", concurrency=[1]))
        asked = [body["messages"] for body in server.bodies[1:]]
        assert set(server.paths) == {"/v1/chat/completions"}
    assert asked[1] == [
        {"role": "user", "content": "first one"},
        {"role": "assistant", "content": "answer to 9"},
        {"role": "user", "content": "second"},
    ]
    assert cell.requests.answered == 3
    assert [row[0] for row in cell.per_request or []] == [0, 0, 1], "both turns belong to one prompt"


def test_turns_after_a_failed_one_are_not_asked_and_counted(config: RunConfig, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "b.jsonl", [{"turns": ["one", "two", "three"]}, {"turns": ["four"]}])
    config.eval.tasks = [EvalTaskConfig(name="MT", path=path, turns_column="turns")]
    with CountingServer(fault=lambda number, _: (500, b"") if number == 1 else None) as server:
        cell = only(measured(config, server, template="server", concurrency=[1]))
        assert len(server.bodies) == 3
    assert cell.requests.failed == {"HTTP 500": 1, "not asked, an earlier turn got no answer": 2}
    assert (cell.requests.asked, cell.requests.answered) == (4, 1)


def test_categories_are_measured_one_after_another_with_counters_of_their_own(
    config: RunConfig, tmp_path: Path
) -> None:
    rows = [{"prompt": "a" * (number + 1), "kind": ("math", "code")[number % 2]} for number in range(6)]
    path = write_rows(tmp_path / "t.jsonl", rows)
    config.eval.tasks = [EvalTaskConfig(name="T", path=path, prompt="$prompt", category_column="kind")]
    with CountingServer() as server:
        run = measured(config, server, template="server")
    assert [(cell.task, cell.category) for cell in run.cells] == [("T", "math"), ("T", "code")]
    for cell, kind in zip(run.cells, ("math", "code"), strict=True):
        assert cell.acceptance == expected([[len(row["prompt"])] for row in rows if row["kind"] == kind])


def test_sglang_answers_are_added_up_and_the_cache_is_emptied_before(config: RunConfig) -> None:
    with CountingSglang() as server:
        run = measured(config, server, engine="sglang")
        assert server.paths[2] == "/flush_cache"
        assert server.bodies[-1]["sampling_params"]["max_new_tokens"] == 40
    cell = only(run)
    assert cell.acceptance == expected(PROMPTS)
    assert len(cell.per_request or []) == len(PROMPTS)
    assert run.protocol["engine"] == "sglang 0.5.0"
    assert "do-not-keep-me" not in (run_folder(config) / "report.json").read_text()


def test_sglang_without_a_metrics_page_is_measured_and_says_what_that_hides(config: RunConfig) -> None:
    with CountingSglang(has_metrics=False) as server:
        cell = only(measured(config, server, engine="sglang"))
    assert cell.acceptance == expected(PROMPTS)
    assert any("a restart or requests of others would not be noticed" in label for label in cell.labels)


def test_counts_that_contradict_their_histogram_are_a_failed_request(config: RunConfig) -> None:
    with CountingSglang() as server:
        server.histogram = lambda counts: [*counts[:-1], counts[-1] + 1] if sum(counts) == 4 else counts
        cell = only(measured(config, server, engine="sglang"))
    sound = [prompt for prompt in PROMPTS if len(accepted_of(prompt, K)) != 4]
    assert cell.requests.failed == {"speculation counts that contradict each other": len(PROMPTS) - len(sound)}
    assert cell.acceptance == expected(sound)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([], {}, "holds no prompts"),
        ([{"question": "x"}], {"prompt": "$missing"}, "does not fit"),
        ([{"question": "x"}], {}, "no column 'prompt'"),
        ([{"prompt": "  "}], {}, "an empty prompt"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], {}, "nothing to answer"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], {}, "no role"),
        ([{"turns": []}], {"turns_column": "turns"}, "at least one entry"),
        ([{"turns": ["a", 3]}], {"turns_column": "turns"}, "must be text"),
    ],
)
def test_unusable_prompt_files_are_refused_with_place_and_reason(
    tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], words: str
) -> None:
    path = write_rows(tmp_path / "task.jsonl", rows)
    with pytest.raises(ConfigError, match=words):
        load_task(EvalTaskConfig(name="t", path=path, **settings), "eval.tasks[0]")


def test_templates_keep_braces_and_the_first_rows_are_taken(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "task.jsonl", [{"id": n, "question": f"q{n} {{x}}"} for n in range(5)])
    task = EvalTaskConfig(name="t", path=path, prompt="$question\nuse \\boxed{}, it costs $$5")
    (loaded,) = load_task(task, "eval.tasks[0]", 2)
    assert [one.opening[0]["content"] for one in loaded.conversations] == [
        "q0 {x}\nuse \\boxed{}, it costs $5",
        "q1 {x}\nuse \\boxed{}, it costs $5",
    ]
    (whole,) = load_task(task, "eval.tasks[0]")
    assert loaded.prompts_sha256 != whole.prompts_sha256


def test_a_missing_task_file_and_a_rendered_hold_out_sent_as_messages_are_refused(
    config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_task(EvalTaskConfig(name="t", path=str(tmp_path / "gone.jsonl")), "eval.tasks[0]")
    config.eval.server.template = "server"
    with pytest.raises(ConfigError, match="was rendered by dflash2-gen-data"):
        load_tasks(config)


def test_prompts_are_rendered_as_for_training_and_an_ignored_thinking_mode_is_refused(
    config: RunConfig, tmp_path: Path
) -> None:
    config.target.name = str(tmp_path / "target")
    write_tokenizer(Path(config.target.name))
    (Path(config.target.name) / "config.json").write_text('{"model_type": "llama"}')
    messages = [{"role": "user", "content": "w1 w2"}]
    assert open_renderer(config.target, None)(messages) == [0, 2, 8, 9, 1, 3]
    assert open_renderer(config.target, False)(messages) == [0, 2, 8, 9, 1, 3, 4, 5]
    with pytest.raises(ConfigError, match="refuses a conversation"):
        open_renderer(config.target, None)([{"role": "system", "content": "w1"}])
    write_tokenizer(Path(config.target.name), PLAIN_TEMPLATE)
    with pytest.raises(ConfigError, match="never reads enable_thinking"):
        open_renderer(config.target, True)


def test_the_command_writes_all_labels_side_by_side_and_the_gate_sets_the_exit_code(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config.eval.server
    with CountingServer(num_drafted=None) as server:
        settings.url, settings.method, settings.label = server.url, "autoregressive", "plain"
        assert cli.evaluate(config) == 0
    with CountingServer(tells_requests=True) as server:
        settings.url, settings.method, settings.label = server.url, "drafter", "ours"
        assert cli.evaluate(config) == 0
        folder = Path(config.eval.output_dir) / "server"
        config.eval.gate.baseline = str(folder / "ours" / "report.json")
        settings.label = "again"
        assert cli.evaluate(config) == 0
    text = (folder / "report.md").read_text()
    assert text.split("## Throughput")[1].split("##")[0].count("x)") == 2, "both drafting runs against the plain one"
    assert (folder / "report.html").exists() and (folder / "plots.png").exists()
    assert read_run(folder / "plain").cells[0].acceptance is None
    capsys.readouterr()
