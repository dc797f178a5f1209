"""Rate of reading a capture cache beside the plain rate of the same files, and the cost of the index.

``python -m tests.bench.bench_cache [--mib 512] [--passes 5] [--rows 1000000] [--threads 1]``

Reading: a random cache in a temporary folder, in the page cache. *plain* reads the files one after the other with
``readinto`` into the memory of the batches; *batches* reads each sample, in a shuffled order, its states into their
place of a padded batch (pinned memory where CUDA is there); *mapping* is the same by a reader that has opened nothing
yet, so that mapping and page faults count; *samples* is all tensors of a sample, copied the way collate does.
Rates are of bytes in the files; the best of the passes, taken in turn. ``of plain`` compares batches and mapping with
plain by the processor time that they take, the figure to compare on a machine that others use as well: all of it is
copying out of the page cache.

Index: lines for ``--rows`` samples, a hundred a shard (their files are empty, of the right size), appended shard by
shard, then opened by a reader in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data_gen.cache.format import FLOAT8, CapturedSample, CaptureManifest, ShardRow, shard_name
from data_gen.cache.index import append_index
from data_gen.cache.reader import CaptureReader
from data_gen.cache.writer import CaptureWriter

TOP_K = 20
SHAPES = {"9 taps of 4096": (9, 4096, 512), "5 taps of 576": (5, 576, 128)}  # taps, hidden size, tokens a sample
BATCH_ROWS = 4
SHARDS = 8


def make_cache(root: Path, taps: int, hidden: int, tokens: int, dtype: str, num_bytes: int) -> float:
    """A cache of about ``num_bytes`` in bf16, half of it in fp8; the seconds that writing took, flushing included."""
    content = {"target_layer_ids": list(range(taps)), "hidden_size": hidden, "teacher_top_k": TOP_K}
    writer = CaptureWriter(root, CaptureManifest(content={**content, "cache_dtype": dtype}))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, taps * hidden, generator=generator).bfloat16()
    count = max(1, num_bytes // (SHARDS * 2 * states.numel()))
    seconds = 0.0
    for shard in range(SHARDS):
        samples = [
            CapturedSample(
                sample_id=f"{shard}-{row}",
                input_ids=torch.zeros(tokens, dtype=torch.int32),
                loss_mask=torch.ones(tokens, dtype=torch.bool),
                tap_hidden=states.roll(shard * count + row, 0),
                teacher_ids=torch.zeros(tokens, TOP_K, dtype=torch.int32),
                teacher_logprobs=torch.zeros(tokens, TOP_K, dtype=torch.float16),
                teacher_log_normaliser=torch.zeros(tokens),
            )
            for row in range(count)
        ]
        started = time.perf_counter()
        writer.write_shard(shard, samples)
        seconds += time.perf_counter() - started
    return seconds


def plain(root: Path, batch: Tensor) -> None:
    """The files, one after the other, a row's bytes at a time into the rows of the batch."""
    rows = [row.view(torch.uint8).numpy().reshape(-1).data for row in batch]
    turn = itertools.cycle(rows)
    for path in sorted(root.glob("shard-*")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(next(turn)):
                pass


def batches(reader: CaptureReader, batch: Tensor, order: list[int]) -> None:
    """Every sample's states into its row of a batch."""
    for place, sample in enumerate(order):
        size = int(reader.index.num_tokens[sample])
        reader.read(sample, batch[place % len(batch), :size])


def samples(reader: CaptureReader, batch: Tensor, order: list[int]) -> None:
    """Every sample's tensors, as the trainer packs them."""
    rows, length = batch.shape[:2]
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    teacher = torch.zeros(rows, length, TOP_K, dtype=torch.int64)
    logprobs = torch.zeros(rows, length, TOP_K)
    for place, index in enumerate(order):
        sample, row = reader.read(index), place % rows
        size = len(sample)
        batch[row, :size] = sample.tap_hidden
        ids[row, :size], mask[row, :size] = sample.input_ids, sample.loss_mask
        teacher[row, :size], logprobs[row, :size] = sample.teacher_ids, sample.teacher_logprobs


def read_rates(root: Path, tokens: int, passes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Best bytes a second of each way of reading: by the clock, and by processor time."""
    reader = CaptureReader(root, verify_checksums=True)  # brings the files into the page cache
    size = sum(path.stat().st_size for path in root.glob("shard-*"))
    width = reader.manifest.tap_width
    batch = torch.zeros(BATCH_ROWS, tokens, width, dtype=torch.bfloat16, pin_memory=torch.cuda.is_available())
    order = list(range(len(reader)))
    random.Random(0).shuffle(order)  # noqa: S311
    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(root, batch),
        "batches": lambda: batches(reader, batch, order),
        "mapping": lambda: batches(CaptureReader(root, verify_checksums=False), batch, order),
        "samples": lambda: samples(reader, batch, order),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(passes):
        for name, way in ways.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            way()
            seconds[name].append(time.perf_counter() - started)
            cpu_seconds[name].append(time.process_time() - cpu_started)
    rates, cpu_rates = ({name: size / min(spent[name]) for name in ways} for spent in (seconds, cpu_seconds))
    return rates, cpu_rates


def resident_bytes() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def open_index(root: Path) -> tuple[float, int, int]:
    """Seconds and bytes that opening costs, and the rows found."""
    before = resident_bytes()
    started = time.perf_counter()
    reader = CaptureReader(root, verify_checksums=False)
    return time.perf_counter() - started, resident_bytes() - before, len(reader)


def index_figures(root: Path, rows: int, per_shard: int) -> dict[str, float]:
    """Append ``rows`` rows, then open them."""
    content = {"target_layer_ids": [0], "hidden_size": 1, "teacher_top_k": 1}
    CaptureWriter(root, CaptureManifest(content=content))
    appending = 0.0
    for shard in range(rows // per_shard):
        name = shard_name(shard)
        (root / name).touch()
        os.truncate(root / name, 4096)
        row = ShardRow(
            shard=name,
            num_bytes=4096,
            header_sha256="0" * 64,
            sample_ids=[f"{shard * per_shard + place:016x}-0" for place in range(per_shard)],
            num_tokens=[1000 + place for place in range(per_shard)],
            num_supervised=[500 + place for place in range(per_shard)],
        )
        started = time.perf_counter()
        append_index(root, row)
        appending += time.perf_counter() - started
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, grown, found = pool.apply(open_index, (root,))
    assert found == rows
    return {
        "rows": rows,
        "shards": rows // per_shard,
        "index MiB": (root / "index.jsonl").stat().st_size / 2**20,
        "append s": appending,
        "open s": seconds,
        "open MiB": grown / 2**20,
    }


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=120)
    columns = ("cache", "MB", "write GB/s", "plain GB/s", "batches", "mapping", "samples")
    reading = Table(*columns, "of plain: batches", "mapping", title="Reading")
    for shape, (taps, hidden, tokens) in SHAPES.items():
        for dtype in ("bfloat16", FLOAT8):
            with tempfile.TemporaryDirectory() as folder:
                seconds = make_cache(Path(folder), taps, hidden, tokens, dtype, options.mib << 20)
                size = sum(path.stat().st_size for path in Path(folder).glob("shard-*"))
                rates, cpu_rates = read_rates(Path(folder), tokens, options.passes)
            cells = [f"{size / 1e6:.0f}", f"{size / seconds / 1e9:.2f}"]
            cells += [f"{rates[name] / 1e9:.2f}" for name in ("plain", "batches", "mapping", "samples")]
            shares = [f"{cpu_rates[name] / cpu_rates['plain']:.0%}" for name in ("batches", "mapping")]
            reading.add_row(f"{shape}, {dtype}", *cells, *shares)
    console.print(reading)
    index = Table(title="Index")
    for rows in (options.rows // 100, options.rows):
        with tempfile.TemporaryDirectory() as folder:
            figures = index_figures(Path(folder), rows, per_shard=100)
        if not index.columns:
            for name in figures:
                index.add_column(name, justify="right")
        index.add_row(*(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in figures.values()))
    console.print(index)
    console.print(json.dumps({"threads": options.threads, "pinned": torch.cuda.is_available()}))


if __name__ == "__main__":
    main()
