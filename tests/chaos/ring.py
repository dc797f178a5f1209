"""Kills producers and trainers of a ring with SIGKILL at random moments, and looks at what was trained on.

Run it for many rounds with ``python -m tests.chaos.ring --runs 200``; each round prints a line on failure
and the summary is one JSON object. A round forks two or three producers (with a capture that gives the same sample
for the same document and takes a random while) and a trainer with one or two ranks that saves its position and the
digests of all its batches now and then. Any of them is killed and started again a few times.

What must hold: the digests of the one line of checkpoints equal those of the plan, window by window; the ring never
takes more than its budget; without a kill every segment is written once; all producers end when the trainer is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from data_gen.cache.claims import Claim
from data_gen.cache.format import CapturedSample
from data_gen.cache.ring import Ring, ring_plan
from data_gen.cache.row_plan import Document, RowPlan
from data_gen.ring_filler import Beat, RingFiller
from dflash2_train import ring_rows
from dflash2_train.config import StreamConfig
from dflash2_train.data import PackedBatch, RowSource, WindowLoader
from dflash2_train.prefetch import Prefetcher
from dflash2_train.provenance import atomic_write_json
from dflash2_train.ring_rows import RingRows
from tests.ring_cases import ROW_TOKENS, SEED, PlainRows, bytes_in, make_documents, make_ring, sample_of, size_of

ROUND_LIMIT_S = 300.0  # a second at most on an idle machine; this is for one that is starved
ring_rows.POLL_S = 0.003
MEMORY = Path("/dev/shm")  # where flushing to the disk takes no time


@dataclass(frozen=True, kw_only=True)
class Case:
    """One round, drawn from its number."""

    number: int
    documents: list[Document]
    stream: StreamConfig
    windows: int
    ranks: int
    producers: int
    kills: int
    save_every: int
    pause_s: float  # a capture takes up to so long
    segments_in_budget: float

    @classmethod
    def draw(cls, number: int) -> Case:
        rng = random.Random(number)
        return cls(
            number=number,
            documents=make_documents(rng.randint(8, 30), seed=number),
            stream=StreamConfig(segment_rows=rng.randint(1, 4), reuse=rng.choice([1, 1, 2]), timeout_s=200),
            windows=rng.randint(6, 20),
            ranks=rng.randint(1, 2),
            producers=rng.randint(2, 3),
            kills=0 if number % 5 == 0 else rng.randint(1, 8),
            save_every=rng.randint(2, 6),
            pause_s=rng.choice([0.002, 0.02]),
            segments_in_budget=rng.choice([2.0, 2.5, 4.0]),
        )

    def loader(self, source: RowSource, plan: RowPlan, rank: int) -> WindowLoader:
        return WindowLoader(
            source,
            plan,
            rows=1,
            accumulation=2,
            anchors_per_document=3,
            seed=SEED,
            rank=rank,
            world_size=self.ranks,
        )

    def budget(self, plan: RowPlan) -> int:
        last = plan.segment_of(self.windows * 2 * self.ranks)
        return int(self.segments_in_budget * max(size_of(plan, segment) for segment in range(last + 1)))


def digest(batches: Sequence[PackedBatch]) -> str:
    """Of all that a window hands to the training."""
    found = hashlib.sha256()
    for batch in batches:
        for name, value in sorted(vars(batch).items()):
            found.update(name.encode())
            found.update(
                value.contiguous().view(torch.uint8).numpy().tobytes()
                if isinstance(value, torch.Tensor)
                else repr(value).encode()
            )
    return found.hexdigest()


def expected(case: Case, plan: RowPlan) -> list[list[str]]:
    """Digests of every window and rank, straight from the plan."""
    loaders = [case.loader(PlainRows(), plan, rank) for rank in range(case.ranks)]
    return [
        [digest(loader.window(number * loader.rows_per_window)) for loader in loaders] for number in range(case.windows)
    ]


class LoggedFiller(RingFiller):
    """Notes every segment that it publishes."""

    def _publish(self, claim: Claim, samples: Sequence[CapturedSample]) -> int:
        written = super()._publish(claim, samples)
        with open(self.ring.root / "published.log", "a") as log:
            log.write(f"{claim.segment}\n")
        return written


def produce(case: Case, root: Path, seed: float) -> None:
    """One producer, until the trainer is done."""
    rng = random.Random(seed)

    def capture(documents: Sequence[Document], beat: Beat) -> list[CapturedSample]:
        samples = []
        for document in documents:
            time.sleep(rng.uniform(0, case.pause_s) / len(documents))
            samples.append(sample_of(document))
            beat()
        return samples

    ring = Ring(root)
    plan = ring_plan(ring, row_tokens=ROW_TOKENS, seed=SEED, stream=case.stream)
    filler = LoggedFiller(
        ring,
        plan,
        capture,
        size_of=lambda segment: size_of(plan, segment),
        budget=case.budget(plan),
        stale_after_s=30,
        poll_s=0.003,
    )
    filler.clear_damaged()
    filler.run(lambda: ring.done() is not None)


def train(case: Case, root: Path) -> None:
    """The trainer with all its ranks, from its last checkpoint to the end."""
    ring = Ring(root)
    plan = ring_plan(ring, row_tokens=ROW_TOKENS, seed=SEED, stream=case.stream)
    saved = root / "checkpoint.json"
    line: list[list[str]] = json.loads(saved.read_text()) if saved.exists() else []
    sources = [
        RingRows(ring, plan, rank=rank, settings=case.stream, give_up=lambda: False) for rank in range(case.ranks)
    ]
    loaders = [case.loader(source, plan, rank) for rank, source in enumerate(sources)]
    window_rows = loaders[0].rows_per_window
    ring.begin(row=len(line) * window_rows, world_size=case.ranks, goal=case.windows * window_rows)
    closing = threading.Event()
    ahead = [
        Prefetcher(
            loader,
            start=len(line) * window_rows,
            windows=case.windows - len(line),
            depth=2,
            closing=closing,
        )
        for loader in loaders
    ]
    with ThreadPoolExecutor(case.ranks) as pool:
        while len(line) < case.windows:
            line.append(list(pool.map(lambda windows: digest(windows.next()), ahead)))
            time.sleep(0.002)
            if len(line) % case.save_every == 0 or len(line) == case.windows:
                atomic_write_json(saved, line)
                ring.save_checkpoint(len(line) * window_rows)
    ring.finish(output_dir="out", steps=case.windows)


def fork(work: Callable[[], None]) -> int:
    """Process number of a child that does ``work`` and leaves without the parent's clean-up."""
    child = os.fork()
    if child:
        return child
    code = 1
    torch.set_num_threads(1)  # renews torch's thread pool, which does not survive a fork and is not made thread-safely
    try:
        work()
        code = 0
    except Exception:  # noqa: BLE001 - the child's only door out
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Outcome:
    """What came of a round."""

    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    most_bytes: int = 0
    seconds: float = 0.0


class Round:
    """One case, run to its end."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case, self.root, self.outcome = case, root, Outcome()
        self.rng = random.Random(f"kills/{case.number}")
        self.ring, self.plan = make_ring(root, case.documents, case.stream)
        self.budget = case.budget(self.plan)
        self.running: dict[int, str] = {}

    def start(self, name: str) -> None:
        seed = self.rng.random()
        trainer = partial(train, self.case, self.root)
        work = trainer if name == "trainer" else partial(produce, self.case, self.root, seed)
        self.running[fork(work)] = name

    def reap(self) -> None:
        """Note children that ended by themselves."""
        for child, name in list(self.running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self.running[child]
                if status:
                    self.outcome.faults.append(f"{name} ended with status {status}")

    def kill_one(self) -> None:
        """SIGKILL to one of them, and the same again at once."""
        name = "trainer" if self.rng.random() < 0.4 else "producer"
        candidates = [child for child, kind in self.running.items() if kind == name]
        if not candidates:
            return
        child = self.rng.choice(candidates)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        del self.running[child]
        self.outcome.kills[name] += 1
        self.start(name)

    def run(self) -> Outcome:
        started = time.monotonic()
        for name in ["trainer", *["producer"] * self.case.producers]:
            self.start(name)
        kills = sorted(self.rng.uniform(0.0, 0.25) for _ in range(self.case.kills))
        while self.running and not self.outcome.faults:
            now = time.monotonic() - started
            self.outcome.most_bytes = max(self.outcome.most_bytes, bytes_in(self.root))
            if kills and now > kills[0]:
                kills.pop(0)
                self.kill_one()
            self.reap()
            if now > ROUND_LIMIT_S:
                self.outcome.faults.append(f"not done after {ROUND_LIMIT_S:g} s")
            time.sleep(0.003)
        for child in self.running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.judge()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def judge(self) -> None:
        """Compare with what must hold."""
        faults = self.outcome.faults
        saved = self.root / "checkpoint.json"
        line = json.loads(saved.read_text()) if saved.exists() else []
        if line != expected(self.case, self.plan):
            faults.append(f"the {len(line)} windows trained on are not the {self.case.windows} of the plan")
        if self.outcome.most_bytes > self.budget:
            faults.append(f"{self.outcome.most_bytes} bytes in a ring of {self.budget}")
        log = self.root / "published.log"
        published = Counter(log.read_text().split() if log.exists() else ())
        # A takeover or a trainer that goes back may have a segment made again; nothing else may.
        again = {segment: number for segment, number in published.items() if number > 1}
        if again and not self.outcome.kills:
            faults.append(f"segments written again though nothing was killed: {again}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first round; it fixes the round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kills: Counter[str] = Counter()
    failed: dict[int, list[str]] = {}
    started = time.monotonic()
    for number in range(arguments.first, arguments.first + arguments.runs):
        root = Path(tempfile.mkdtemp(prefix="ring-chaos-", dir=MEMORY if MEMORY.is_dir() else None))
        try:
            outcome = Round(Case.draw(number), root / "ring").run()
        finally:
            shutil.rmtree(root)
        kills += outcome.kills
        if outcome.faults:
            failed[number] = outcome.faults
            sys.stderr.write(f"round {number}: {outcome.faults}\n")
    summary = {
        "runs": arguments.runs,
        "failed": failed,
        "killed": dict(kills),
        "seconds": round(time.monotonic() - started, 1),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
