"""What regenerate itself costs: time and memory of ledger and store over synthetic rows, with an engine that is free.

``python -m tests.bench.bench_ledger [--rows 10000,100000] [--tokens 200] [--shard 128]``

Every number of rows runs in a process of its own: one run that answers all, and one that finds all answered. Memory is
the growth of the process's largest resident size over that before the first row; prompts are made on demand and hold
none, as they are the business of ``data_gen.prompts``. Writing the ids themselves is part of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rich.console import Console
from rich.table import Table

IN_FLIGHT = 256
FAILING = 1000  # every such request fails, so that the ledger has something to do


def peak_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process."""

    rows: int
    tokens: int
    shard: int


def measure(case: Case, out: Any) -> None:
    """Answer ``case.rows`` prompts of 100 tokens with ``case.tokens`` each, twice; the second run has nothing to do."""
    from data_gen import regenerate as stage
    from data_gen.backends.base import Completion, Failure, Heartbeat, SamplingSettings, TakeRequest
    from data_gen.prepare import PreparedPrompts, PromptCounts
    from data_gen.prompts import PromptPlan, PromptRecord, PromptReport
    from tests.cases import tiny_run_config

    class Records(Sequence[PromptRecord]):
        """Prompts made when they are looked at."""

        def __len__(self) -> int:
            return case.rows

        @overload
        def __getitem__(self, position: int) -> PromptRecord: ...
        @overload
        def __getitem__(self, position: slice) -> list[PromptRecord]: ...
        def __getitem__(self, position: int | slice) -> PromptRecord | list[PromptRecord]:
            if isinstance(position, slice) or not 0 <= position < case.rows:
                raise IndexError(position)
            name = hashlib.sha256(str(position).encode()).hexdigest()[:16]
            messages = [{"role": "user", "content": f"prompt {position}"}]
            return PromptRecord(prompt_id=name, source="bench", license="mit", messages=messages, split="train")

    class Renderer:
        """Costs nothing."""

        def prompt_ids(self, *_: object) -> list[int]:
            return list(range(100))

        def text_of(self, ids: list[int]) -> str:
            return "word " * len(ids)

    class Engine:
        """Answers at once."""

        def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
            held = []
            number = 0
            while True:
                while len(held) < IN_FLIGHT and (request := take()) is not None:
                    held.append(request)
                if not held:
                    return
                heartbeat()
                name = held.pop(number % len(held)).request_id
                number += 1
                if number % FAILING == 0:
                    yield Failure(request_id=name, reason="bench")
                else:
                    yield Completion(request_id=name, completion_ids=list(range(case.tokens)), finish_reason="stop")

        def close(self) -> None:
            pass

    class Silent:
        """No display."""

        def update(self, done: int, facts: str = "") -> None:
            pass

    with tempfile.TemporaryDirectory() as scratch:
        config = tiny_run_config(Path(scratch))
        config.data.conversations_per_shard = case.shard
        config.data.max_prompt_tokens = 100
        records: Any = Records()
        sampling = SamplingSettings(temperature=1.0, top_p=0.95, top_k=0, max_tokens=case.tokens, stop_ids=[1])
        prepared = PreparedPrompts(
            folder=Path(scratch),
            plan=PromptPlan(train=records, holdout=[], holdout_hashes=[], report=PromptReport()),
            train=records,
            counts=PromptCounts(turns=case.rows),
            holdout=[],
            content={
                "sampling": {"seed": 0},
                "drop": {"drop_cut": False, "drop_repeats": True, "repeat_window": 256},
                **dict.fromkeys(("target", "revision", "target_hash")),
                "enable_thinking": None,
            },
            sampling=sampling,
            renderer=Renderer(),  # type: ignore[arg-type]
        )
        stage.open_generator = lambda *_: Engine()  # type: ignore[assignment]
        import datasets  # noqa: F401 - its size is not a row's

        before = peak_mib()
        seconds = []
        for _ in range(2):
            started = time.process_time()
            totals = stage.regenerate(config, prepared, lambda *_: contextlib.nullcontext(Silent()))
            seconds.append(time.process_time() - started)
        out.send({"new_s": seconds[0], "again_s": seconds[1], "mib": peak_mib() - before, "rows": totals.completions})


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="10000,100000")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--shard", type=int, default=128)
    options = parser.parse_args()
    table = Table(title=f"regenerate without an engine, answers of {options.tokens} tokens")
    for name in ("rows", "CPU s, answering", "CPU s a 100,000 rows", "CPU s, nothing to do", "peak growth MiB"):
        table.add_column(name, justify="right")
    context = multiprocessing.get_context("spawn")
    results = []
    for rows in map(int, options.rows.split(",")):
        receiver, sender = context.Pipe(duplex=False)
        case = Case(rows=rows, tokens=options.tokens, shard=options.shard)
        process = context.Process(target=measure, args=(case, sender))
        process.start()
        found = receiver.recv()
        process.join()
        results.append(found)
        table.add_row(
            f"{rows:,}",
            f"{found['new_s']:.1f}",
            f"{found['new_s'] * 1e5 / rows:.1f}",
            f"{found['again_s']:.1f}",
            f"{found['mib']:.0f}",
        )
    console = Console(width=120)
    console.print(table)
    console.print_json(json.dumps(results))


if __name__ == "__main__":
    main()
