"""Documents, a deterministic capture of them, and a ring that holds them; shared by test modules."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from data_gen.cache.format import CapturedSample, CaptureManifest
from data_gen.cache.ring import Ring, plan_content, ring_plan
from data_gen.cache.row_plan import Document, PlannedRow, RowPlan, trainable
from data_gen.cache.segment import segment_bytes
from data_gen.ring_filler import Beat, RingFiller
from dflash2_train.config import StreamConfig

HIDDEN, TOP_K, PROMPT = 4, 3, 2
ROW_TOKENS, SEED = 24, 3
TOKEN_BYTES = 2 * HIDDEN + 6 * TOP_K + 9
MANIFEST = CaptureManifest(
    content={"target": "toy", "target_layer_ids": [0], "hidden_size": HIDDEN, "vocab_size": 50, "teacher_top_k": TOP_K}
)


def make_documents(count: int, seed: int = 0) -> list[Document]:
    """Documents of 5 to 16 tokens."""
    lengths = random.Random(seed)
    sizes = [lengths.randint(5, 16) for _ in range(count)]
    return trainable(
        Document(sample_id=f"doc-{i:03d}", num_tokens=size, num_supervised=size - PROMPT)
        for i, size in enumerate(sizes)
    )


def sample_of(document: Document) -> CapturedSample:
    """The one sample that any capture of this document gives."""
    length = document.num_tokens
    generator = torch.Generator().manual_seed(int(hashlib.sha256(document.sample_id.encode()).hexdigest()[:8], 16))
    return CapturedSample(
        sample_id=document.sample_id,
        input_ids=torch.randint(0, 50, (length,), generator=generator, dtype=torch.int32),
        loss_mask=torch.arange(length) >= length - document.num_supervised,
        tap_hidden=torch.randn(length, HIDDEN, generator=generator).to(torch.bfloat16),
        teacher_ids=torch.randint(0, 50, (length, TOP_K), generator=generator, dtype=torch.int32),
        teacher_logprobs=torch.full((length, TOP_K), -1.5, dtype=torch.float16),
        teacher_log_normaliser=torch.randn(length, generator=generator),
    )


def capture(documents: Sequence[Document], beat: Beat) -> list[CapturedSample]:
    """A capture without an engine."""
    beat()
    return [sample_of(document) for document in documents]


class PlainRows:
    """Rows straight from the documents: what every mode must equal."""

    width = HIDDEN

    def announce(self, rows: Sequence[PlannedRow]) -> None:
        pass

    def read(self, row: PlannedRow, states: torch.Tensor) -> list[CapturedSample]:
        samples = [sample_of(document) for document in row.documents]
        torch.cat([sample.tap_hidden for sample in samples], out=states)
        return samples

    def passed(self, number: int) -> None:
        pass


def make_ring(root: Path, documents: Sequence[Document], stream: StreamConfig) -> tuple[Ring, RowPlan]:
    """A ring for ``documents``, and its plan."""
    content = plan_content(documents, row_tokens=ROW_TOKENS, seed=SEED, stream=stream)
    ring = Ring.create(root, MANIFEST, content, documents)
    return ring, ring_plan(ring, row_tokens=ROW_TOKENS, seed=SEED, stream=stream)


def size_of(plan: RowPlan, segment: int) -> int:
    documents = plan.segment_documents(segment)
    tokens = sum(document.num_tokens for document in documents)
    return segment_bytes([document.sample_id for document in documents], tokens, TOKEN_BYTES)


def make_filler(ring: Ring, plan: RowPlan, *, budget: int, stale_after_s: float = 60.0) -> RingFiller:
    """A producer."""
    return RingFiller(
        ring,
        plan,
        capture,
        size_of=lambda segment: size_of(plan, segment),
        budget=budget,
        stale_after_s=stale_after_s,
        poll_s=0.005,
    )


def bytes_in(root: Path) -> int:
    """Bytes of all segments, whole and half-written."""
    total = 0
    for path in (root / "segments").iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
