"""Prompt sources -> :class:`PromptPlan`: which prompts are used, in which order, and what became of all others.

Every input row ends as kept, a duplicate, capped, filtered, overlapping, unused or rejected with a reason, and the
counts of each source add up to its rows.

Prompts are ordered by a hash of seed and content. That is a shuffle which mixes all sources before any cap and does
not depend on the order of the input, so a resumed or extended run meets the same prompts. A source is read as a
stream; a capped one takes memory for its ``max_prompts`` prompts, however many rows it has.

The steps, of the training prompts: rows are read and checked (``prompt_sources``, ``prompt_columns``), filtered
(``prompt_filters``) and capped (``prompt_selection``); what overlaps with the hold-out or the evaluation prompts goes
(``overlap``), then what nearly equals an earlier prompt (``near_duplicates``); ``data.max_prompts`` is shared out last.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from data_gen.near_duplicates import drop_near_duplicates
from data_gen.prompt_columns import ColumnMap, Conversation
from data_gen.prompt_filters import OTHER_SIDE, RowFilter
from data_gen.prompt_records import PromptPlan, PromptRecord, prompt_id
from data_gen.prompt_report import EARLY_ROWS, NEAR_EXAMPLES, PromptReport, RemovedPrompt, SourceCounts
from data_gen.prompt_rows import RowRejectedError
from data_gen.prompt_selection import Selection, order_key, share_out
from data_gen.prompt_sources import PromptSource
from data_gen.prompt_store import assemble_plan, read_plan, write_plan
from dflash2_train.config import ConfigError, DataConfig, PromptSourceConfig
from dflash2_train.overlap import OverlapIndex, duplicate_key

__all__ = ["PromptPlan", "PromptRecord", "find_overlap", "load_prompts", "make_prompts", "plan_prompts", "prompt_id"]

STARTER_LICENSE = "Apache-2.0"
UNKNOWN_LICENSE = "unknown"
MAX_REJECTED_SHARE = 0.1
WARN_REJECTED = 0.01  # rejected share of a source that is worth a warning

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Source:
    """What is left of one source, each prompt with its place in the seeded order."""

    counts: SourceCounts
    weight: float | None
    ranked: list[tuple[int, PromptRecord]] = field(default_factory=list)

    def keep(self, ids: set[str]) -> int:
        """Let go of every prompt whose id is not listed; returns how many."""
        before = len(self.ranked)
        self.ranked = [(key, record) for key, record in self.ranked if record.prompt_id in ids]
        return before - len(self.ranked)

    def close(self) -> SourceCounts:
        """The final counts."""
        self.counts.kept = len(self.ranked)
        self.counts.licenses = Counter(record.license for _, record in self.ranked)
        self.counts.check_sum()
        return self.counts


def load_prompts(
    sources: list[PromptSourceConfig],
    *,
    split: str = "train",
    seed: int = 0,
    max_rejected_share: float = MAX_REJECTED_SHARE,
) -> tuple[list[PromptRecord], PromptReport]:
    """Read every source, in the seeded order of the module docstring.

    Args:
        sources: earlier sources win where two hold the same prompt (equal but for case and white space).
        split: what the records are for, ``train``, ``holdout`` or ``evaluation``.
        seed: of the order, and so of what ``max_prompts`` keeps.
        max_rejected_share: share of a source's rows that may be faulty.

    Raises:
        ConfigError: no source, one that cannot be read or has too many faulty rows, or one without a usable row.
    """
    loaded = _load_sources(sources, split, seed, max_rejected_share)
    return _merge(loaded), PromptReport(sources=[source.close() for source in loaded])


def plan_prompts(config: DataConfig) -> PromptPlan:
    """The plan that ``data.root`` holds for these settings, else :func:`make_prompts`, stored there.

    Raises:
        ConfigError: see :func:`make_prompts`.
    """
    plan = read_plan(config)
    if plan is None:
        plan = make_prompts(config)
        write_plan(config, plan)
    return plan


def make_prompts(config: DataConfig) -> PromptPlan:
    """Load all prompts, take out of training what must not be in it, share out ``max_prompts`` and report.

    Raises:
        ConfigError: see :func:`load_prompts`; also if no training prompt is left.
    """
    seed, limit = config.sampling.seed, config.max_rejected_share
    holdout, report = load_prompts(config.holdout_prompts, split="holdout", seed=seed, max_rejected_share=limit)
    references = [("hold-out", holdout)]
    if config.evaluation_prompts:
        evaluation, more = load_prompts(
            config.evaluation_prompts, split="evaluation", seed=seed, max_rejected_share=limit
        )
        references.append(("evaluation prompts", evaluation))
        report.sources += more.sources
    loaded = _load_sources(config.train_prompts, "train", seed, limit)
    number = len(_merge(loaded))
    report.removed = _remove_overlap(loaded, references)
    if not any(source.ranked for source in loaded):
        raise ConfigError(
            f"data.train_prompts: all {number} prompts overlap with data.holdout_prompts or data.evaluation_prompts. "
            "Use different sources or splits."
        )
    if config.near_duplicates is not None:
        report.near_duplicates = _remove_near_duplicates(loaded, config.near_duplicates)
    if config.max_prompts is not None:
        _share_out(loaded, config.max_prompts)
    report.sources = [source.close() for source in loaded] + report.sources
    return assemble_plan(_merge(loaded), holdout, report)


def find_overlap(
    train: Iterable[PromptRecord], references: Iterable[tuple[str, list[PromptRecord]]]
) -> list[RemovedPrompt]:
    """The training prompts that overlap with a set of references, each with the rule and one prompt that it meets.

    Args:
        train: the prompts to look at.
        references: name and prompts of every set that must stay unseen.
    """
    indexes = [
        (name, OverlapIndex((record.prompt_id, record.messages) for record in records)) for name, records in references
    ]
    removed = []
    for record in train:
        for name, index in indexes:
            hit = index.find(record.messages)
            if hit is not None:
                removed.append(
                    RemovedPrompt(
                        prompt_id=record.prompt_id,
                        source=record.source,
                        rule=hit[0],
                        reference=name,
                        reference_id=hit[1],
                    )
                )
                break
    return removed


def _load_sources(sources: list[PromptSourceConfig], split: str, seed: int, max_rejected_share: float) -> list[_Source]:
    if not sources:
        key = f"data.{split}_prompts"
        raise ConfigError(f"{key}=[]: needs a prompt source. Add one, as in [{{kind: starter, split: {split}}}].")
    known: set[bytes] = set()
    loaded = []
    for number, config in enumerate(sources):
        key = f"data.{split}_prompts[{number}]"
        config.check(key)
        source = PromptSource(config)
        counts = SourceCounts(label=source.label, split=split, terms=config.terms)
        selection = _select(source, counts, known, seed, key)
        counts.revision = source.revision
        counts.duplicates += selection.duplicates
        counts.capped = selection.left_out
        counts.check_rejected(key, max_rejected_share)
        entry = _Source(counts=counts, weight=config.weight, ranked=selection.ranked())
        if counts.filtered.total() + counts.rejected.total() == counts.rows:
            few = counts.filtered[OTHER_SIDE] == counts.rows
            advice = "Give both sides a larger holdout_share" if few else "Loosen its filters"
            raise ConfigError(f"{key} ({counts.label}): no row is left. {counts.line()}. {advice}, or leave it out.")
        rejected = counts.rejected.total()
        if rejected > WARN_REJECTED * counts.rows:
            first = "; ".join(counts.first_rejected)
            _LOG.warning("%s (%s): %d of %d rows rejected, first %s", key, counts.label, rejected, counts.rows, first)
        known.update(duplicate_key(record.messages, record.tools) for _, record in entry.ranked)
        loaded.append(entry)
    return loaded


def _select(source: PromptSource, counts: SourceCounts, known: set[bytes], seed: int, key: str) -> Selection:
    """Read a source to its end, count every row and keep what its cap allows."""
    columns, row_filter = ColumnMap(source.config), RowFilter(source.config, counts.split)
    selection = Selection(source.config.max_prompts)
    for place, row in source.rows():
        counts.rows += 1
        try:
            if isinstance(row, RowRejectedError):
                raise row
            unwanted = row_filter.unwanted_columns(row)
            if not unwanted:
                conversation = columns.read(row)
                unwanted = row_filter.unwanted(conversation.messages)
        except RowRejectedError as error:
            counts.reject(place, error)
            if counts.rows == counts.rejected.total() == EARLY_ROWS:
                counts.check_rejected(key, 0.0)
            continue
        if unwanted:
            counts.filtered[unwanted] += 1
            continue
        same = duplicate_key(conversation.messages, conversation.tools)
        rank = order_key(same, seed)
        if same in known:
            counts.duplicates += 1
        elif selection.wants(rank):
            selection.add(rank, _record(row, source, conversation, counts))
    return selection


def _record(
    row: dict[str, Any], source: PromptSource, conversation: Conversation, counts: SourceCounts
) -> PromptRecord:
    """A row's own source and licence win over those of the configuration, but for a source with a given name."""
    config = source.config
    name, license_name = config.name or row.get("source"), row.get("license")
    if config.kind == "starter":
        name, license_name = "starter", STARTER_LICENSE
    return PromptRecord(
        prompt_id=prompt_id(conversation.messages, conversation.tools),
        source=name if isinstance(name, str) and name else counts.label,
        license=license_name if isinstance(license_name, str) and license_name else config.license or UNKNOWN_LICENSE,
        messages=conversation.messages,
        split=counts.split,
        tools=conversation.tools,
    )


def _merge(loaded: list[_Source]) -> list[PromptRecord]:
    ranked = sorted((entry for source in loaded for entry in source.ranked), key=lambda entry: entry[0])
    return [record for _, record in ranked]


def _remove_overlap(loaded: list[_Source], references: list[tuple[str, list[PromptRecord]]]) -> list[RemovedPrompt]:
    removed = find_overlap(_merge(loaded), references)
    rules = {entry.prompt_id: f"{entry.reference}: {entry.rule}" for entry in removed}
    for source in loaded:
        ids = [record.prompt_id for _, record in source.ranked]
        source.counts.overlap = Counter(rules[found] for found in ids if found in rules)
        source.keep({found for found in ids if found not in rules})
    return removed


def _remove_near_duplicates(loaded: list[_Source], threshold: float) -> list[tuple[str, str]]:
    kept, dropped = drop_near_duplicates(_merge(loaded), threshold)
    ids = {record.prompt_id for record in kept}
    for source in loaded:
        source.counts.near_duplicates = source.keep(ids)
    return [(record.prompt_id, like) for record, like in dropped[:NEAR_EXAMPLES]]


def _share_out(loaded: list[_Source], total: int) -> None:
    """Cut to ``total`` prompts: by weight where sources have one, else the first of all sources mixed."""
    weights = [source.weight for source in loaded if source.weight is not None]
    if weights:
        given = share_out(total, [len(source.ranked) for source in loaded], weights)
        ids = {
            record.prompt_id
            for source, number in zip(loaded, given, strict=True)
            for _, record in source.ranked[:number]
        }
    else:
        ids = {record.prompt_id for record in _merge(loaded)[:total]}
    for source in loaded:
        source.counts.unused = source.keep(ids)
