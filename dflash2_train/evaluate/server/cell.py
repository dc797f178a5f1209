"""One task at one concurrency: warm up, read the counters, ask, read them again.

Nothing of the warm-up and nothing from before is counted, and the server is idle at both readings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from dflash2_train.config import EvalConfig
from dflash2_train.evaluate.runs import Cell
from dflash2_train.evaluate.server.connection import ServerError
from dflash2_train.evaluate.server.counters import Counters, difference
from dflash2_train.evaluate.server.figures import build_cell
from dflash2_train.evaluate.server.messages import EngineApi, ServerFacts
from dflash2_train.evaluate.server.workload import ANSWERED, TOO_LONG, RequestRecord, Workload
from dflash2_train.evaluate.tasks import Conversation, Task

MAX_READINGS = 60  # at eval.server.settle_s, until two of them agree


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
    idle = await settled(session, may_be_stale=True)  # of the measurement before; the warm-up sets the gauge right
    warmed = _counted(idle, await warm_up(session, task.conversations, concurrency))
    before = await settled(session, finished=warmed)
    if server.cold_prefix_cache:
        await session.api.make_cold(session.client)
    started = time.perf_counter()
    records = await session.workload.run(
        task.conversations,
        concurrency=concurrency,
        max_new_tokens=session.config.max_new_tokens,
        finished=finished,
    )
    seconds = time.perf_counter() - started
    after = await settled(
        session,
        finished=_counted(before, records),
        may_be_stale=any(record.causes for record in records),
    )
    window = None if before is None or after is None else difference(before, after, session.url)
    return build_cell(session.config, session.facts, task, concurrency, records, window, seconds), records


def _counted(before: Counters | None, records: Sequence[RequestRecord]) -> int:
    """Requests that the server must have counted as finished once it has counted ``records``."""
    earlier = 0 if before is None or before.requests is None else before.requests
    return earlier + sum(record.status == ANSWERED for record in records)


async def warm_up(session: Session, conversations: Sequence[Conversation], concurrency: int) -> Sequence[RequestRecord]:
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
    return records


async def settled(session: Session, *, finished: int = 0, may_be_stale: bool = False) -> Counters | None:
    """A reading of an idle server that has counted ``finished`` requests: servers count after they have answered.

    ``may_be_stale`` says that a request was given up: vLLM takes one that was aborted off its gauge only with its next
    step. Counters that stand still for all readings then count as idle; a request at work would move them.

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
        counted = previous.requests is None or previous.requests >= finished
        if unmoved and counted and not previous.running:
            return current
        previous = current
    if previous is not None and unmoved == MAX_READINGS and (may_be_stale or not previous.running):
        return previous
    raise ServerError(
        f"{session.url}: busy with {previous.running if previous else 0} requests that are not ours, or its counters "
        "do not stand still. Measure a server that nobody else uses."
    )
