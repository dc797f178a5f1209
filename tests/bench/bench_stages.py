"""Both stages of data generation beside a bare vLLM loop with the same engine settings, on the real small target.

``python -m tests.bench.bench_stages [--prompts 128,384] [--rounds 2] [--only generation|reading] [key=value ...]``

Every variant runs in a process of its own; variants alternate. Engine starts are not counted. Of two numbers of prompts
the difference is shown too: what a further prompt costs, without what a run costs once (its first steps, and its end,
where fewer and fewer requests are left). Medians of tokens a second, and a second of processor time, which is what to
compare on a machine that others use as well. Only last turns are asked: bare loop and stage give the engine the same
requests in the same order, and no request waits for another one's answer.

===================  ==============================================================================================
bare generation      all requests queued, ``engine.step()`` until none is left, answers dropped
stage regenerate     prompts, ledger, rows, Parquet shards and all
bare prefill         prompt and answer read with one token to write, nothing kept
bare, and the head   the same, then the product of as many states as have a teacher with the head: a large part of a
                     small model, a hundredth of a large one
bare, with top-20    the same with vLLM's own ``prompt_logprobs=20``: logits of every token, as a teacher needs
stage capture        taps, teacher of the supervised rows, checks, checksums and shards
===================  ==============================================================================================
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does; children inherit it

from rich.console import Console
from rich.table import Table

GENERATION = ("bare generation", "stage regenerate")
READING = ("bare prefill", "bare, and the head", "bare, with top-20", "stage capture")
HEAD_ROWS = 256  # states a product


def configure(root: str, prompts: int, words: list[str]) -> Any:
    """The quickstart's configuration with ``prompts`` prompts, everything under ``root``."""
    from hydra import compose, initialize_config_dir

    from dflash2_train.app import config_root, register_schema
    from dflash2_train.config import load_config

    register_schema()
    place = config_root()
    if place.startswith("pkg://"):
        place = str(Path(__file__).resolve().parents[2] / "conf")
    overrides = [f"run_dir={root}", f"data.max_prompts={prompts}", "data.sampling.repeats=1", "data.turns=last"]
    with initialize_config_dir(place, version_base="1.3"):
        return load_config(compose("config", ["+experiment=smollm2_cpu", *overrides, *words]))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one run, its engine's start left out."""

    tokens: int
    seconds: float
    cpu_seconds: float  # of all threads

    def __sub__(self, other: Cost) -> Cost:
        return Cost(**{name: value - vars(other)[name] for name, value in vars(self).items()})


class Clock:
    """Times what runs inside it. As a stage's display it shows nothing and spans the stage's own work."""

    def __enter__(self) -> Clock:
        self._started, self._cpu_started = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
        self.cpu_seconds = time.process_time() - self._cpu_started

    def update(self, done: int, facts: str = "") -> None:
        """Nothing."""

    def cost(self, tokens: int) -> Cost:
        """What was timed, for so many tokens."""
        return Cost(tokens=tokens, seconds=self.seconds, cpu_seconds=self.cpu_seconds)


def step_through(engine: Any, requests: list[tuple[str, list[int], Any]]) -> int:
    """Queue all, step until done; returns the tokens written."""
    from vllm.inputs import TokensPrompt

    written = 0
    for name, ids, parameters in requests:
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), parameters)
    while engine.has_unfinished_requests():
        written += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return written


def generate(variant: str, config: Any) -> Cost:
    """Of the answers' tokens."""
    from data_gen.prepare import prepare
    from data_gen.regenerate import regenerate
    from data_gen.turns import row_seed

    prepared = prepare(config)
    if variant == "stage regenerate":
        clock = Clock()
        totals = regenerate(config, prepared, lambda *_: clock)
        return clock.cost(totals.new_tokens)
    from data_gen.backends.vllm_engine import VllmGenerator

    generator = VllmGenerator(prepared.folder, config.target, config.data, prepared.sampling)
    requests = []
    for record in prepared.train:
        ids = prepared.renderer.prompt_ids(record.messages, record.tools)
        seed = row_seed(config.data.sampling.seed, record.prompt_id, 0, 0)
        requests.append((record.prompt_id, ids, generator.parameters(seed)))
    with Clock() as clock:
        written = step_through(generator.engine, requests)
    generator.close()
    return clock.cost(written)


def read(variant: str, config: Any) -> Cost:
    """Of prompt and answer tokens of the conversations under the configuration's root."""
    from data_gen.backends.folder import find_target
    from data_gen.cache.conversations import ConversationStore
    from data_gen.capture import capture

    folder = find_target(config.target)
    if variant == "stage capture":
        clock = Clock()
        return clock.cost(capture(config, folder, lambda *_: clock).tokens)
    from vllm import SamplingParams

    from data_gen.backends import vllm_engine

    data = config.data
    longest = data.max_prompt_tokens + data.sampling.max_tokens + 1
    engine = vllm_engine._start(vllm_engine._engine_arguments(folder, config.target, data, longest))
    parameters = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=20 if variant == "bare, with top-20" else None
    )
    store = ConversationStore(Path(data.root))
    rows = [row for index in store.shards() for row in store.read(index) if not row["dropped"]]
    requests = [(row["row_id"], row["prompt_ids"] + row["completion_ids"], parameters.clone()) for row in rows]
    with Clock() as clock:
        step_through(engine, requests)
        if variant == "bare, and the head":
            head_products(config.target, sum(len(row["completion_ids"]) for row in rows))
    vllm_engine._stop(engine)
    return clock.cost(sum(len(ids) for _, ids, _ in requests))


def head_products(target: Any, states: int) -> None:
    """The products alone, bf16, with as many threads as the engine has."""
    import torch

    hidden = torch.randn(HEAD_ROWS, target.hidden_size).bfloat16()
    head = torch.randn(target.vocab_size, target.hidden_size).bfloat16()
    logits = hidden @ head.t()
    for _ in range(-(-states // HEAD_ROWS)):
        torch.mm(hidden, head.t(), out=logits)


def measure(variant: str, root: str, prompts: int, words: list[str], out: Any) -> None:
    """One variant, in a process of its own."""
    run = generate if variant in GENERATION else read
    out.put(run(variant, configure(root, prompts, words)))


def run_variant(variant: str, root: str, prompts: int, words: list[str]) -> Cost:
    """The same, and a line about it."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(variant, root, prompts, words, queue))
    process.start()
    cost: Cost = queue.get(timeout=1800)
    process.join()
    rate = f"{cost.tokens / cost.seconds:.0f} tokens/s, {cost.cpu_seconds:.2f} CPU s"
    Console(stderr=True).print(f"{prompts} prompts: {variant}: {cost.tokens} tokens, {rate}")
    return cost


def show(title: str, group: Sequence[str], costs: dict[str, list[Cost]]) -> None:
    """The medians of one group, and their ratio to its first."""

    def median(name: str, value: Callable[[Cost], float]) -> float:
        return statistics.median(map(value, costs[name]))

    def per_second(cost: Cost) -> float:
        return cost.tokens / cost.seconds

    def per_cpu_second(cost: Cost) -> float:
        return cost.tokens / cost.cpu_seconds

    table = Table("variant", "tokens/s", "of bare", "tokens a CPU s", "of bare", title=title)
    for name in group:
        cells = []
        for rate in (per_second, per_cpu_second):
            cells += [f"{median(name, rate):.0f}", f"{median(name, rate) / median(group[0], rate):.1%}"]
        table.add_row(name, *cells)
    Console().print(table)


def main() -> None:
    """Run all variants and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="128,384", help="one number, or two of which the difference is shown too")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("generation", "reading"))
    options, words = parser.parse_known_args()
    sizes = [int(size) for size in options.prompts.split(",")]
    groups = {"generation": [GENERATION], "reading": [READING]}.get(options.only, [GENERATION, READING])
    wanted = [*GENERATION[options.only == "reading" :], *(READING if READING in groups else ())]
    costs: dict[int, dict[str, list[Cost]]] = {size: {name: [] for name in wanted} for size in sizes}
    with tempfile.TemporaryDirectory(prefix="dflash2-bench-") as scratch:
        for number, size in itertools.product(range(options.rounds), sizes):
            # Readers share the conversations that the stage of this round wrote.
            root = str(Path(scratch) / f"round{number}-{size}")
            for variant in wanted:
                costs[size][variant].append(run_variant(variant, root, size, words))
    for group in groups:
        for size in sizes:
            show(f"{size} prompts", group, costs[size])
        if len(sizes) == 2:
            few, many = (costs[size] for size in sizes)
            further = {name: [more - less for less, more in zip(few[name], many[name], strict=True)] for name in group}
            show(f"the further {sizes[1] - sizes[0]} prompts", group, further)


if __name__ == "__main__":
    main()
