"""Capture: the right layers, the right teacher, and states that do not belong to the tokens never reach the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from data_gen import capture as stage
from data_gen.backends.base import (
    CapturedStates,
    CaptureRequest,
    GenerationRequest,
    Heartbeat,
    SamplingSettings,
    take_from,
)
from data_gen.backends.head import load_head, place_rows, top_rows
from data_gen.backends.hf import HfCapturer, HfGenerator, choose_tokens
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.reader import CaptureReader
from data_gen.capture_rows import CaptureTally, RowFailure, capture_rows, refuse_failure
from dflash2_train.config import RunConfig, TargetConfig
from dflash2_train.provenance import hash_tokenizer_files
from tests.toy_target import END, WORDS, write_model

LAYERS, HIDDEN, TOP_K = 4, 128, 20
TAPS = [0, 2, 3]  # the last layer too: its stream has no final norm
IDS = [0, 7, 8, 9, 10, 11, 12, 1]
PROMPT = 4


class Silent:
    def update(self, done: int, facts: str = "") -> None:
        pass


@contextlib.contextmanager
def no_display(_title: str, _total: int, _before: int) -> Iterator[Silent]:
    yield Silent()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_model(path, layers=LAYERS)
    return path


@pytest.fixture
def config(tiny_config: RunConfig, folder: Path) -> RunConfig:
    target = TargetConfig(
        name=str(folder),
        license="mit",
        dtype="float32",
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=len(WORDS),
    )
    drafter = dataclasses.replace(tiny_config.drafter, target_layer_ids=TAPS)
    data = dataclasses.replace(tiny_config.data, backend="hf", teacher_top_k=TOP_K)
    return dataclasses.replace(tiny_config, target=target, drafter=drafter, data=data)


def beat() -> None:
    pass


def test_teacher_rows_stand_where_a_completion_token_is_read_or_predicted() -> None:
    full = (torch.ones(5, 3, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.float16), torch.ones(5))
    ids, logprobs, normaliser = place_rows(full, first=3, length=8)
    assert ids[:3].eq(0).all() and normaliser[:3].eq(0).all() and logprobs[:3].eq(-torch.inf).all()
    assert ids[3:].eq(1).all() and normaliser[3:].eq(1).all()


def test_a_head_that_should_be_stored_is_never_replaced_by_the_embedding(tmp_path: Path) -> None:
    """Untied without a stored head: refused. Tied: the embedding, even where a head lies beside it."""
    from safetensors.torch import save_file

    tables = {"model.embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.ones(3, 2)}
    save_file(tables, tmp_path / "model.safetensors")
    assert [float(load_head(tmp_path, tied)[0, 0]) for tied in (True, False, None)] == [0.0, 1.0, 1.0]
    save_file({"model.embed_tokens.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert load_head(tmp_path, False) is None
    assert load_head(tmp_path, None) is not None


def write_conversations(config: RunConfig, rows: int = 5) -> ConversationStore:
    store = ConversationStore(Path(config.data.root))
    store.open({"target": "toy", "backend": "vllm", "drop_cut": False})
    for shard, begin in enumerate(range(0, rows, 2)):
        store.write(shard, [make_row(number) for number in range(begin, min(begin + 2, rows))])
    return store


def make_row(number: int) -> dict[str, Any]:
    text = dict.fromkeys(("messages", "source", "license", "completion_text", "target", "revision", "target_hash"), "")
    reals = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return {
        **text,
        **dict.fromkeys(reals, 1.0),
        "row_id": f"p{number}-0",
        "prompt_id": f"p{number}",
        "repeat": 0,
        "turn": 0,
        "tools": "",
        "prompt_ids": IDS[:PROMPT],
        "completion_ids": [*IDS[PROMPT:-1], 20 + number, END],
        "finish_reason": "stop",
        "dropped": "cut by max_tokens" if number == 1 else "",
        "seed": 0,
        "top_k": 0,
        "max_tokens": 8,
        "stop_ids": [END],
        "enable_thinking": None,
    }


def run(config: RunConfig, folder: Path) -> stage.CaptureTotals:
    return stage.capture(config, folder, no_display)


def test_the_stage_stores_every_kept_row_with_its_own_tokens(config: RunConfig, folder: Path) -> None:
    write_conversations(config)
    totals = run(config, folder)
    reader = CaptureReader(Path(config.data.root) / "capture")
    assert [row.sample_id for row in reader.index] == ["p0-0", "p2-0", "p3-0", "p4-0"], "the dropped row is left out"
    for index, row in enumerate(reader.index):
        sample = reader.read(index)
        number = int(row.sample_id[1])
        assert sample.input_ids.tolist() == [*IDS[:-1], 20 + number, END]
        assert sample.loss_mask.tolist() == [False] * PROMPT + [True] * 5
        filled = torch.isfinite(sample.teacher_logprobs).all(dim=-1)
        assert filled.tolist() == [False] * (PROMPT - 1) + [True] * 6
    assert totals.next_equal == totals.samples == 4


def test_the_stage_continues_and_a_finished_one_starts_no_engine(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_conversations(config)
    run(config, folder)
    (Path(config.data.root) / "capture" / "shard-00001.safetensors").unlink()
    again = run(config, folder)
    assert (again.skipped_shards, again.samples) == (2, 2)
    monkeypatch.setattr(stage, "open_capturer", lambda *_: pytest.fail("an engine was started"))
    assert run(config, folder).skipped_shards == 3


def test_other_taps_are_refused_with_the_difference(config: RunConfig, folder: Path) -> None:
    write_conversations(config)
    run(config, folder)
    config.drafter.target_layer_ids = [0, 1, 3]
    with pytest.raises(CacheIntegrityError, match=r"target_layer_ids: \[0, 2, 3\] -> \[0, 1, 3\]"):
        run(config, folder)


def test_capture_without_conversations_says_what_to_run(config: RunConfig, folder: Path) -> None:
    with pytest.raises(CacheIntegrityError, match="dflash2-gen-data"):
        run(config, folder)


class Faulty:
    """A backend that spoils the states of ``row`` by ``spoil`` (None: never answers), the first ``times`` times."""

    def __init__(self, inner: HfCapturer, spoil: Callable[[CapturedStates], CapturedStates | None], row: str) -> None:
        self.inner, self.spoil, self.row, self.times = inner, spoil, row, 99
        self.asked: list[str] = []

    def capture(self, requests: Iterable[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        def noted() -> Iterator[CaptureRequest]:
            for request in requests:
                self.asked.append(request.request_id)
                yield request

        for states in self.inner.capture(noted(), heartbeat):
            if self.row not in states.request_id or self.times == 0:
                yield states
                continue
            self.times -= 1
            spoiled = self.spoil(states)
            if spoiled is not None:
                yield spoiled

    def close(self) -> None:
        pass


SPOILS: dict[str, tuple[Callable[[CapturedStates], CapturedStates | None], str]] = {
    "many rows too few": (lambda states: replace(states, tap_hidden=states.tap_hidden[6:]), "tap_hidden has 3 rows"),
    "one row too few": (lambda states: replace(states, tap_hidden=states.tap_hidden[:-1]), "tap_hidden has 8 rows"),
    "other tokens": (lambda states: replace(states, input_ids=states.input_ids[::-1]), "states of other tokens"),
    "one id too few": (lambda states: replace(states, input_ids=states.input_ids[:-1]), "states of other tokens"),
    "a prefix hit": (lambda states: replace(states, cached_tokens=4), "prefix cache"),
    "values not finite": (lambda states: replace(states, tap_hidden=states.tap_hidden / 0), "not finite"),
    "zero rows": (lambda states: replace(states, tap_hidden=states.tap_hidden * 0), "zeros"),
    "no answer": (lambda _: None, "no states"),
}


def faulty(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, row: str) -> Faulty:
    backend = Faulty(HfCapturer(folder, config.target, config.data, TAPS), SPOILS[spoil][0], row)
    monkeypatch.setattr(stage, "open_capturer", lambda *_: backend)
    return backend


@pytest.mark.parametrize("spoil", SPOILS)
def test_states_that_do_not_belong_to_the_tokens_are_asked_for_once_more(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    write_conversations(config)
    backend = faulty(config, folder, monkeypatch, spoil, "p3-0")
    backend.times = 1
    totals = run(config, folder)
    assert backend.asked.count("p3-0") == backend.asked.count("p3-0#2") == 1, "through a fresh request"
    assert (totals.samples, totals.tally.retried, totals.tally.failed) == (4, 1, 0)
    assert sum(totals.tally.faults.values()) == 1
    assert SPOILS[spoil][1] in next(iter(totals.tally.faults))
    reader = CaptureReader(Path(config.data.root) / "capture")
    assert [row.sample_id for row in reader.index] == ["p0-0", "p2-0", "p3-0", "p4-0"]


@pytest.mark.parametrize("spoil", ["one row too few", "no answer"])
def test_a_row_that_fails_twice_is_listed_and_left_out_of_a_whole_shard(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    config.data.max_failed_share = 0.5
    write_conversations(config)
    faulty(config, folder, monkeypatch, spoil, "p3-0")
    totals = run(config, folder)
    root = Path(config.data.root) / "capture"
    assert [row.sample_id for row in CaptureReader(root).index] == ["p0-0", "p2-0", "p4-0"]
    (line,) = (root / "failures.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["row_id"], record["attempts"], totals.failed) == ("p3-0", 2, 1)
    assert SPOILS[spoil][1] in record["reason"]
    monkeypatch.setattr(stage, "open_capturer", lambda *_: pytest.fail("an engine was started"))
    assert run(config, folder).failed == 1, "a listed row is not asked for again"
    next(root.glob("shard-00001*")).unlink()
    monkeypatch.undo()
    again = run(config, folder)
    assert (again.samples, again.failed) == (2, 0), "with its shard gone the row is tried again"


def test_more_failed_rows_than_the_limit_end_the_stage_and_leave_no_partial_shard(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_conversations(config)
    faulty(config, folder, monkeypatch, "one row too few", "-0")
    with pytest.raises(CacheIntegrityError, match=r"max_failed_share=0.01: 1 of 4 .* as p0-0: tap_hidden has 8 rows"):
        run(config, folder)
    assert not list((Path(config.data.root) / "capture").glob("shard-*"))


def job(config: RunConfig, index: int) -> RunConfig:
    return replace(config, data=replace(config.data, num_shards=2, shard_index=index))


def contents(config: RunConfig) -> dict[str, dict[str, str]]:
    """Sample names and digest of every shard."""
    found = {}
    for path in (Path(config.data.root) / "capture").glob("shard-*"):
        with safe_open(path, framework="pt") as file:
            found[path.name] = dict(file.metadata())
    return found


def test_jobs_capture_each_shard_once_and_together_what_one_process_does(config: RunConfig, folder: Path) -> None:
    write_conversations(config)
    assert [run(job(config, index), folder).samples for index in (1, 0)] == [2, 2]
    found = contents(config)
    shutil.rmtree(Path(config.data.root) / "capture")
    assert run(config, folder).samples == 4
    assert contents(config) == found


def test_jobs_that_list_failed_rows_keep_those_of_each_other(tmp_path: Path) -> None:
    first, second = stage.FailedRows(tmp_path), stage.FailedRows(tmp_path)
    first.add(RowFailure(row_id="a", reason="lost", attempts=2))
    second.add(RowFailure(row_id="b", reason="lost", attempts=2))
    second.forget({"b"})
    first.add(RowFailure(row_id="c", reason="lost", attempts=2))
    assert sorted(stage.FailedRows(tmp_path).rows) == ["a", "c"]


def test_a_shard_that_lacks_a_conversation_is_not_taken_for_done(config: RunConfig, folder: Path) -> None:
    store = write_conversations(config)
    run(config, folder)
    rows = store.read(1)
    rows[0]["row_id"] = "new-0"
    store.path(1).unlink()
    store.write(1, rows)
    with pytest.raises(CacheIntegrityError, match="shard-00001.*as new-0"):
        run(config, folder)


def test_a_target_that_did_not_write_the_conversations_is_refused(config: RunConfig, folder: Path) -> None:
    store = write_conversations(config)
    content = {**store.content(), "target_hash": "0" * 64, "tokenizer_hash": hash_tokenizer_files(folder)}
    with pytest.raises(CacheIntegrityError, match="target_hash of"):
        stage.capture_content(config, content)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda states: replace(states, next_id=(states.next_id + 1) % 96), id="another first choice"),
        pytest.param(lambda states: replace(states, next_logprob=states.next_logprob - 0.7), id="a missing scale"),
    ],
)
def test_a_teacher_that_contradicts_the_engine_ends_the_stage_before_any_work(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[CapturedStates], CapturedStates]
) -> None:
    write_conversations(config)
    backend = Faulty(HfCapturer(folder, config.target, config.data, TAPS), change, "")
    monkeypatch.setattr(stage, "open_capturer", lambda *_: backend)
    with pytest.raises(CacheIntegrityError, match="final norm"):
        run(config, folder)
    assert all(name.startswith("probe") for name in backend.asked)


class Shuffled(Faulty):
    """Gives states back in another order, as an engine does."""

    def capture(self, requests: Iterable[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        yield from sorted(self.inner.capture(requests, heartbeat), key=lambda states: states.request_id, reverse=True)


def test_teacher_rows_are_those_of_the_full_softmax_with_and_without_a_buffer() -> None:
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = logits.clone()
    exact = torch.log_softmax(logits.double(), dim=-1)
    for buffer in (None, torch.full((5, 300), torch.nan)):
        ids, logprobs, normaliser = top_rows(logits, TOP_K, buffer)
        torch.testing.assert_close(logprobs.double(), exact.gather(1, ids.long()), atol=4e-3, rtol=0)
        torch.testing.assert_close(normaliser.double(), logits.double().logsumexp(-1), atol=1e-4, rtol=0)
        assert torch.equal(logprobs, exact.topk(TOP_K).values.half())
    assert torch.equal(logits, kept)


def test_rows_come_back_in_their_order_whatever_the_engines_order_is(config: RunConfig, folder: Path) -> None:
    backend = Shuffled(HfCapturer(folder, config.target, config.data, TAPS), lambda states: states, "")
    tally = CaptureTally()
    samples = capture_rows(backend, [make_row(n) for n in (3, 1, 2)], on_failure=lambda _: None, tally=tally)
    assert [sample.sample_id for sample in samples] == ["p3-0", "p1-0", "p2-0"]
    assert (tally.samples, tally.agreeing) == (3, 3)


def test_a_caller_that_can_leave_no_row_out_hears_row_and_reason(config: RunConfig, folder: Path) -> None:
    backend = Faulty(HfCapturer(folder, config.target, config.data, TAPS), SPOILS["no answer"][0], "p2")
    rows = [make_row(number) for number in (1, 2, 3)]
    with pytest.raises(CacheIntegrityError, match="p2-0: no states after 2 attempts: the engine returned no states"):
        list(capture_rows(backend, rows, on_failure=refuse_failure))


def test_a_row_without_a_completion_is_named(config: RunConfig, folder: Path) -> None:
    backend = HfCapturer(folder, config.target, config.data, TAPS)
    with pytest.raises(ValueError, match="p1-0 has no prompt or no completion"):
        list(capture_rows(backend, [{**make_row(1), "completion_ids": []}], on_failure=refuse_failure))


def test_the_same_row_twice_is_refused(config: RunConfig, folder: Path) -> None:
    backend = HfCapturer(folder, config.target, config.data, TAPS)
    with pytest.raises(ValueError, match="unique"):
        list(capture_rows(backend, [make_row(1), make_row(1)], on_failure=lambda _: None))


def settings(**changes: Any) -> SamplingSettings:
    base = SamplingSettings(temperature=1.0, top_p=0.9, top_k=0, max_tokens=12, stop_ids=[END])
    return dataclasses.replace(base, **changes)


def test_plain_greedy_answers_equal_one_by_one_decoding(folder: Path, config: RunConfig) -> None:
    """Left padding and the cache change nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[0, 7, 8], [0, 9, 10, 11, 12, 13]]
    generator = HfGenerator(folder, config.target, config.data, settings(temperature=0.0, max_tokens=6))
    asked = [GenerationRequest(request_id=str(n), prompt_ids=ids, seed=n) for n, ids in enumerate(prompts)]
    answers = {done.request_id: done.completion_ids for done in generator.generate(take_from(asked), beat)}
    for number, ids in enumerate(prompts):
        expected: list[int] = []
        while len(expected) < 6 and END not in expected:
            with torch.inference_mode():
                expected.append(int(model(torch.tensor([ids + expected])).logits[0, -1].argmax()))
        assert answers[str(number)] == expected


def test_sampled_answers_depend_on_the_seed_alone(folder: Path, config: RunConfig) -> None:
    def ask(seeds: list[int]) -> list[list[int]]:
        generator = HfGenerator(folder, config.target, config.data, settings())
        asked = [GenerationRequest(request_id=str(seed), prompt_ids=[0, 7, 8], seed=seed) for seed in seeds]
        return [done.completion_ids for done in generator.generate(take_from(asked), beat)]

    first, second = ask([1, 2])
    assert first != second
    assert ask([2, 1]) == [second, first]


def test_draws_follow_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    draws = 4000
    generators = [torch.Generator().manual_seed(seed) for seed in range(draws)]
    drawn = choose_tokens(logits.repeat(draws, 1), settings(temperature=0.5, top_k=3, top_p=0.95), generators)
    kept = (logits / 0.5)[:2].softmax(dim=-1)  # the top two hold 0.957 of the top three's mass
    shares = torch.bincount(drawn, minlength=5) / draws
    assert shares[2:].sum() == 0
    torch.testing.assert_close(shares[:2], kept, atol=0.025, rtol=0)
