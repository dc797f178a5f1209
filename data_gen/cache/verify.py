"""Look at every sample of a cache: is it whole, are its numbers possible, and did the target write this text?"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data_gen.cache.format import CacheIntegrityError, CapturedSample
from data_gen.cache.reader import CaptureReader
from data_gen.cache.writer import check_sample

MASS_SLACK = 0.02  # rounding of k float16 log probabilities


@dataclass(kw_only=True)
class VerifyReport:
    """Totals of a whole cache. ``faults`` is empty for a cache that may be used."""

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    num_bytes: int = 0
    duplicates: int = 0  # samples whose tokens equal an earlier sample's
    in_top_k: int = 0  # supervised tokens among the teacher's stored ones
    argmax: int = 0  # supervised tokens that are the teacher's first choice
    faults: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Totals and shares as a JSON value."""
        supervised = max(self.supervised, 1)
        shares = {"in_top_k_share": self.in_top_k / supervised, "argmax_share": self.argmax / supervised}
        return {**vars(self), **shares}


def teacher_hits(sample: CapturedSample) -> tuple[int, int, int]:
    """Of a sample's supervised tokens: how many, how many in the teacher's top-k, how many its first choice.

    Token i + 1 is judged by teacher row i; the first token of a sample has no row before it.
    """
    supervised = sample.loss_mask[1:]
    wanted = sample.input_ids[1:][supervised]  # [M]
    ids = sample.teacher_ids[:-1][supervised]  # [M, k]
    matches = ids == wanted[:, None]
    return int(wanted.shape[0]), int(matches.any(dim=-1).sum()), int(matches[:, 0].sum())


def agreement(reader: CaptureReader) -> dict[str, float]:
    """Share of supervised tokens in the teacher's top-k and share that are its first choice, over the whole cache."""
    totals = [0, 0, 0]
    for index in range(len(reader)):
        totals = [total + new for total, new in zip(totals, teacher_hits(reader.read(index)), strict=True)]
    supervised, inside, first = totals
    return {
        "supervised": float(supervised),
        "in_top_k": inside / max(supervised, 1),
        "argmax": first / max(supervised, 1),
    }


def sample_faults(sample: CapturedSample, vocab_size: int) -> list[str]:
    """What is wrong with one sample's values; shapes are checked elsewhere."""
    faults = []
    ids = sample.input_ids
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        faults.append("token ids outside the vocabulary")
    if bool((sample.tap_hidden == 0).all(dim=-1).any()):
        faults.append("all-zero tap rows")
    rows = sample.loss_mask.clone()
    rows[:-1] |= sample.loss_mask[1:]  # rows that must hold a teacher
    logprobs = sample.teacher_logprobs[rows].float()  # [M, k]
    if not bool(torch.isfinite(sample.teacher_log_normaliser).all()) or bool(logprobs.isnan().any()):
        faults.append("teacher values that are not finite")
    elif bool((logprobs.exp().sum(dim=-1) > 1 + MASS_SLACK).any()) or bool((logprobs[:, 0] == -torch.inf).any()):
        faults.append("teacher rows that are no distribution")
    elif bool((logprobs.diff(dim=-1) > 0).any()):
        faults.append("teacher rows that are not in descending order")
    teacher = sample.teacher_ids[rows]
    if bool(((teacher < 0) | (teacher >= vocab_size)).any()):
        faults.append("teacher ids outside the vocabulary")
    return faults


def verify_capture(root: Path) -> VerifyReport:
    """Check the whole cache under ``root``; what is wrong with single samples is listed, not raised.

    Raises:
        CacheIntegrityError: the cache cannot be opened, or a shard's checksum differs.
    """
    reader = CaptureReader(root, verify_checksums=True)
    report = VerifyReport(shards=len(reader.shards), samples=len(reader))
    report.num_bytes = sum((root / name).stat().st_size for name in reader.shards)
    seen: set[bytes] = set()
    for index in range(len(reader)):
        sample = reader.read(index)
        faults = []
        try:
            check_sample(sample, reader.manifest)
            faults = sample_faults(sample, reader.manifest.content["vocab_size"])
        except CacheIntegrityError as error:
            faults = [str(error)]
        report.faults += [f"{reader.index[index].shard}, sample {sample.sample_id}: {fault}" for fault in faults]
        supervised, inside, first = teacher_hits(sample)
        report.tokens += len(sample)
        report.supervised += supervised
        report.in_top_k += inside
        report.argmax += first
        key = hashlib.sha256(sample.input_ids.numpy().tobytes()).digest()
        report.duplicates += key in seen
        seen.add(key)
    repeated = [name for name, number in Counter(row.sample_id for row in reader.index).items() if number > 1]
    report.faults += [f"sample id {name} occurs more than once" for name in repeated]
    reader.close()
    return report
