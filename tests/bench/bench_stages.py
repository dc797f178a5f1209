"""Both stages of data generation beside a bare vLLM loop with the same engine settings, on the real small target.

``python -m tests.bench.bench_stages [--prompts 256] [--rounds 2] [key=value ...]``

Every variant runs in a process of its own; variants alternate, the medians are shown. Engine starts are not counted.

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
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does; children inherit it

from rich.console import Console
from rich.table import Table

GENERATION = ("bare generation", "stage regenerate")
READING = ("bare prefill", "bare, and the head", "bare, with top-20", "stage capture")
HEAD_ROWS = 256  # states a product


class Silent:
    """No display."""

    def update(self, done: int, facts: str = "") -> None:
        """Nothing."""


@contextlib.contextmanager
def no_display(_title: str, _total: int, _before: int) -> Iterator[Silent]:
    """A display that shows nothing."""
    yield Silent()


def configure(root: str, prompts: int, words: list[str]) -> Any:
    """The quickstart's configuration with ``prompts`` prompts, everything under ``root``."""
    from hydra import compose, initialize_config_dir

    from dflash2_train.app import config_root, register_schema
    from dflash2_train.config import load_config

    register_schema()
    place = config_root()
    if place.startswith("pkg://"):
        place = str(Path(__file__).resolve().parents[2] / "conf")
    overrides = [f"run_dir={root}", f"data.max_prompts={prompts}", "data.sampling.repeats=1"]
    with initialize_config_dir(place, version_base="1.3"):
        return load_config(compose("config", ["+experiment=smollm2_cpu", *overrides, *words]))


def step_through(engine: Any, requests: list[tuple[str, list[int], Any]]) -> tuple[int, float]:
    """Queue all, step until done; returns (tokens written, seconds)."""
    from vllm.inputs import TokensPrompt

    started, written = time.monotonic(), 0
    for name, ids, parameters in requests:
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), parameters)
    while engine.has_unfinished_requests():
        written += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return written, time.monotonic() - started


def generate(variant: str, config: Any) -> float:
    """Answer tokens a second."""
    from data_gen.prepare import prepare
    from data_gen.regenerate import regenerate
    from data_gen.turns import row_seed

    prepared = prepare(config)
    if variant == "stage regenerate":
        totals = regenerate(config, prepared, no_display)
        return totals.new_tokens / totals.seconds
    from data_gen.backends.vllm_engine import VllmGenerator

    generator = VllmGenerator(prepared.folder, config.target, config.data, prepared.sampling)
    requests = []
    for record in prepared.train:
        ids = prepared.renderer.prompt_ids(record.messages, record.tools)
        seed = row_seed(config.data.sampling.seed, record.prompt_id, 0, 0)
        requests.append((record.prompt_id, ids, generator.parameters(seed)))
    written, seconds = step_through(generator.engine, requests)
    generator.close()
    return written / seconds


def read(variant: str, config: Any) -> float:
    """Prompt and answer tokens a second, of the conversations under the configuration's root."""
    from data_gen.backends.folder import find_target
    from data_gen.cache.conversations import ConversationStore
    from data_gen.capture import capture

    folder = find_target(config.target)
    if variant == "stage capture":
        totals = capture(config, folder, no_display)
        return totals.tokens / totals.seconds
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
    _, seconds = step_through(engine, requests)
    vllm_engine._stop(engine)
    if variant == "bare, and the head":
        seconds += head_seconds(config.target, sum(len(row["completion_ids"]) for row in rows))
    return float(sum(len(ids) for _, ids, _ in requests) / seconds)


def head_seconds(target: Any, states: int) -> float:
    """Seconds of the products alone, bf16, with as many threads as the engine has."""
    import torch

    hidden = torch.randn(HEAD_ROWS, target.hidden_size).bfloat16()
    head = torch.randn(target.vocab_size, target.hidden_size).bfloat16()
    logits = hidden @ head.t()
    started = time.monotonic()
    for _ in range(-(-states // HEAD_ROWS)):
        torch.mm(hidden, head.t(), out=logits)
    return time.monotonic() - started


def measure(variant: str, root: str, prompts: int, words: list[str], out: Any) -> None:
    """One variant, in a process of its own."""
    run = generate if variant in GENERATION else read
    out.put(run(variant, configure(root, prompts, words)))


def main() -> None:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    options, words = parser.parse_known_args()
    context = multiprocessing.get_context("spawn")
    rates: dict[str, list[float]] = {name: [] for name in (*GENERATION, *READING)}
    with tempfile.TemporaryDirectory(prefix="dflash2-bench-") as scratch:
        for number in range(options.rounds):
            for variant in rates:
                # Readers share the conversations that the stage of this round wrote.
                queue = context.Queue()
                root = str(Path(scratch) / f"round{number}")
                process = context.Process(target=measure, args=(variant, root, options.prompts, words, queue))
                process.start()
                rate = queue.get(timeout=1800)
                process.join()
                rates[variant].append(rate)
                Console(stderr=True).print(f"round {number}: {variant}: {rate:.0f} tokens/s")
    table = Table("variant", "tokens/s, median", "of the bare one", title=f"{options.prompts} prompts")
    for group in (GENERATION, READING):
        bare = statistics.median(rates[group[0]])
        for name in group:
            rate = statistics.median(rates[name])
            table.add_row(name, f"{rate:.0f}", f"{rate / bare:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
