"""Gates over the text of the cache: who wrote it, and what of it is trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_gen.cache.verify import teacher_hits
from dflash2_train.attest.gate import Gate, judge
from dflash2_train.attest.samples import Samples
from dflash2_train.config import AttestConfig

ALL = "all"  # the source of samples that no conversation names
MIN_JUDGED = 32  # supervised tokens under which a source's share says nothing


def spread(indices: Sequence[int]) -> Iterator[int]:
    """The same indices in an order whose every beginning is spread over the whole: halves, quarters, eighths."""
    seen: set[int] = set()
    step = len(indices)
    while len(seen) < len(indices):
        step = max(step // 2, 1)
        for place in range(0, len(indices), step):
            if place not in seen:
                seen.add(place)
                yield indices[place]


@dataclass(kw_only=True)
class LabelCounts:
    """Supervised tokens of one source, and how many the teacher knew."""

    samples: int = 0
    supervised: int = 0
    in_top_k: int = 0
    argmax: int = 0


@dataclass(kw_only=True)
class LabelFindings:
    """What a look at part of the samples gave."""

    by_source: dict[str, LabelCounts] = field(default_factory=dict)
    with_mask_token: list[str] = field(default_factory=list)  # sample ids

    def share(self, name: str) -> float:
        """``in_top_k`` or ``argmax`` over all supervised tokens looked at."""
        counts = self.by_source.values()
        return sum(vars(count)[name] for count in counts) / max(sum(count.supervised for count in counts), 1)


def look_at_labels(
    samples: Samples, sources: dict[str, str], mask_token_id: int, tokens_per_source: int
) -> LabelFindings:
    """Hold labels against the teacher, up to ``tokens_per_source`` tokens of each source, spread over the cache."""
    groups: dict[str, list[int]] = defaultdict(list)
    lengths = []
    for index, row in enumerate(samples.index):
        groups[sources.get(row.sample_id, ALL)].append(index)
        lengths.append(row.num_tokens)
    findings = LabelFindings()
    for source, indices in sorted(groups.items()):
        counts, tokens = LabelCounts(), 0
        for index in spread(indices):
            if tokens >= tokens_per_source:
                break
            sample = samples.read(index)
            tokens += lengths[index]
            if bool((sample.input_ids == mask_token_id).any()):
                findings.with_mask_token.append(sample.sample_id)
            supervised, inside, first = teacher_hits(sample)
            counts.samples += 1
            counts.supervised += supervised
            counts.in_top_k += inside
            counts.argmax += first
        findings.by_source[source] = counts
    return findings


def label_gates(samples: Samples, findings: LabelFindings, mask_token_id: int, limits: AttestConfig) -> list[Gate]:
    """Mask token, supervised share, and the labels of every source."""
    return [
        _mask_token_gate(findings, mask_token_id),
        _supervised_gate(samples, limits),
        *(_source_gate(source, counts, limits.min_agreement) for source, counts in findings.by_source.items()),
    ]


def _mask_token_gate(findings: LabelFindings, mask_token_id: int) -> Gate:
    looked_at = sum(counts.samples for counts in findings.by_source.values())
    bad = findings.with_mask_token
    found = f"in {len(bad)} of {looked_at} samples, as {bad[0]}" if bad else f"in none of {looked_at} samples"
    return judge(
        "mask token",
        not bad,
        found,
        f"drafter.mask_token_id={mask_token_id} never in the text",
        "Choose a reserved token that the target never writes.",
    )


def _supervised_gate(samples: Samples, limits: AttestConfig) -> Gate:
    tokens = sum(row.num_tokens for row in samples.index)
    share = sum(row.num_supervised for row in samples.index) / max(tokens, 1)
    low, high = limits.min_supervised_share, limits.max_supervised_share
    return judge(
        "supervised share",
        low <= share <= high,
        f"{share:.1%} of {tokens:,} tokens",
        f"from {low:.1%} to {high:.1%}",
        "A share this far off means that prompts are trained on or answers are not; capture again, or move "
        "data.attest.min_supervised_share and max_supervised_share.",
    )


def _source_gate(source: str, counts: LabelCounts, limit: float) -> Gate:
    share = counts.in_top_k / max(counts.supervised, 1)
    first = counts.argmax / max(counts.supervised, 1)
    few = counts.supervised < MIN_JUDGED
    found = f"{share:.1%} in the teacher's top-k, {first:.1%} its first choice, of {counts.supervised:,}"
    return judge(
        f"labels: {source}",
        few or share >= limit,
        found + (", too few to judge" if few else ""),
        f"at least {limit:.1%} in the top-k",
        "This text was not written by the target under this template: regenerate it, or lower "
        "data.attest.min_agreement if it should stay as it is.",
    )
