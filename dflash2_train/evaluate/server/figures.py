"""From raw records and the counters' movement to a cell's figures.

The rules that keep a mean from being wrong: other people's requests void what rests on counters; speculation where
none is expected, or the reverse, is an error; counts that disagree are named beside the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dflash2_train.config import EvalConfig
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, Acceptance, Cell, RequestCounts
from dflash2_train.evaluate.server.connection import ServerError
from dflash2_train.evaluate.server.counters import Counters
from dflash2_train.evaluate.server.messages import ServerFacts
from dflash2_train.evaluate.server.workload import ANSWERED, NOT_ASKED, TOO_LONG, RequestRecord
from dflash2_train.evaluate.tasks import Task

SHOWN_HITS = 0.01  # share of the prompt from the prefix cache above which figures say so
NEVER_ASKED = "not asked, an earlier turn got no answer"


def build_cell(
    config: EvalConfig,
    facts: ServerFacts,
    task: Task,
    concurrency: int,
    records: Sequence[RequestRecord],
    window: Counters | None,
    seconds: float,
) -> Cell:
    """Figures from the records and from what the counters moved by.

    Raises:
        ServerError: no answers, other people's requests, or speculation where none, or none where some, is expected.
    """
    answered = [record for record in records if record.status == ANSWERED]
    counts = count_requests(records)
    if not answered:
        raise ServerError(
            f"{config.server.url}: none of {len(records)} requests of {task.name} was answered: "
            f"{counts.failed or f'{counts.too_long} too long for the context of {facts.context} tokens'}. "
            "Look into the server's log."
        )
    own = own_counts(answered)
    foreign = _foreign_requests(records, window)
    labels = _labels(config, counts, records, window, own, foreign)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in answered)
    hits = _hit_rate(answered, window)
    if hits is not None and hits > SHOWN_HITS:
        labels.append(f"{100 * hits:.1f}% of the prompt tokens came from the prefix cache")
    return Cell(
        task=task.name,
        category=task.category,
        method=config.server.method,
        concurrency=concurrency,
        temperature=config.temperature,
        acceptance=_acceptance(config, window, own, foreign),
        requests=counts,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(record.output_tokens or 0 for record in answered),
        seconds=seconds,
        prompts_sha256=task.prompts_sha256,
        prefix_hit_rate=hits,
        per_request=None
        if own is None
        else [[one.prompt_index, one.rounds or 0, one.accepted or 0, one.prompt_tokens or 0] for one in answered],
        labels=labels,
    )


def count_requests(records: Sequence[RequestRecord]) -> RequestCounts:
    """Answered and failed ones add up to those asked; what never fitted the context stands beside them."""
    too_long = sum(record.status == TOO_LONG for record in records)
    failed = Counter(
        NEVER_ASKED if record.status == NOT_ASKED else record.causes[-1]
        for record in records
        if record.status not in (ANSWERED, TOO_LONG)
    )
    return RequestCounts(
        asked=len(records) - too_long,
        answered=sum(record.status == ANSWERED for record in records),
        too_long=too_long,
        retried=sum(max(0, record.tries - 1) for record in records),
        failed=dict(sorted(failed.items())),
    )


def own_counts(answered: Sequence[RequestRecord]) -> Acceptance | None:
    """The answers' own counts added up; None unless some told theirs (an answer of one token has none to tell)."""
    told = [record for record in answered if record.rounds is not None]
    if not told or any(record.rounds is None and (record.output_tokens or 0) > 1 for record in answered):
        return None
    positions = [record.accepted_per_position or [] for record in told]
    width = max(len(one) for one in positions)
    known = all(one or not record.accepted for one, record in zip(positions, told, strict=True))
    return Acceptance(
        rounds=sum(record.rounds or 0 for record in told),
        proposed=sum(record.proposed or 0 for record in told),
        accepted=sum(record.accepted or 0 for record in told),
        accepted_per_position=[sum(one[k] for one in positions if k < len(one)) for k in range(width)] if known else [],
    )


def _foreign_requests(records: Sequence[RequestRecord], window: Counters | None) -> int:
    """Requests that the server finished beyond our own tries."""
    if window is None or window.requests is None:
        return 0
    return max(0, window.requests - sum(record.tries for record in records))


def _acceptance(config: EvalConfig, window: Counters | None, own: Acceptance | None, foreign: int) -> Acceptance | None:
    """The counters' difference where the server has such counters and nobody else used it, else the answers' counts."""
    url, method = config.server.url, config.server.method
    counted = window.acceptance if window is not None else None
    if method == AUTOREGRESSIVE:
        if (counted is not None and counted.rounds) or (own is not None and own.rounds):
            raise ServerError(
                f"{url}: speculates, though eval.server.method=autoregressive. Start it without speculation."
            )
        return None
    found = counted if counted is not None and not foreign else own
    if found is None and foreign:
        raise ServerError(
            f"{url}: {foreign} requests of others ran during the measurement and are in its counters, so these figures "
            "are void. Measure a server that nobody else uses, or start it with "
            "--per-request-spec-decode-metrics summary."
        )
    if found is None:
        raise ServerError(
            f"{url}: tells no counts of speculation, in counters or in answers, though eval.server.method={method}. "
            "Start it with speculation and a version that counts it, or set eval.server.method=autoregressive."
        )
    if not found.rounds:
        raise ServerError(
            f"{url}: not one round of speculation was counted. Its drafter is not at work, or eval.max_new_tokens="
            f"{config.max_new_tokens} leaves nothing to draft."
        )
    return found


def _labels(
    config: EvalConfig,
    counts: RequestCounts,
    records: Sequence[RequestRecord],
    window: Counters | None,
    own: Acceptance | None,
    foreign: int,
) -> list[str]:
    labels = []
    if counts.num_failed:
        labels.append(f"{counts.num_failed} of {counts.asked} requests failed")
    lost = sum(len(record.causes) for record in records)
    counted = window.acceptance if window is not None else None
    if lost and counted is not None:
        labels.append(f"the server's counters include {lost} tries that failed")
    if foreign:
        labels.append(f"{foreign} requests of others ran at the same time: throughput is not the server's own")
    elif not lost and counted is not None and own is not None:
        told, added = (counted.rounds, counted.accepted), (own.rounds, own.accepted)
        if told != added:
            labels.append(f"counters and answers disagree on (rounds, accepted): {told} and {added}")
    if window is not None and window.requests is not None and window.requests < counts.answered:
        labels.append(f"the server counts {window.requests} finished requests of {counts.answered} answered")
    if window is None:
        labels.append("the server has no counters: a restart or requests of others would not be noticed")
    if config.server.method != AUTOREGRESSIVE and own is None:
        labels.append("answers carry no counts of their own: no intervals over prompts, no figures by prompt length")
    return labels


def _hit_rate(answered: Sequence[RequestRecord], window: Counters | None) -> float | None:
    """Share of prompt tokens found in the prefix cache, from the counters or the answers; None where none tell."""
    if window is not None and window.prefix_hit_rate is not None:
        return window.prefix_hit_rate
    told = [record for record in answered if record.cached_tokens is not None]
    tokens = sum(record.prompt_tokens or 0 for record in told)
    return sum(record.cached_tokens or 0 for record in told) / tokens if tokens else None
