"""Prompt sources -> :class:`PromptRecord`: read, check, drop duplicates, keep the hold-out out of training.

Every input row ends as kept, capped, a duplicate or rejected with a reason, and the counts add up.

Ids are content hashes, and prompts are ordered by ``sha256(seed, prompt_id)``. That is a shuffle which mixes all
sources before any cap and does not depend on the order of the input, so a resumed or extended run meets the
same prompts. A capped source is read as a stream that keeps max_prompts rows and 32 bytes for every other one.

What counts as overlap with the hold-out is the rule of ``data_gen.overlap``.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from data_gen.overlap import Message, OverlapIndex, duplicate_key, holdout_hash
from data_gen.prompt_rows import RowRejectedError, check_source, messages_of, read_rows, source_label
from dflash2_train.config import ConfigError, DataConfig, PromptSourceConfig
from dflash2_train.provenance import sha256_json

STARTER_LICENSE = "Apache-2.0"
UNKNOWN_LICENSE = "unknown"
WARN_REJECTED = 0.1  # rejected share of a source that is worth a warning

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One conversation that the target is to continue."""

    prompt_id: str  # first 16 hex digits of the sha256 of the messages
    source: str
    license: str
    messages: list[Message]  # {role, content}; the last one is a user turn
    split: str  # train | holdout
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the tools that the conversation may call


@dataclass(frozen=True, kw_only=True)
class RemovedPrompt:
    """A training prompt that overlaps with the hold-out, the rule, and one hold-out prompt that it meets."""

    record: PromptRecord
    rule: str
    holdout_id: str


@dataclass(kw_only=True)
class SourceCounts:
    """What became of the rows of one source."""

    label: str
    split: str
    rows: int = 0
    usable: int = 0  # neither rejected nor duplicates
    kept: int = 0
    capped: int = 0  # usable rows beyond max_prompts
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # reason -> rows
    licenses: Counter[str] = field(default_factory=Counter)  # licence -> kept rows

    def line(self) -> str:
        """The counts as one line of text."""
        parts = [f"{self.rows} rows", f"{self.kept} kept", f"{self.duplicates} duplicates"]
        parts += [f"{self.capped} beyond max_prompts"] if self.capped else []
        parts += [f"{number} rejected ({reason})" for reason, number in sorted(self.rejected.items())]
        return f"{self.split} prompts from {self.label}: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """The counts as a JSON value."""
        return {**vars(self), "rejected": dict(self.rejected), "licenses": dict(self.licenses)}


@dataclass(kw_only=True)
class PromptReport:
    """Counts per source and reason, and the training prompts removed for the hold-out's sake."""

    sources: list[SourceCounts] = field(default_factory=list)
    removed: list[RemovedPrompt] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """Prompts of each split that remain in the end."""
        totals: Counter[str] = Counter()
        for counts in self.sources:
            totals[counts.split] += counts.kept
        for entry in self.removed:
            totals[entry.record.split] -= 1
        return dict(totals)

    def lines(self) -> list[str]:
        """The report as text: a line for each source, for each rule that removed prompts, and for the totals."""
        rules = Counter(entry.rule for entry in self.removed)
        totals = ", ".join(f"{number} {split}" for split, number in self.totals().items())
        return [
            *(counts.line() for counts in self.sources),
            *(f"overlap with the hold-out, {rule}: {number} removed" for rule, number in sorted(rules.items())),
            f"prompts in all: {totals}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON value; every removed prompt is listed by its id."""
        removed = [
            {
                "prompt_id": entry.record.prompt_id,
                "source": entry.record.source,
                "rule": entry.rule,
                "holdout_id": entry.holdout_id,
            }
            for entry in self.removed
        ]
        return {
            "sources": [counts.to_dict() for counts in self.sources],
            "removed": removed,
            "totals": self.totals(),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """The prompts of an experiment, in the order in which they are used."""

    train: list[PromptRecord]
    holdout: list[PromptRecord]
    holdout_hashes: list[str]  # sorted ``overlap.holdout_hash`` of every hold-out prompt, for the manifest
    report: PromptReport


def prompt_id(messages: list[Message]) -> str:
    """16 hex digits that depend on the messages alone."""
    return sha256_json(messages)[:16]


def load_prompts(
    sources: list[PromptSourceConfig], *, split: str = "train", seed: int = 0
) -> tuple[list[PromptRecord], PromptReport]:
    """Read every source, in the seeded order of the module docstring.

    Args:
        sources: earlier sources win where two hold the same prompt (equal but for case and white space).
        split: what the records are for, ``train`` or ``holdout``.
        seed: of the order, and so of what ``max_prompts`` keeps.

    Raises:
        ConfigError: no source, an unreadable file, line or column, or a source without one usable row.
    """
    key = f"data.{split}_prompts"
    if not sources:
        raise ConfigError(f"{key}=[]: needs a prompt source. Add one, as in [{{kind: starter, split: {split}}}].")
    report = PromptReport()
    records: list[PromptRecord] = []
    known: set[bytes] = set()
    for number, source in enumerate(sources):
        check_source(source, f"{key}[{number}]")
        counts = SourceCounts(label=source_label(source), split=split)
        usable = _usable_rows(source, counts, known)
        if source.max_prompts is None:
            kept = list(usable)
        else:
            kept = heapq.nsmallest(source.max_prompts, usable, key=lambda record: _order_key(record, seed))
        _close_counts(counts, kept, f"{key}[{number}]")
        known.update(duplicate_key(record.messages) for record in kept)
        records += kept
        report.sources.append(counts)
    return sorted(records, key=lambda record: _order_key(record, seed)), report


def remove_holdout(
    train: list[PromptRecord], holdout: list[PromptRecord]
) -> tuple[list[PromptRecord], list[RemovedPrompt]]:
    """Part training prompts that overlap with the hold-out from those that do not; the order stays."""
    index = OverlapIndex((record.prompt_id, record.messages) for record in holdout)
    kept, removed = [], []
    for record in train:
        hit = index.find(record.messages)
        if hit is None:
            kept.append(record)
        else:
            removed.append(RemovedPrompt(record=record, rule=hit[0], holdout_id=hit[1]))
    return kept, removed


def plan_prompts(config: DataConfig) -> PromptPlan:
    """Load both splits, take the hold-out out of training and report.

    Raises:
        ConfigError: see :func:`load_prompts`; also if no training prompt is left.
    """
    seed = config.sampling.seed
    holdout, holdout_report = load_prompts(config.holdout_prompts, split="holdout", seed=seed)
    loaded, train_report = load_prompts(config.train_prompts, split="train", seed=seed)
    train, removed = remove_holdout(loaded, holdout)
    if not train:
        raise ConfigError(
            f"data.train_prompts: all {len(loaded)} prompts overlap with data.holdout_prompts. "
            "Use different sources or splits for the two."
        )
    return PromptPlan(
        train=train,
        holdout=holdout,
        holdout_hashes=sorted({holdout_hash(record.messages) for record in holdout}),
        report=PromptReport(sources=train_report.sources + holdout_report.sources, removed=removed),
    )


def _usable_rows(source: PromptSourceConfig, counts: SourceCounts, known: set[bytes]) -> Iterator[PromptRecord]:
    """Records of a source that are neither rejected nor duplicates; counts the others."""
    seen: set[bytes] = set()
    for place, row in read_rows(source):
        counts.rows += 1
        try:
            messages = messages_of(row, source, place)
        except RowRejectedError as reason:
            counts.rejected[str(reason)] += 1
            continue
        key = duplicate_key(messages)
        if key in known or key in seen:
            counts.duplicates += 1
            continue
        seen.add(key)
        counts.usable += 1
        yield _record(row, source, messages, counts)


def _record(
    row: dict[str, Any], source: PromptSourceConfig, messages: list[Message], counts: SourceCounts
) -> PromptRecord:
    """A row's own source and licence win over those of the configuration."""
    name, license_name = row.get("source"), row.get("license")
    if source.kind == "starter":
        name, license_name = "starter", STARTER_LICENSE
    return PromptRecord(
        prompt_id=prompt_id(messages),
        source=name if isinstance(name, str) and name else counts.label,
        license=license_name if isinstance(license_name, str) and license_name else source.license or UNKNOWN_LICENSE,
        messages=messages,
        split=counts.split,
    )


def _close_counts(counts: SourceCounts, kept: list[PromptRecord], key: str) -> None:
    """Fill in what is known only at the end of a source; refuse a source that gave nothing."""
    rejected = counts.rejected.total()
    counts.kept = len(kept)
    counts.capped = counts.usable - counts.kept
    counts.licenses = Counter(record.license for record in kept)
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.rejected.items()))
    if counts.rows == 0:
        raise ConfigError(f"{key} ({counts.label}): has no rows. Check its path and split.")
    if rejected == counts.rows:
        raise ConfigError(
            f"{key} ({counts.label}): all {counts.rows} rows were rejected ({reasons}). "
            "Check messages_column and prompt_column."
        )
    if rejected > WARN_REJECTED * counts.rows:
        _LOG.warning("%s (%s): %d of %d rows rejected (%s)", key, counts.label, rejected, counts.rows, reasons)


def _order_key(record: PromptRecord, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{record.prompt_id}".encode()).digest()
