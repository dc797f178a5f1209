"""Stage regenerate under fire: processes killed at random moments, started twice, and servers that misbehave.

``python -m tests.chaos.regenerate [--runs 200] [--seed 0]``

Every run is one seed. It ends with an undisturbed run and then checks the whole folder: every wanted row is there
exactly once, with the ids that the engine gave for just that prompt and seed, and no temporary file is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - children are forked and kills are to hit the work, not this import
import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401

from data_gen import regenerate as stage
from data_gen.backends.base import Completion, Failure, GenerationRequest, Heartbeat, TakeRequest
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.jobs import JobBusyError
from data_gen.prepare import PreparedPrompts, prepare
from dflash2_train.config import RunConfig, ServersConfig
from tests.cases import tiny_run_config
from tests.regeneration import make_config, no_display, with_data
from tests.stub_server import MODEL, Reply, StubServer, answer_of, broken, garbage, good, vanishing
from tests.toy_target import END

PROMPTS, SHARD = 30, 4
BUSY, DONE = 3, 0  # exit codes of a child
MAX_KILLS = 4
LONGEST_S = 0.25  # of an undisturbed run, about; kills come within it


def conversations() -> list[list[dict[str, str]]]:
    """Every third one has two turns."""
    singles = [[{"role": "user", "content": f"w{n} w50"}] for n in range(PROMPTS)]
    more = [{"role": "assistant", "content": "w80"}, {"role": "user", "content": "w51"}]
    return [[*turns, *more] if n % 3 == 0 else turns for n, turns in enumerate(singles)]


def chaos_config(folder: Path, **changes: Any) -> RunConfig:
    """The toy experiment of these runs; failures never end a run, and rows are not given up."""
    fields = {"conversations_per_shard": SHARD, "max_failed_share": 1.0, "max_attempts": 1000, **changes}
    return make_config(folder, tiny_run_config(folder), conversations(), **fields)


def answer(request: GenerationRequest) -> list[int]:
    """The one answer to a prompt and seed."""
    return [7 + (sum(request.prompt_ids) + request.seed) % 80, 8, END]


class ErraticEngine:
    """Answers in random order, fails some requests, takes about a millisecond for each."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        self._rng, self._failing = rng, failing

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        held: list[GenerationRequest] = []
        while True:
            while len(held) < 8 and (request := take()) is not None:
                held.append(request)
            if not held:
                return
            time.sleep(self._rng.uniform(0, 0.002))
            heartbeat()
            request = held.pop(self._rng.randrange(len(held)))
            if self._rng.random() < self._failing:
                yield Failure(request_id=request.request_id, reason="lost on the way")
            else:
                yield Completion(request_id=request.request_id, completion_ids=answer(request), finish_reason="stop")

    def close(self) -> None:
        pass


def run_stage(config: RunConfig, prepared: PreparedPrompts, seed: int, failing: float) -> None:
    """The body of a child: one run of the stage with an erratic engine."""
    stage.open_generator = lambda *_: ErraticEngine(random.Random(seed), failing)  # type: ignore[assignment]
    try:
        stage.regenerate(config, prepared, no_display)
    except JobBusyError:
        sys.exit(BUSY)


def start_child(config: RunConfig, prepared: PreparedPrompts, seed: int, failing: float = 0.05) -> BaseProcess:
    """Fork, since a fresh interpreter takes seconds to import what a run needs."""
    child = multiprocessing.get_context("fork").Process(target=run_stage, args=(config, prepared, seed, failing))
    child.start()
    return child


def wanted_rows(config: RunConfig, prepared: PreparedPrompts) -> set[str]:
    """Row ids of all turns."""
    turns = {record.prompt_id: len([m for m in record.messages if m["role"] == "user"]) for record in prepared.train}
    return {f"{name}-0-{turn}" for name, count in turns.items() for turn in range(count)}


def check_folder(config: RunConfig, prepared: PreparedPrompts) -> None:
    """Everything once, right, and nothing else."""
    store = ConversationStore(Path(config.data.root))
    rows = [row for index in store.shards() for row in store.read(index)]
    times = Counter(row["row_id"] for row in rows)
    assert set(times) == wanted_rows(config, prepared), "rows are missing, or nobody wanted them"
    assert set(times.values()) == {1}, "a row is stored twice"
    for row in rows:
        asked = GenerationRequest(request_id=row["row_id"], prompt_ids=row["prompt_ids"], seed=row["seed"])
        assert row["completion_ids"] == answer(asked)
    assert list(store.folder.glob("*.tmp")) == list(store.folder.glob(".*.tmp")) == []


def killed_runs(prepared: PreparedPrompts, config: RunConfig, folder: Path, seed: int) -> int:
    """Kill -9 the stage at random moments, sometimes with a twin beside it, then finish; returns the kills."""
    rng = random.Random(seed)
    config = with_data(config, root=str(folder))
    kills = 0
    for _ in range(rng.randint(1, MAX_KILLS)):
        children = [start_child(config, prepared, rng.randrange(1 << 30)) for _ in range(rng.choice((1, 1, 2)))]
        time.sleep(rng.uniform(0, LONGEST_S))
        for child in children:
            child.kill()
            child.join()
            assert child.exitcode in (DONE, BUSY, -9), f"seed {seed}: a child ended with {child.exitcode}"
            kills += child.exitcode == -9
    for failing in (0.05, 0.0):  # what the first of them fails is open for the second
        child = start_child(config, prepared, rng.randrange(1 << 30), failing)
        child.join()
        assert child.exitcode == DONE, f"seed {seed}: the last run ended with {child.exitcode}"
    check_folder(config, prepared)
    return kills


class Weather:
    """What the servers of a run do: mostly good, and every fault now and then."""

    def __init__(self, seed: int) -> None:
        self._rng, self._lock = random.Random(seed), threading.Lock()

    def behave(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            drawn = self._rng.random()
        for share, behaviour in ((0.06, garbage), (0.12, broken), (0.18, vanishing)):
            if drawn < share:
                return behaviour(body)
        if drawn < 0.21:
            time.sleep(0.5)  # longer than the client waits
        return good(body)


def stormy_servers(prepared: PreparedPrompts, config: RunConfig, folder: Path, seed: int) -> int:
    """Three servers with every fault, one of which dies and returns; returns the requests that they saw."""
    rng = random.Random(seed)
    weather = Weather(seed)
    servers = [StubServer(behaviour=weather.behave).start() for _ in range(3)]
    config = with_data(
        config,
        root=str(folder),
        backend="server",
        servers=ServersConfig(
            urls=[server.url for server in servers],
            model=MODEL,
            concurrency=4,
            timeout_s=0.3,
            connect_timeout_s=0.3,
            backoff_s=0.01,
            max_backoff_s=0.05,
            probe_every_s=0.03,
            max_outage_s=20.0,
        ),
    )
    content = {**prepared.content, "backend": "server", "served_model": MODEL}
    prepared = dataclasses.replace(prepared, content=content)
    victim = servers[rng.randrange(3)]
    timers = [threading.Timer(rng.uniform(0, 0.2), victim.stop)]
    timers.append(threading.Timer(0.3, victim.start))
    for timer in timers:
        timer.start()
    try:
        stage.open_generator = REAL_OPEN
        totals = stage.regenerate(config, prepared, no_display)
        for _ in range(20):  # a row that used up its tries is for the next run
            if not totals.failed:
                break
            totals = stage.regenerate(config, prepared, no_display)
    finally:
        for timer in timers:
            timer.join()
        for server in servers:
            server.stop()
    check_folder(config, prepared)
    return sum(len(server.bodies) for server in servers)


REAL_OPEN = stage.open_generator
assert answer_of({"prompt": [1], "seed": 2})["choices"][0]["token_ids"] == answer(
    GenerationRequest(request_id="", prompt_ids=[1], seed=2)
), "engine and server stub give the same answers, so that one check fits both"


def main() -> None:
    """Run and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        config = chaos_config(Path(scratch))
        prepared = prepare(config)
        kills = seen = 0
        for seed in range(options.seed, options.seed + options.runs):
            if seed % 4:
                kills += killed_runs(prepared, config, Path(scratch) / f"killed-{seed}", seed)
            else:
                seen += stormy_servers(prepared, config, Path(scratch) / f"servers-{seed}", seed)
            sys.stdout.write(f"run {seed}: every row once; {kills} kills, {seen} requests to servers so far\n")


if __name__ == "__main__":
    main()
