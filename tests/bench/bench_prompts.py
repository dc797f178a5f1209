"""Speed and memory of reading prompts, at several numbers of rows.

``python -m tests.bench.bench_prompts [--rows 10000,1000000] [--cap 5000] [--kind jsonl|parquet]``

Synthetic rows of about 60 words, one in ten a copy of an earlier one and one in a hundred broken, are read from a file
through a capped source; near-duplicates and overlap with a hold-out are then taken out of what is kept. Every size runs
in a process of its own, so that the peak is its own. Memory is flat if the growth over the imports does not rise with
the rows; it is in proportion to the cap.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_gen.prompts import make_prompts
from dflash2_train.config import DataConfig, PromptSourceConfig, SamplingConfig

WORDS_A_ROW = 60
HOLDOUT_ROWS = 500
WARM_ROWS = 200  # read before the first measurement, so that imports and models do not count
BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One number of rows to measure."""

    rows: int
    cap: int
    kind: str


def make_rows(number: int, seed: int) -> Iterator[str]:
    """JSON lines of random words."""
    rng = random.Random(seed)
    words = [f"word{index}" for index in range(20_000)]
    last = ""
    for index in range(number):
        if index % 100 == 99:
            yield '{"prompt": "broken\n'
        elif index % 10 == 9:
            yield last.upper().replace('"PROMPT"', '"prompt"')
        else:
            last = json.dumps({"prompt": " ".join(rng.choices(words, k=WORDS_A_ROW))}) + "\n"
            yield last


def write_source(folder: Path, case: Case, name: str, number: int) -> PromptSourceConfig:
    """A file of ``number`` rows and the source that reads it."""
    path = folder / f"{name}.{case.kind}"
    rows = make_rows(number, seed=len(name))
    if case.kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.schema([("prompt", pyarrow.string())])
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            batch: list[dict[str, str]] = []
            for row in rows:
                batch += [] if row.endswith("broken\n") else [json.loads(row)]
                if len(batch) == BATCH_ROWS:
                    writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                    batch.clear()
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))
    else:
        with open(path, "w") as file:
            file.writelines(rows)
    return PromptSourceConfig(kind=case.kind, path=str(path), prompt_column="prompt")


def run_plan(train: PromptSourceConfig, holdout: PromptSourceConfig, cap: int) -> int:
    """Plan the prompts; returns how many are kept."""
    train.max_prompts = cap
    config = DataConfig(
        root="",
        train_prompts=[train],
        holdout_prompts=[holdout],
        sampling=SamplingConfig(max_tokens=1),
        max_prompt_tokens=1,
    )
    return len(make_prompts(config).train)


def peak_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: Case, folder: Path, answer: multiprocessing.SimpleQueue[tuple[float, float, float, int]]) -> None:
    """Rows/s, growth of the peak over the imports in MiB, the peak, prompts kept."""
    holdout = write_source(folder, case, "holdout", HOLDOUT_ROWS)
    run_plan(write_source(folder, case, "warm", WARM_ROWS), holdout, cap=WARM_ROWS)
    train = write_source(folder, case, "train", case.rows)
    before, started = peak_mib(), time.perf_counter()
    kept = run_plan(train, holdout, case.cap)
    seconds = time.perf_counter() - started
    answer.put((case.rows / seconds, peak_mib() - before, peak_mib(), kept))


def main() -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,1000000", help="numbers of rows, with commas between")
    parser.add_argument("--cap", type=int, default=5000, help="max_prompts of the source")
    parser.add_argument("--kind", default="jsonl", choices=("jsonl", "parquet"))
    arguments = parser.parse_args()
    table = Table(title=f"Reading prompts, {arguments.kind}, max_prompts {arguments.cap}", title_justify="left")
    for name in ("rows", "kept", "rows/s", "peak growth MiB", "peak MiB"):
        table.add_column(name, justify="right")
    context = multiprocessing.get_context("spawn")
    for rows in (int(number) for number in arguments.rows.split(",")):
        case = Case(rows=rows, cap=arguments.cap, kind=arguments.kind)
        with tempfile.TemporaryDirectory() as folder:
            answer = context.SimpleQueue()
            process = context.Process(target=measure, args=(case, Path(folder), answer))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"the run with {rows} rows ended with code {process.exitcode}")
            rate, growth, peak, kept = answer.get()
        table.add_row(f"{rows:,}", f"{kept:,}", f"{rate:,.0f}", f"{growth:.1f}", f"{peak:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
