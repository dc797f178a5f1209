"""What a cache holds, in figures: sizes, lengths, and how well its text agrees with the teacher, source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import shard_index
from data_gen.cache.quarantine import QUARANTINE
from data_gen.cache.reader import CaptureReader
from data_gen.cache.verify import label_hits

BINS = 24  # of the histogram of lengths
UNKNOWN = "unknown"  # source of samples without a conversation


@dataclass(kw_only=True)
class SourceStatistics:
    """Samples of one prompt source."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0  # tokens with a label and a teacher
    in_top_k: int = 0  # of these, among the teacher's stored ones
    argmax: int = 0  # of these, its first choice
    finish_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def in_top_k_share(self) -> float:
        """Share of labels in the teacher's top-k."""
        return self.in_top_k / max(self.supervised, 1)

    @property
    def argmax_share(self) -> float:
        """Share of labels that are the teacher's first choice."""
        return self.argmax / max(self.supervised, 1)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON value, shares included."""
        return {**vars(self), "in_top_k_share": self.in_top_k_share, "argmax_share": self.argmax_share}


@dataclass(kw_only=True)
class StoreStatistics:
    """A whole cache."""

    dtype: str
    shards: int
    num_bytes: int
    quarantined: int  # shards set aside so far
    length_edges: list[int]  # [bins + 1] tokens
    length_counts: list[int]  # [bins] samples
    sources: dict[str, SourceStatistics]  # by name

    @property
    def total(self) -> SourceStatistics:
        """All sources together."""
        total = SourceStatistics()
        for part in self.sources.values():
            total.samples += part.samples
            total.tokens += part.tokens
            total.supervised += part.supervised
            total.in_top_k += part.in_top_k
            total.argmax += part.argmax
            total.finish_reasons += part.finish_reasons
        return total

    def to_dict(self) -> dict[str, Any]:
        """As a JSON value, shares included."""
        sources = {name: part.to_dict() for name, part in self.sources.items()}
        return {**vars(self), "total": self.total.to_dict(), "sources": sources}


def length_histogram(lengths: np.ndarray[Any, Any]) -> tuple[list[int], list[int]]:
    """Edges [bins + 1] and counts [bins] of sample lengths: equal bins of whole tokens from 0, the longest inside."""
    width = -(-(int(lengths.max()) + 1) // BINS)
    edges = [width * place for place in range(BINS + 1)]
    counts, _ = np.histogram(lengths, bins=edges)
    return edges, [int(count) for count in counts]


def gather_statistics(
    reader: CaptureReader, conversations: ConversationStore | None, on_samples: Callable[[int], None]
) -> StoreStatistics:
    """Read ids, masks and teachers of a whole cache; tap states are not touched.

    Args:
        reader: the cache.
        conversations: give each sample its source and finish reason; without them all are of source ``unknown``.
        on_samples: called with the number of samples done.

    Raises:
        CacheIntegrityError: a shard is not the one that the index speaks of.
    """
    edges, counts = length_histogram(reader.index.num_tokens)
    sources: dict[str, SourceStatistics] = {}
    done = 0
    for number, shard in enumerate(reader.index.shards):
        rows = _conversations(conversations, shard_index(shard.shard))
        file = reader.shard(number)
        mask = file.tensors["loss_mask"].view(torch.bool)
        for place in range(len(file)):
            row = rows.get(file.sample_ids[place], {})
            part = sources.setdefault(row.get("source", UNKNOWN), SourceStatistics())
            span = file.span(place)
            hits = label_hits(file.tensors["input_ids"][span], mask[span], file.tensors["teacher_ids"][span])
            part.samples += 1
            part.tokens += span.stop - span.start
            part.supervised += hits[0]
            part.in_top_k += hits[1]
            part.argmax += hits[2]
            part.finish_reasons[row.get("finish_reason", UNKNOWN)] += 1
            done += 1
            on_samples(done)
    return StoreStatistics(
        dtype=reader.manifest.cache_dtype,
        shards=len(reader.index.shards),
        num_bytes=sum(shard.num_bytes for shard in reader.index.shards),
        quarantined=sum(1 for _ in (reader.root / QUARANTINE).glob("*.safetensors")),
        length_edges=edges,
        length_counts=counts,
        sources=dict(sorted(sources.items())),
    )


def _conversations(store: ConversationStore | None, index: int) -> dict[str, dict[str, Any]]:
    if store is None or not store.path(index).exists():
        return {}
    return {row["row_id"]: row for row in store.read(index, ["row_id", "source", "finish_reason"])}
