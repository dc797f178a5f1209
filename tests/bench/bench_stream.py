"""Stream mode beside cache mode on real data: the same loss curve, and what the ring took.

``python -m tests.bench.bench_stream --data-root runs/smollm2_cpu/data [--steps 300] [--budget-mib 200] [key=value]``

Trains ``smollm2_cpu`` twice on the finished conversations under ``--data-root``: out of its capture cache, then out of
a ring that ``dflash2-gen-data stage=stream`` fills meanwhile. Rows, their order, blocks and anchors must be the same;
the losses then differ only by what the target's states do, captured in other company: nothing with ``data.backend=hf
data.max_num_seqs=1``, the rounding of bf16 with vLLM, whose products depend on the batch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess  # noqa: S404 - our own commands
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash2_train.checkpoint import newest_checkpoint
from dflash2_train.tracker import read_metrics
from tests.ring_cases import bytes_in

LOOK_EVERY_S = 0.25
EXPERIMENT = "+experiment=smollm2_cpu"


def command(module: str, *words: str) -> list[str]:
    """One of the console commands, from the sources."""
    return [sys.executable, "-m", module, EXPERIMENT, *words]


def train_from_cache(folder: Path, words: list[str]) -> float:
    """Seconds of a training out of the cache."""
    started = time.monotonic()
    output = f"train.output_dir={folder}"
    done = subprocess.run(command("dflash2_train.train", output, *words), check=False)  # noqa: S603
    if done.returncode != 0:
        raise SystemExit(f"training from the cache ended with {done.returncode}")
    return time.monotonic() - started


def train_from_ring(folder: Path, ring: Path, words: list[str]) -> tuple[float, int]:
    """Seconds of a training out of a ring, and the most bytes that lay in its segments."""
    started, largest = time.monotonic(), 0
    shared = ["data.mode=stream", f"data.stream.root={ring}", f"train.output_dir={folder}", *words]
    filler = command("data_gen.cli", "stage=stream", *shared)
    trainer = command("dflash2_train.train", *shared)
    with subprocess.Popen(filler) as producer, subprocess.Popen(trainer) as consumer:  # noqa: S603
        while consumer.poll() is None:
            if producer.poll() not in (None, 0):
                consumer.terminate()
                raise SystemExit(f"the producer ended with {producer.returncode}")
            if (ring / "segments").is_dir():
                largest = max(largest, bytes_in(ring))
            time.sleep(LOOK_EVERY_S)
        seconds = time.monotonic() - started
        if consumer.returncode != 0:
            producer.terminate()
            raise SystemExit(f"training from the ring ended with {consumer.returncode}")
        producer.wait(timeout=60)
    return seconds, largest


def order_of(folder: Path) -> Any:
    """The digest of the rows' order, out of the newest checkpoint."""
    found = newest_checkpoint(folder)
    if found is None:
        raise SystemExit(f"{folder}: no checkpoint")
    return found.fingerprint["order"]


def by_step(folder: Path, name: str) -> dict[int, float]:
    """A metric by step."""
    return {int(line["step"]): float(line[name]) for line in read_metrics(folder / "metrics.jsonl") if name in line}


def compare(cache: Path, ring: Path) -> Table:
    """Differences of the two curves."""
    table = Table("metric", "steps", "last, cache", "last, ring", "largest difference", "mean", "equal steps")
    for name in ("loss", "ce", "kl", "selector", "recall"):
        one, other = by_step(cache, name), by_step(ring, name)
        steps = sorted(one.keys() & other.keys())
        differences = [abs(one[step] - other[step]) for step in steps]
        last = steps[-1]
        table.add_row(
            name,
            str(len(steps)),
            f"{one[last]:.4f}",
            f"{other[last]:.4f}",
            f"{max(differences):.2e}",
            f"{statistics.fmean(differences):.2e}",
            str(sum(difference == 0 for difference in differences)),
        )
    return table


def main() -> None:
    """Train twice and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget-mib", type=int, default=200)
    options, extra = parser.parse_known_args()
    words = [f"data.root={options.data_root.resolve()}", f"data.stream.budget_mib={options.budget_mib}"]
    words += [f"train.steps={options.steps}", "train.log_every=1", *extra]
    with tempfile.TemporaryDirectory(prefix="dflash2-stream-") as scratch:
        root = Path(scratch)
        words.append(f"export.output_dir={root / 'export'}")
        cache_seconds = train_from_cache(root / "cache", words)
        ring_seconds, largest = train_from_ring(root / "streamed", root / "ring", words)
        same = order_of(root / "cache") == order_of(root / "streamed")
        waits = by_step(root / "streamed", "data_wait")
        console = Console(width=120)
        console.print(compare(root / "cache", root / "streamed"))
        console.print(f"order of rows the same: {same}")
        console.print(f"cache {cache_seconds:.0f} s, ring with its producer {ring_seconds:.0f} s")
        console.print(f"largest size of the ring {largest / 2**20:.1f} MiB of {options.budget_mib}")
        console.print(f"mean share of waiting for data in stream mode {statistics.fmean(waits.values()):.1%}")


if __name__ == "__main__":
    main()
