"""Servers as backend: every field sent, ids kept, faults tried again elsewhere, and no answer twice."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_gen.backends.base import Completion, Failure, GenerationRequest, SamplingSettings, take_from
from data_gen.backends.server import ServerGenerator
from data_gen.backends.server_pool import ServerRefusedError, ServersDownError
from dflash2_train.config import ConfigError, RunConfig, SamplingConfig, ServersConfig
from tests.regeneration import make_config, no_display, rows_of, with_data
from tests.stub_server import MODEL, Reply, StubServer, answer_of, broken, garbage, good, hanging, vanishing

SAMPLING = SamplingSettings(temperature=1.0, top_p=0.95, top_k=0, max_tokens=3, stop_ids=[1])
FAST = {
    "timeout_s": 10.0,  # no fault by itself on a busy machine; the test of hanging servers shortens it
    "connect_timeout_s": 10.0,
    "backoff_s": 0.01,
    "max_backoff_s": 0.05,
    "probe_every_s": 0.03,
    "max_outage_s": 30.0,
}


def beat() -> None:
    pass


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=f"r{n}", prompt_ids=[0, 7, 8 + n], seed=n) for n in range(count)]


@pytest.fixture
def start() -> Iterator[Callable[..., StubServer]]:
    with contextlib.ExitStack() as stack:

        def started(**fields: Any) -> StubServer:
            server = StubServer(**fields).start()
            stack.callback(server.stop)
            return server

        yield started


def generator(config: RunConfig, servers: list[StubServer], **changes: Any) -> ServerGenerator:
    fields = {"urls": [server.url for server in servers], "model": MODEL, "concurrency": 4, **FAST, **changes}
    data = dataclasses.replace(config.data, backend="server", servers=ServersConfig(**fields))
    data.check()
    return ServerGenerator(config.target, data, SAMPLING)


def results_of(backend: ServerGenerator, asked: list[GenerationRequest]) -> dict[str, Completion | Failure]:
    found: dict[str, Completion | Failure] = {}
    try:
        for result in backend.generate(take_from(asked), beat):
            assert result.request_id not in found, "an answer came twice"
            found[result.request_id] = result
    finally:
        backend.close()
    return found


def all_right(found: dict[str, Completion | Failure], asked: list[GenerationRequest]) -> bool:
    expected = {
        request.request_id: answer_of({"prompt": request.prompt_ids, "seed": request.seed})["choices"][0]["token_ids"]
        for request in asked
    }
    return expected == {name: result.completion_ids for name, result in found.items() if isinstance(result, Completion)}


def test_every_field_is_sent_with_every_request(tiny_config: RunConfig, start: Callable[..., StubServer]) -> None:
    server = start()
    assert all_right(results_of(generator(tiny_config, [server]), requests(5)), requests(5))
    fields = {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 3,
        "min_tokens": 0,
        "n": 1,
        "stop_token_ids": [1],
        "ignore_eos": False,
        "return_token_ids": True,
        "add_special_tokens": False,
        "model": MODEL,
    }
    for body in server.bodies:
        assert {key: body[key] for key in fields} == fields
    assert sorted((body["prompt"], body["seed"]) for body in server.bodies) == [
        (request.prompt_ids, request.seed) for request in requests(5)
    ]


def test_requests_in_flight_stay_within_the_limit_of_each_server_and_reach_all(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    def slow(body: dict[str, Any]) -> Reply:
        time.sleep(0.02)
        return good(body)

    servers = [start(behaviour=slow), start(behaviour=slow)]
    results_of(generator(tiny_config, servers, concurrency=3), requests(24))
    assert [server.most_busy for server in servers] == [3, 3]


def test_requests_are_drawn_as_slots_fall_free_and_not_all_at_once(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    drawn = 0

    def counted() -> Iterator[GenerationRequest]:
        nonlocal drawn
        for request in requests(50):
            drawn += 1
            yield request

    backend = generator(tiny_config, [start()], concurrency=2)
    results = backend.generate(take_from(counted()), beat)
    for done, _ in enumerate(results, start=1):
        assert drawn <= done + 2 * 2 * 2, "at most two for every slot, before and after a round of results"
    backend.close()
    assert drawn == 50


@pytest.mark.parametrize("fault", [garbage, broken, hanging, vanishing])
def test_a_faulty_server_drops_out_and_its_requests_are_answered_elsewhere(
    tiny_config: RunConfig, start: Callable[..., StubServer], fault: Callable[[dict[str, Any]], Reply]
) -> None:
    bad, fine = start(behaviour=fault), start()
    limits = {"timeout_s": 1.0 if fault is hanging else 10.0, "probe_every_s": 30.0}
    found = results_of(generator(tiny_config, [bad, fine], **limits), requests(40))
    assert all_right(found, requests(40))
    assert len(bad.bodies) <= 4 + 4, "after its first requests failed it gets no more"


def test_a_server_that_is_back_gets_one_request_at_a_time_until_it_answers(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    """Its probes are always good; with all its slots after each of them it would burn the tries of many requests."""
    server = start()
    busy_on_trial: list[int] = []

    def mends_after_two_trials(body: dict[str, Any]) -> Reply:
        seen = len(server.bodies)
        if seen <= 4:  # all slots, before it drops out
            time.sleep(0.05)
            return broken(body)
        if seen <= 6:
            time.sleep(0.05)
            busy_on_trial.append(server._busy)
            return broken(body)
        time.sleep(0.01)
        return good(body)

    server.behaviour = mends_after_two_trials
    backend = generator(tiny_config, [server], drop_after=1)
    assert all_right(results_of(backend, requests(40)), requests(40))
    assert busy_on_trial == [1, 1]
    assert len(server.bodies) == 40 + 6
    assert server.most_busy == 4


def test_a_transient_fault_costs_tries_and_not_the_row(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    failed = 0

    def twice_down(body: dict[str, Any]) -> Reply:
        nonlocal failed
        failed += 1
        return (503, b"") if failed <= 2 else good(body)

    server = start(behaviour=twice_down)
    assert all_right(results_of(generator(tiny_config, [server]), requests(1)), requests(1))
    assert len(server.bodies) == 3


def test_waits_grow_and_are_spread(tiny_config: RunConfig) -> None:
    backend = generator(tiny_config, [StubServer(port=9)], backoff_s=1.0, max_backoff_s=8.0)
    waits = [[backend._backoff(attempt) for _ in range(50)] for attempt in range(1, 7)]
    backend.close()
    for attempt, drawn in enumerate(waits):
        longest = min(2.0**attempt, 8.0)
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
        assert len(set(drawn)) == 50


def test_a_request_that_is_refused_fails_alone_and_at_once(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    def choosy(body: dict[str, Any]) -> Reply:
        return (400, b'{"error": "too long"}') if body["seed"] == 3 else good(body)

    server = start(behaviour=choosy)
    found = results_of(generator(tiny_config, [server]), requests(6))
    assert found["r3"] == Failure(request_id="r3", reason='HTTP 400: {"error": "too long"}')
    assert sum(body["seed"] == 3 for body in server.bodies) == 1
    assert sum(isinstance(result, Completion) for result in found.values()) == 5


def test_a_request_that_breaks_every_server_fails_after_its_tries(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    def poisoned(body: dict[str, Any]) -> Reply:
        return broken(body) if body["seed"] == 3 else good(body)

    server = start(behaviour=poisoned)
    found = results_of(generator(tiny_config, [server], tries=3, drop_after=99), requests(6))
    assert found["r3"] == Failure(request_id="r3", reason="3 tries, the last: HTTP 500")
    assert sum(body["seed"] == 3 for body in server.bodies) == 3


def test_a_server_that_dies_and_returns_is_used_again(tiny_config: RunConfig, start: Callable[..., StubServer]) -> None:
    server = start()
    backend = generator(tiny_config, [server])
    found = {}
    for result in backend.generate(take_from(requests(60)), beat):
        found[result.request_id] = result
        if len(found) == 10:
            server.stop()
            threading.Timer(0.2, server.start).start()
    backend.close()
    assert all_right(found, requests(60))


def test_servers_that_stay_away_end_the_run_with_what_each_said_last(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    server = start(behaviour=broken)
    backend = generator(tiny_config, [server], probe_every_s=30.0, max_outage_s=2.0)
    with pytest.raises(ServersDownError, match=rf"(?s)max_outage_s=2 s.*{server.url}: HTTP 500"):
        results_of(backend, requests(8))


def lacking(field: str) -> Callable[[dict[str, Any]], Reply]:
    def behaviour(body: dict[str, Any]) -> Reply:
        answer = answer_of(body)
        answer["choices"][0][field] = None
        return 200, json.dumps(answer).encode()

    return behaviour


def with_choice(**fields: Any) -> Callable[[dict[str, Any]], Reply]:
    def behaviour(body: dict[str, Any]) -> Reply:
        answer = answer_of(body)
        answer["choices"][0] |= fields
        return 200, json.dumps(answer).encode()

    return behaviour


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (lacking("token_ids"), "without token ids"),
        (lacking("prompt_token_ids"), "without token ids"),
        (with_choice(prompt_token_ids=[0, 0, 7, 8]), "not the one of 3"),
        (lambda _body: (401, b"who are you"), "api_key_env"),
        (lambda _body: (404, b"no such model"), "data.servers.model"),
    ],
)
def test_a_server_that_must_not_be_used_ends_the_run(
    tiny_config: RunConfig, start: Callable[..., StubServer], behaviour: Callable[[Any], Reply], text: str
) -> None:
    with pytest.raises(ServerRefusedError, match=text):
        results_of(generator(tiny_config, [start(behaviour=behaviour)]), requests(3))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": [7, 8, 96]}, "not the target's"),
        ({"token_ids": [7, "8"]}, "not the target's"),
        ({"token_ids": [7, 8, 9, 1]}, "more than asked for"),
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"finish_reason": "length", "token_ids": [7]}, "cut the answer before max_tokens"),
    ],
)
def test_an_answer_that_cannot_be_right_is_never_kept(
    tiny_config: RunConfig, start: Callable[..., StubServer], fields: dict[str, Any], reason: str
) -> None:
    server = start(behaviour=with_choice(**fields))
    (result,) = results_of(generator(tiny_config, [server], tries=2, drop_after=99), requests(1)).values()
    assert isinstance(result, Failure)
    assert reason in result.reason


@pytest.mark.parametrize(
    ("fields", "text"), [({"model": "another"}, "serves \\['another'\\]"), ({"max_model_len": 34}, "max-model-len 35")]
)
def test_a_server_of_another_model_or_too_short_a_context_is_refused_before_the_first_request(
    tiny_config: RunConfig, start: Callable[..., StubServer], fields: dict[str, Any], text: str
) -> None:
    server = start(**fields)
    with pytest.raises(ServerRefusedError, match=text):
        results_of(generator(tiny_config, [server]), requests(3))
    assert server.bodies == []


def test_a_server_that_comes_back_with_another_model_stays_out(
    tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    turncoat, fine = start(), start()
    backend = generator(tiny_config, [turncoat, fine])
    found = {}
    for result in backend.generate(take_from(requests(60)), beat):
        found[result.request_id] = result
        if len(found) == 10:
            turncoat.stop()
            turncoat.model = "another"
            turncoat.start()
            turncoat.behaviour = broken
            seen = len(turncoat.bodies)
    backend.close()
    assert all_right(found, requests(60))
    assert len(turncoat.bodies) - seen <= 8


def test_the_key_comes_from_the_environment_and_a_missing_one_is_named(
    tiny_config: RunConfig, start: Callable[..., StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="DFLASH2_TEST_KEY"):
        generator(tiny_config, [start()], api_key_env="DFLASH2_TEST_KEY")
    monkeypatch.setenv("DFLASH2_TEST_KEY", "secret")
    backend = generator(tiny_config, [start()], api_key_env="DFLASH2_TEST_KEY")
    assert backend._headers == {"Authorization": "Bearer secret"}
    backend.close()


@pytest.mark.parametrize("url", ["localhost:8000", "http://user:secret@host", "http://host:8000/v1", "ftp://host"])
def test_urls_that_cannot_be_meant_are_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.servers\.urls") as refused:
        ServersConfig(urls=[url], model=MODEL).check()
    assert "secret" not in str(refused.value)


def test_the_stage_stores_what_servers_return_and_records_the_served_model(
    tmp_path: Path, tiny_config: RunConfig, start: Callable[..., StubServer]
) -> None:
    from data_gen.prepare import prepare
    from data_gen.regenerate import regenerate

    server = start()
    servers = ServersConfig(urls=[server.url], model=MODEL, **FAST)
    config = make_config(
        tmp_path, tiny_config, backend="server", servers=servers, sampling=SamplingConfig(max_tokens=3)
    )
    totals = regenerate(config, prepare(config), no_display)
    sent = {(tuple(body["prompt"]), body["seed"]) for body in server.bodies}
    rows = rows_of(config).values()
    assert totals.completions == len(rows) == 10
    for row in rows:
        assert (tuple(row["prompt_ids"]), row["seed"]) in sent  # type: ignore[arg-type]
        expected = answer_of({"prompt": row["prompt_ids"], "seed": row["seed"]})
        assert row["completion_ids"] == expected["choices"][0]["token_ids"]
    manifest = json.loads((Path(config.data.root) / "conversations" / "manifest.json").read_text())
    assert (manifest["content"]["backend"], manifest["content"]["served_model"]) == ("server", MODEL)


def test_servers_cannot_capture_and_the_next_step_is_named(tiny_config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"Set data\.capture_backend to one of"):
        _ = with_data(tiny_config, backend="server").data.capturer
    assert with_data(tiny_config, backend="server", capture_backend="hf").data.capturer == "hf"
