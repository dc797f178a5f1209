"""Conversations through a server with a fixed number of requests in flight; every try is on record.

As many workers as requests in flight take conversations in order and see each through all its turns. A request fails
for good when the server refuses it, when its tries are used up, or when it cannot fit the context; the rest of that
conversation is then not asked. Nothing is dropped: each request leaves one record, with what went wrong and how often.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from dflash2_train.config import EvalServerConfig
from dflash2_train.evaluate.server.connection import DENIED, PASSING, ServerError, address, described, said
from dflash2_train.evaluate.server.messages import Answer, Ask, Asking, BadAnswerError, EngineApi
from dflash2_train.evaluate.tasks import Conversation, Message

logger = logging.getLogger(__name__)
MAX_BACKOFF_S = 60.0
ANSWERED, FAILED, TOO_LONG, NOT_ASKED = "answered", "failed", "too long", "not asked"

Render = Callable[[Sequence[Message]], list[int] | None]


@dataclass(kw_only=True)
class RequestRecord:
    """What became of one request; a line of the raw file."""

    prompt_index: int
    prompt_id: str
    turn: int
    status: str = NOT_ASKED  # answered | failed | too long | not asked (an earlier turn failed)
    tries: int = 0
    causes: list[str] = field(default_factory=list)  # one a failed try, counted in reports
    detail: str = ""  # the last failure in the server's words
    seconds: float | None = None  # of the try that was answered
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    rounds: int | None = None  # of speculation; None where the server tells no counts of its own
    proposed: int | None = None
    accepted: int | None = None
    accepted_per_position: list[int] | None = None
    cached_tokens: int | None = None


class _TryFailedError(Exception):
    """One try without an answer."""

    def __init__(self, cause: str, detail: str, *, final: bool = False) -> None:
        super().__init__(detail)
        self.cause, self.detail, self.final = cause, detail, final


class Workload:
    """Asks one server.

    Args:
        render: messages -> prompt ids, or None where the server renders.
        context: tokens that prompt and answer may have together; None = not known.
    """

    def __init__(
        self,
        *,
        client: httpx.AsyncClient,
        api: EngineApi,
        asking: Asking,
        config: EvalServerConfig,
        render: Render,
        context: int | None,
    ) -> None:
        self._client, self._api, self._asking, self._config = client, api, asking, config
        self._render, self._context = render, context
        self._warned: set[str] = set()

    async def run(
        self,
        conversations: Sequence[Conversation],
        *,
        concurrency: int,
        max_new_tokens: int,
        finished: Callable[[], None] = lambda: None,
    ) -> list[RequestRecord]:
        """Every turn of every conversation, in order; ``finished`` is called after each request.

        Raises:
            ServerError: the server denies access or knows no such model.
        """
        waiting = deque(enumerate(conversations))
        records: dict[tuple[int, int], RequestRecord] = {}

        async def work() -> None:
            while waiting:
                index, conversation = waiting.popleft()
                async for record in self._converse(index, conversation, max_new_tokens):
                    records[record.prompt_index, record.turn] = record
                    finished()

        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(conversations)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [records[key] for key in sorted(records)]

    async def _converse(
        self, index: int, conversation: Conversation, max_new_tokens: int
    ) -> AsyncIterator[RequestRecord]:
        """One record a turn; turns after one without an answer are not asked."""
        messages = list(conversation.opening)
        broken = False
        for turn in range(1 + len(conversation.further_turns)):
            record = RequestRecord(prompt_index=index, prompt_id=conversation.prompt_id, turn=turn)
            if not broken:
                rendered = conversation.prompt_ids if turn == 0 else None
                ask = Ask(
                    prompt_ids=self._render(messages) if rendered is None else rendered,
                    messages=messages,
                    salt=uuid.uuid4().hex if self._config.cold_prefix_cache else None,
                    max_new_tokens=max_new_tokens,
                )
                answer = await self._answer(ask, record)
                broken = answer is None
                if answer is not None and turn < len(conversation.further_turns):
                    messages += [
                        {"role": "assistant", "content": answer.text},
                        {"role": "user", "content": conversation.further_turns[turn]},
                    ]
            yield record

    async def _answer(self, ask: Ask, record: RequestRecord) -> Answer | None:
        """Try a request until it is answered, refused, or out of tries; fills ``record``."""
        if ask.prompt_ids is not None and self._context is not None:
            record.prompt_tokens = len(ask.prompt_ids)
            if len(ask.prompt_ids) + ask.max_new_tokens > self._context:
                record.status = TOO_LONG
                return None
        for attempt in range(1, self._config.tries + 1):
            record.tries = attempt
            started = time.perf_counter()
            try:
                answer = await self._try(ask)
            except _TryFailedError as error:
                self._note(error, record)
                if error.final:
                    break
            else:
                record.seconds = round(time.perf_counter() - started, 6)
                _fill(record, answer)
                return answer
            if attempt < self._config.tries:
                await asyncio.sleep(min(self._config.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S))
        record.status = FAILED
        return None

    def _note(self, error: _TryFailedError, record: RequestRecord) -> None:
        record.causes.append(error.cause)
        record.detail = error.detail
        if error.cause not in self._warned:
            self._warned.add(error.cause)
            logger.warning("a request failed: %s. Further ones of this kind are counted, not shown", error.detail)

    async def _try(self, ask: Ask) -> Answer:
        path, body = self._api.request(ask, self._asking)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await self._client.post(path, json=body)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _TryFailedError("timeout", f"no answer within {self._config.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _TryFailedError(type(error).__name__, described(error)) from error
        self._check_status(response, path)
        try:
            value = json.loads(response.content)
            if not isinstance(value, dict):
                raise BadAnswerError("no answer in the response", said(response))
            return self._api.answer(value)
        except BadAnswerError as error:
            raise _TryFailedError(error.cause, str(error)) from error
        except ValueError as error:
            raise _TryFailedError("not JSON", said(response)) from error

    def _check_status(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if status == 200:
            return
        text = f"HTTP {status} ({said(response)})"
        if status in DENIED or status == 404:
            raise ServerError(
                f"{address(self._client, path)}: {text}. Check eval.server.model, engine and api_key_env."
            )
        raise _TryFailedError(f"HTTP {status}", text, final=status < 500 and status not in PASSING)


def _fill(record: RequestRecord, answer: Answer) -> None:
    record.status = ANSWERED
    record.prompt_tokens, record.output_tokens = answer.prompt_tokens, answer.output_tokens
    record.finish_reason, record.cached_tokens = answer.finish_reason, answer.cached_tokens
    if answer.acceptance is not None:
        record.rounds, record.proposed = answer.acceptance.rounds, answer.acceptance.proposed
        record.accepted = answer.acceptance.accepted
        record.accepted_per_position = answer.acceptance.accepted_per_position
