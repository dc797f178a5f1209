"""Capture: the right layers, the right teacher, and states that do not belong to the tokens never reach the cache."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen import capture as stage
from data_gen.backends.base import (
    CapturedStates,
    CaptureRequest,
    GenerationRequest,
    Heartbeat,
    SamplingSettings,
    take_from,
)
from data_gen.backends.head import TeacherHead, place_rows
from data_gen.backends.hf import HfCapturer, HfGenerator, choose_tokens
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.reader import CaptureReader
from dflash2_train.config import RunConfig, TargetConfig
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


def reference(folder: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Streams after every layer, by hooks, and logits [S, V] of a plain forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    streams: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _module, _inputs, output: streams.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0]
    return [stream.reshape(len(IDS), HIDDEN) for stream in streams], logits


def request(name: str = "a", ids: Sequence[int] = IDS) -> CaptureRequest:
    return CaptureRequest(request_id=name, input_ids=list(ids), first_teacher_row=PROMPT - 1)


def beat() -> None:
    pass


def test_plain_capture_gives_the_stream_after_each_tapped_layer(folder: Path, config: RunConfig) -> None:
    (states,) = HfCapturer(folder, config.target, config.data, TAPS).capture([request()], beat)
    streams, _ = reference(folder)
    expected = torch.cat([streams[tap] for tap in TAPS], dim=-1)
    assert torch.equal(states.tap_hidden, expected.bfloat16())


@pytest.mark.parametrize("tied", [False, True])
def test_teacher_rows_of_the_last_stream_equal_the_models_logits(tmp_path: Path, tied: bool) -> None:
    """Final norm once, weights far from 1: a norm too few or too many would show."""
    write_model(tmp_path, tied=tied)
    streams, logits = reference(tmp_path)
    ids, logprobs, normaliser = TeacherHead(tmp_path, top_k=TOP_K, dtype=torch.float32).rows(streams[-1])
    expected = logits.log_softmax(dim=-1).topk(TOP_K)
    assert torch.equal(ids.long(), expected.indices)
    torch.testing.assert_close(logprobs.float(), expected.values, atol=5e-3, rtol=2e-3)
    torch.testing.assert_close(normaliser, logits.logsumexp(dim=-1), atol=1e-4, rtol=1e-5)


def test_teacher_rows_stand_where_a_completion_token_is_read_or_predicted() -> None:
    full = (torch.ones(5, 3, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.float16), torch.ones(5))
    ids, logprobs, normaliser = place_rows(full, first=3, length=8)
    assert ids[:3].eq(0).all() and normaliser[:3].eq(0).all() and logprobs[:3].eq(-torch.inf).all()
    assert ids[3:].eq(1).all() and normaliser[3:].eq(1).all()


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
    """A backend whose states are spoiled by ``spoil``."""

    def __init__(self, inner: HfCapturer, spoil: dict[str, Any]) -> None:
        self.inner, self.spoil = inner, spoil

    def capture(self, requests: Sequence[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        for states in self.inner.capture(requests, heartbeat):
            yield dataclasses.replace(states, **{name: change(states) for name, change in self.spoil.items()})

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"tap_hidden": lambda states: states.tap_hidden[3:]}, "Prefix caching"),
        ({"tap_hidden": lambda states: states.tap_hidden[1:]}, "Prefix caching"),
        ({"input_ids": lambda states: states.input_ids[::-1]}, "other tokens"),
        ({"input_ids": lambda states: states.input_ids[:-1]}, "other tokens"),
    ],
)
def test_states_that_do_not_belong_to_the_tokens_stop_the_stage(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: dict[str, Any], message: str
) -> None:
    write_conversations(config)
    inner = HfCapturer(folder, config.target, config.data, TAPS)
    monkeypatch.setattr(stage, "open_capturer", lambda *_: Faulty(inner, spoil))
    with pytest.raises(CacheIntegrityError, match=message):
        run(config, folder)
    assert not list((Path(config.data.root) / "capture").glob("shard-*"))


def test_a_teacher_that_contradicts_the_engine_stops_the_stage(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_conversations(config, rows=stage.JUDGED_SAMPLES + 2)
    inner = HfCapturer(folder, config.target, config.data, TAPS)
    shifted = {"next_id": lambda states: states.next_id + 1}
    monkeypatch.setattr(stage, "open_capturer", lambda *_: Faulty(inner, shifted))
    with pytest.raises(CacheIntegrityError, match="final norm"):
        run(config, folder)


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
