"""What a ring and the training order cost: bytes a second through a ring, milliseconds a window, seconds a plan.

``python -m tests.bench.bench_ring [--mib 256] [--documents 450000] [--folder /dev/shm]``

Through the ring go random states whose capture takes no time, so that what is left is the ring's own work: one producer
writes, flushes and publishes segments, then one rank reads all windows. Both sides take turns, each alone, under a
budget of all segments. *window* is what the trainer waits for without prefetching, packing and drawing of anchors
included; with prefetching it overlaps the step before. ``CPU ms`` is processor time of all threads, the figure to
compare on a machine that others use as well.

The plan is that of one epoch over documents of 200 to 4,200 tokens in rows of 8,192.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from data_gen.cache.format import CapturedSample, CaptureManifest
from data_gen.cache.ring import Ring, plan_content, ring_plan
from data_gen.cache.row_plan import Document, RowPlan, trainable
from data_gen.cache.segment import segment_bytes
from data_gen.ring_filler import Beat, RingFiller
from dflash2_train.config import StreamConfig
from dflash2_train.data import WindowLoader
from dflash2_train.ring_rows import RingRows

TOP_K = 20
SHAPES = {"3 taps of 576, rows of 512": (3, 576, 512, 78), "9 taps of 4096, rows of 8192": (9, 4096, 8192, 2040)}


class Bench:
    """One shape: taps, hidden size, tokens a row, tokens a document."""

    def __init__(self, root: Path, taps: int, hidden: int, row_tokens: int, tokens: int, num_bytes: int) -> None:
        self.taps, self.hidden, self.row_tokens = taps, hidden, row_tokens
        self.token_bytes = 2 * taps * hidden + 6 * TOP_K + 9
        self.rows = max(4, num_bytes // (row_tokens * self.token_bytes))
        count = self.rows * (row_tokens // tokens)
        self.documents = trainable(
            Document(sample_id=f"d{i:06d}", num_tokens=tokens, num_supervised=tokens // 2) for i in range(count)
        )
        self.stream = StreamConfig(segment_rows=2, timeout_s=5)
        content = plan_content(self.documents, row_tokens=row_tokens, seed=0, stream=self.stream)
        manifest = {"target_layer_ids": list(range(taps)), "hidden_size": hidden, "teacher_top_k": TOP_K}
        self.ring = Ring.create(root, CaptureManifest(content=manifest), content, self.documents)
        self.plan = ring_plan(self.ring, row_tokens=row_tokens, seed=0, stream=self.stream)
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(tokens, taps * hidden, generator=generator).bfloat16()

    def capture(self, documents: Sequence[Document], beat: Beat) -> list[CapturedSample]:
        """Samples that share their states, so that making them takes next to no time."""
        tokens = len(self.states)
        return [
            CapturedSample(
                sample_id=document.sample_id,
                input_ids=torch.zeros(tokens, dtype=torch.int32),
                loss_mask=torch.arange(tokens) >= tokens - document.num_supervised,
                tap_hidden=self.states,
                teacher_ids=torch.zeros(tokens, TOP_K, dtype=torch.int32),
                teacher_logprobs=torch.full((tokens, TOP_K), -3.0, dtype=torch.float16),
                teacher_log_normaliser=torch.zeros(tokens),
            )
            for document in documents
        ]

    def size_of(self, segment: int) -> int:
        documents = self.plan.segment_documents(segment)
        tokens = sum(document.num_tokens for document in documents)
        return segment_bytes([document.sample_id for document in documents], tokens, self.token_bytes)

    def run(self) -> list[str]:
        """Rates as cells of the table."""
        self.ring.begin(row=0, world_size=1, goal=self.rows)
        filler = RingFiller(self.ring, self.plan, self.capture, size_of=self.size_of, budget=2**50, stale_after_s=60)
        wall, cpu = time.perf_counter(), time.process_time()
        while filler.fill_next():
            pass
        written = (time.perf_counter() - wall, time.process_time() - cpu)
        rows = RingRows(self.ring, self.plan, rank=0, settings=self.stream, give_up=lambda: False)
        loader = WindowLoader(rows, self.plan, rows=1, accumulation=1, anchors_per_document=48, seed=0)
        wall, cpu = time.perf_counter(), time.process_time()
        for row in range(self.rows):
            loader.window(row)
        read = (time.perf_counter() - wall, time.process_time() - cpu)
        rows.close()
        mib, segments = filler.totals.num_bytes / 2**20, filler.totals.segments
        return [
            f"{mib:.0f} MiB in {segments}",
            f"{mib / written[0]:.0f}",
            f"{1000 * written[1] / segments:.1f}",
            f"{mib / read[0]:.0f}",
            f"{1000 * read[0] / self.rows:.2f}",
            f"{1000 * read[1] / self.rows:.2f}",
        ]


def bench_plan(count: int) -> list[str]:
    """Time and memory of the plan."""
    rng = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    documents = trainable(
        Document(sample_id=f"{rng.getrandbits(128):032x}-0", num_tokens=rng.randint(200, 4200), num_supervised=100)
        for _ in range(count)
    )
    plan = RowPlan(documents, row_tokens=8192, seed=0, segment_rows=8)
    started = time.process_time()
    plan.row(0)
    seconds = time.process_time() - started
    rows = 0
    tokens = sum(document.num_tokens for document in documents)
    while plan.row(rows).epoch == 0:
        rows += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    return [f"{count:,}", f"{seconds:.2f}", f"{rows:,}", f"{tokens / (rows * 8192):.1%}", f"{grown:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--documents", type=int, default=450_000)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    console = Console()
    plan = Table(title="Plan of an epoch")
    for name in ("documents", "CPU s", "rows", "filled", "MiB"):
        plan.add_column(name, justify="right")
    plan.add_row(*bench_plan(arguments.documents))
    ring = Table(title="Ring")
    for name in ("shape", "segments", "write MiB/s", "CPU ms/segment", "read MiB/s", "ms/window", "CPU ms/window"):
        ring.add_column(name, justify="right")
    for name, (taps, hidden, row_tokens, tokens) in SHAPES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            bench = Bench(Path(folder) / "ring", taps, hidden, row_tokens, tokens, arguments.mib * 2**20)
            ring.add_row(name, *bench.run())
    console.print(plan)
    console.print(ring)


if __name__ == "__main__":
    main()
