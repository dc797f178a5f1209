"""From per-prompt results to the published numbers: raw counts first, every rate derived from them by formula.

The main figure is the pooled acceptance length, committed tokens per verify round, where a round commits its accepted
drafts and one token of the target's own, and the token that the prefill gives is not counted. Accepted tokens count
as the target verified them, before a stop token or the length limit cuts the output; this is how servers count. The
emitted figure, after the cut, stands beside it. Pooled means over all rounds; per-request means over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord, PromptRecord

SCHEMA_VERSION = 1
SMALLEST_BUCKET = 128  # prompt tokens; each further bucket is twice as wide
GAP_LIMIT_BF16 = 0.5  # logits: four bfloat16 steps at magnitude 16 to 32
FORMULAS = {
    "committed": "accepted + rounds",
    "acceptance_length_pooled": "committed / rounds (prefill token excluded)",
    "acceptance_length_per_request": "mean over prompts with a round of committed / rounds",
    "emitted_length_pooled": "emitted / rounds (emitted: committed tokens left after stop and length cut the output)",
    "accepted_per_round": "accepted / rounds",
    "acceptance_rate": "accepted / proposed",
    "plain_rates[k]": "accepted_per_position[k] / proposed_per_position[k] (servers: / rounds)",
    "conditional_rates[k]": "accepted_per_position[k] / reached_per_position[k] (reached: all earlier drafts accepted)",
    "tokens_per_second": "output tokens / (prefill + decode seconds) (servers: / wall seconds of the measurement)",
    "decode_tokens_per_second": "(output tokens - prompts) / decode seconds; the drafter's prompt pass is decode",
}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Raw counts of one pass. Lists have one entry a drafted position, 1..K."""

    prompts: int
    prompts_without_rounds: int  # ended with the prefill's token
    output_tokens: int  # the prefill's token included
    rounds: int
    proposed: int
    accepted: int
    committed: int
    emitted: int
    proposed_per_position: list[int]
    reached_per_position: list[int]
    accepted_per_position: list[int]
    accepted_histogram: list[int]  # rounds with 0, 1, .., K accepted


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What follows from :class:`Counts`; None where nothing was counted. Formulas: :data:`FORMULAS`."""

    acceptance_length_pooled: float | None
    acceptance_length_per_request: float | None
    emitted_length_pooled: float | None
    accepted_per_round: float | None
    acceptance_rate: float | None
    plain_rates: list[float | None]
    conditional_rates: list[float | None]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The prompts of one range of prompt lengths, [min_tokens, max_tokens)."""

    min_tokens: int
    max_tokens: int
    counts: Counts
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One decoder's time over all prompts."""

    output_tokens: int
    seconds: dict[str, float]  # by part
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    ms_per_step: float | None  # decode time by verify round, or by plain token


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """One pass over all prompts: greedy or sampled."""

    counts: Counts
    rates: Rates
    buckets: list[Bucket]
    speed: Speed
    per_request: list[list[int]] = field(default_factory=list)  # a prompt: its index, rounds, accepted, prompt tokens


@dataclass(frozen=True, kw_only=True)
class EqualityFailure:
    """A prompt whose speculative output is not the target's greedy output."""

    prompt_id: str
    first_difference: int | None
    num_departures: int | None
    largest_gap: float | None


@dataclass(frozen=True, kw_only=True)
class EqualityReport:
    """Speculative against plain greedy decoding."""

    rule: str
    prompts_checked: int
    prompts_equal: int
    num_departures: int
    largest_gap: float
    failures: list[EqualityFailure]


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """The one record that tables, plots and cards are made from."""

    schema_version: int
    protocol: dict[str, Any]
    formulas: dict[str, str]
    greedy: PassReport
    sampled: PassReport | None
    baseline: Speed | None
    speedup: float | None  # decode_tokens_per_second, greedy over baseline
    equality: EqualityReport | None
    too_long: int = 0  # prompts that were not decoded: they do not fit the context with their answer
    labels: list[str] = field(default_factory=list)  # what a reader must know of all figures
    run: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> EvalReport:
        """The inverse of :meth:`to_json`; the keys that every report.json shares are left to ``runs.EvalRun``.

        Raises:
            ValueError: another schema version.
        """
        if value["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version={value['schema_version']}: this code reads {SCHEMA_VERSION}. Run the evaluation again."
            )
        own = {one.name for one in fields(EvalReport)}
        content = {key: part for key, part in value.items() if key in own}
        content["greedy"] = _pass_from_json(value["greedy"])
        content["sampled"] = _pass_from_json(value["sampled"]) if value["sampled"] else None
        content["baseline"] = Speed(**value["baseline"]) if value["baseline"] else None
        if value["equality"]:
            failures = [EqualityFailure(**failure) for failure in value["equality"]["failures"]]
            content["equality"] = EqualityReport(**{**value["equality"], "failures": failures})
        return EvalReport(**content)


def _pass_from_json(value: dict[str, Any]) -> PassReport:
    buckets = [
        Bucket(**{**bucket, "counts": Counts(**bucket["counts"]), "rates": Rates(**bucket["rates"])})
        for bucket in value["buckets"]
    ]
    return PassReport(
        counts=Counts(**value["counts"]),
        rates=Rates(**value["rates"]),
        buckets=buckets,
        speed=Speed(**value["speed"]),
        per_request=value.get("per_request", []),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def count(decodings: Sequence[DecodeRecord], num_drafted: int) -> Counts:
    """Add up the rounds of all ``decodings``, each round of at most ``num_drafted`` proposals."""
    rounds = [tuple(one) for decoding in decodings for one in decoding.rounds]
    positions = range(1, num_drafted + 1)
    accepted = sum(one[1] for one in rounds)
    return Counts(
        prompts=len(decodings),
        prompts_without_rounds=sum(not decoding.rounds for decoding in decodings),
        output_tokens=sum(len(decoding.token_ids) for decoding in decodings),
        rounds=len(rounds),
        proposed=sum(one[0] for one in rounds),
        accepted=accepted,
        committed=accepted + len(rounds),
        emitted=sum(one[2] for one in rounds),
        proposed_per_position=[sum(one[0] >= k for one in rounds) for k in positions],
        reached_per_position=[sum(one[0] >= k and one[1] >= k - 1 for one in rounds) for k in positions],
        accepted_per_position=[sum(one[1] >= k for one in rounds) for k in positions],
        accepted_histogram=[sum(one[1] == m for one in rounds) for m in range(num_drafted + 1)],
    )


def derive(counts: Counts, decodings: Sequence[DecodeRecord]) -> Rates:
    """Every rate of ``counts``, which must be those of ``decodings``."""
    per_request = [
        1 + sum(one[1] for one in decoding.rounds) / len(decoding.rounds) for decoding in decodings if decoding.rounds
    ]
    accepted = counts.accepted_per_position
    return Rates(
        acceptance_length_pooled=_ratio(counts.committed, counts.rounds),
        acceptance_length_per_request=_ratio(sum(per_request), len(per_request)),
        emitted_length_pooled=_ratio(counts.emitted, counts.rounds),
        accepted_per_round=_ratio(counts.accepted, counts.rounds),
        acceptance_rate=_ratio(counts.accepted, counts.proposed),
        plain_rates=[_ratio(a, n) for a, n in zip(accepted, counts.proposed_per_position, strict=True)],
        conditional_rates=[_ratio(a, n) for a, n in zip(accepted, counts.reached_per_position, strict=True)],
    )


def bucket_range(num_tokens: int) -> tuple[int, int]:
    """Which of [0, 128), [128, 256), [256, 512), ... a prompt length falls into."""
    low, high = 0, SMALLEST_BUCKET
    while num_tokens >= high:
        low, high = high, 2 * high
    return low, high


def bucket_by_prompt_length(
    records: Sequence[PromptRecord], decodings: Sequence[DecodeRecord], num_drafted: int
) -> list[Bucket]:
    """Counts by prompt length, shortest first, without empty buckets. They add up to the whole."""
    groups: dict[tuple[int, int], list[DecodeRecord]] = {}
    for record, decoding in zip(records, decodings, strict=True):
        groups.setdefault(bucket_range(record.num_prompt_tokens), []).append(decoding)
    buckets = []
    for (low, high), members in sorted(groups.items()):
        counts = count(members, num_drafted)
        buckets.append(Bucket(min_tokens=low, max_tokens=high, counts=counts, rates=derive(counts, members)))
    return buckets


def measure_speed(decodings: Sequence[DecodeRecord]) -> Speed:
    """Add up time and output tokens. A step is a round, or for plain decoding a token after the first."""
    seconds: dict[str, float] = {}
    for decoding in decodings:
        for part, value in decoding.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + value
    output_tokens = sum(len(decoding.token_ids) for decoding in decodings)
    after_first = output_tokens - len(decodings)
    total = sum(seconds.values())
    decode = total - seconds.get("prefill", 0.0)
    steps = sum(len(decoding.rounds) for decoding in decodings) or after_first
    per_step = _ratio(decode, steps)
    return Speed(
        output_tokens=output_tokens,
        seconds=seconds,
        tokens_per_second=_ratio(output_tokens, total),
        decode_tokens_per_second=_ratio(after_first, decode),
        ms_per_step=None if per_step is None else 1000 * per_step,
    )


def judge_equality(records: Sequence[PromptRecord], dtype: str) -> EqualityReport | None:
    """Which prompts failed the greedy check; see :func:`judge_checks`."""
    return judge_checks([(one.prompt_id, one.equality) for one in records if one.equality is not None], dtype)


def judge_checks(checked: Sequence[tuple[str, EqualityRecord]], dtype: str) -> EqualityReport | None:
    """Which of the named answers failed the greedy check; None if none was checked.

    float32 demands equal outputs. bfloat16 rounds a block of K + 1 rows otherwise than a single row, so there a
    departure passes when every emitted token is within :data:`GAP_LIMIT_BF16` logits of the target's argmax.
    """
    if not checked:
        return None
    limit = GAP_LIMIT_BF16 if dtype == "bfloat16" else None
    failures = [
        EqualityFailure(
            prompt_id=prompt_id,
            first_difference=equality.first_difference,
            num_departures=equality.num_departures,
            largest_gap=equality.largest_gap,
        )
        for prompt_id, equality in checked
        if not _passes(equality.equal, equality.largest_gap, limit)
    ]
    return EqualityReport(
        rule="token for token"
        if limit is None
        else f"each token within {limit} logits of the teacher-forced argmax of the target",
        prompts_checked=len(checked),
        prompts_equal=sum(equality.equal for _, equality in checked),
        num_departures=sum(equality.num_departures or 0 for _, equality in checked),
        largest_gap=max(equality.largest_gap or 0.0 for _, equality in checked),
        failures=failures,
    )


def _passes(equal: bool, largest_gap: float | None, limit: float | None) -> bool:
    if limit is None or largest_gap is None:
        return equal
    return largest_gap <= limit


def report_pass(records: Sequence[PromptRecord], decodings: Sequence[DecodeRecord], num_drafted: int) -> PassReport:
    """Count, derive, bucket and time one pass."""
    counts = count(decodings, num_drafted)
    return PassReport(
        counts=counts,
        rates=derive(counts, decodings),
        buckets=bucket_by_prompt_length(records, decodings, num_drafted),
        speed=measure_speed(decodings),
        per_request=[
            [index, len(decoding.rounds), sum(one[1] for one in decoding.rounds), record.num_prompt_tokens]
            for index, (record, decoding) in enumerate(zip(records, decodings, strict=True))
        ],
    )


def build_report(
    records: Sequence[PromptRecord],
    *,
    protocol: dict[str, Any],
    run: dict[str, Any],
    too_long: int = 0,
    labels: Sequence[str] = (),
) -> EvalReport:
    """The report of a whole evaluation.

    Args:
        records: one a decoded prompt, in prompt order.
        protocol: how it was measured; ``num_drafted`` and ``dtype`` are read from it.
        run: run records of this evaluation and of the drafter.
        too_long: prompts that were not decoded.
        labels: what a reader must know.
    """
    num_drafted = int(protocol["num_drafted"])
    sampled = [record.sampled for record in records if record.sampled is not None]
    plain = [record.baseline for record in records if record.baseline is not None]
    greedy = report_pass(records, [record.greedy for record in records], num_drafted)
    baseline = measure_speed(plain) if plain else None
    speedup = None
    if baseline and baseline.decode_tokens_per_second and greedy.speed.decode_tokens_per_second:
        speedup = greedy.speed.decode_tokens_per_second / baseline.decode_tokens_per_second
    return EvalReport(
        schema_version=SCHEMA_VERSION,
        protocol=protocol,
        formulas=FORMULAS,
        greedy=greedy,
        sampled=report_pass(records, sampled, num_drafted) if sampled else None,
        baseline=baseline,
        speedup=speedup,
        equality=judge_equality(records, str(protocol["dtype"])),
        too_long=too_long,
        labels=list(labels),
        run=run,
    )
