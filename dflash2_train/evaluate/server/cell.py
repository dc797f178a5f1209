"""One task at one concurrency: warm up, read the counters, ask, read them again, and what follows from it.

The rules that keep a mean from being wrong: nothing of the warm-up and nothing from before is counted; the server is
idle at both readings; other people's requests void the figures; counts that disagree are named beside them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from dflash2_train.config import EvalConfig
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, Acceptance, Cell, RequestCounts
from dflash2_train.evaluate.server.connection import ServerError
from dflash2_train.evaluate.server.counters import Counters, difference
from dflash2_train.evaluate.server.messages import EngineApi, ServerFacts
from dflash2_train.evaluate.server.workload import ANSWERED, NOT_ASKED, TOO_LONG, RequestRecord, Workload
from dflash2_train.evaluate.tasks import Conversation, Task

MAX_READINGS = 60  # at eval.server.settle_s, until two of them agree
SHOWN_HITS = 0.01  # share of the prompt from the prefix cache above which figures say so
NEVER_ASKED = "not asked, an earlier turn got no answer"


@dataclass(frozen=True, kw_only=True)
class Session:
    """A server that was looked at and can be asked."""

    config: EvalConfig
    client: httpx.AsyncClient
    api: EngineApi
    facts: ServerFacts
    workload: Workload

    @property
    def url(self) -> str:
        """The server's address."""
        return self.config.server.url


async def measure_cell(
    session: Session, task: Task, concurrency: int, finished: Callable[[], None]
) -> tuple[Cell, list[RequestRecord]]:
    """The cell and its raw records.

    Raises:
        ServerError: the server cannot be measured, or others used it meanwhile.
        CounterError: it was restarted.
    """
    server = session.config.server
    await warm_up(session, task.conversations, concurrency)
    await settled(session)
    if server.cold_prefix_cache:
        await session.api.make_cold(session.client)
    before = await settled(session)
    started = time.perf_counter()
    records = await session.workload.run(
        task.conversations,
        concurrency=concurrency,
        max_new_tokens=session.config.max_new_tokens,
        finished=finished,
    )
    seconds = time.perf_counter() - started
    lost = any(record.causes for record in records)
    after = await settled(session, may_be_stale=lost)
    window = None if before is None or after is None else difference(before, after, session.url)
    return build_cell(session.config, session.facts, task, concurrency, records, window, seconds), records


async def warm_up(session: Session, conversations: Sequence[Conversation], concurrency: int) -> None:
    """First turns at the measured concurrency, so that compilation and first-use costs fall outside."""
    wanted = session.config.server.warm_up or concurrency
    first = [
        Conversation(prompt_id=one.prompt_id, opening=one.opening, further_turns=[], prompt_ids=one.prompt_ids)
        for one in (conversations[number % len(conversations)] for number in range(wanted))
    ]
    tokens = min(session.config.server.warm_up_tokens, session.config.max_new_tokens)
    records = await session.workload.run(first, concurrency=concurrency, max_new_tokens=tokens)
    if all(record.status not in (ANSWERED, TOO_LONG) for record in records):
        raise ServerError(
            f"{session.url}: none of {len(records)} requests of the warm-up was answered, the last: "
            f"{records[-1].detail}. Look into the server's log."
        )


async def settled(session: Session, *, may_be_stale: bool = False) -> Counters | None:
    """A reading of an idle server: servers count a step after they have sent its answer.

    Args:
        may_be_stale: a request was given up, and vLLM takes one that was aborted off its gauge only with its next step.
            Counters that stand still for all readings then count as idle; a request at work would move them.

    Raises:
        ServerError: it does not become idle.
    """
    previous = await session.api.counters(session.client, session.facts.model)
    unmoved = 0
    for _ in range(MAX_READINGS):
        if previous is None:
            return None
        await asyncio.sleep(session.config.server.settle_s)
        current = await session.api.counters(session.client, session.facts.model)
        unmoved = unmoved + 1 if current == previous else 0
        if unmoved and not previous.running:
            return current
        previous = current
    if may_be_stale and unmoved == MAX_READINGS:
        return previous
    raise ServerError(
        f"{session.url}: busy with {previous.running if previous else 0} requests that are not ours, or its counters "
        "do not stand still. Measure a server that nobody else uses."
    )


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


def _acceptance(
    config: EvalConfig, window: Counters | None, own: Acceptance | None, foreign: int
) -> Acceptance | None:
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
    elif not lost and counted is not None and own is not None and (counted.rounds, counted.accepted) != (
        own.rounds,
        own.accepted,
    ):
        labels.append(
            f"counters and answers disagree: {counted.rounds} and {own.rounds} rounds, {counted.accepted} and "
            f"{own.accepted} accepted"
        )
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
