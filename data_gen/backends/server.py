"""OpenAI-compatible servers as backend of stage regenerate: token ids in, token ids out.

Requests go to ``/v1/completions`` with the prompt as ids and ``return_token_ids``, vLLM's extension, so that the answer
comes back as the ids that the engine sampled. Text is never tokenised: a server that returns no ids, or that reports
another prompt than was sent, is refused. Every sampling field stands in every request, so a server's own defaults
(it may read the model's generation_config.json) decide nothing.

What goes wrong is sorted in three. A fault of the server or the network (no connection, a hang, 5xx, 429, anything
that is not the JSON of an answer) is tried again, elsewhere if there is an elsewhere, after a wait that doubles and
holds no slot. A request that the server refuses (other 4xx) fails for good in this run, and the run goes on. A server
that serves another model or denies access ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx

from data_gen.backends.base import Completion, Failure, GenerationRequest, Heartbeat, SamplingSettings, TakeRequest
from data_gen.backends.server_pool import Server, ServerPool, ServerRefusedError, TryAgainError
from dflash2_train.config import ConfigError, DataConfig, ServersConfig, TargetConfig

logger = logging.getLogger(__name__)
BEAT_S = 0.5  # seconds without a result after which the caller gets its heartbeat
QUEUED_A_SLOT = 2  # requests drawn for every slot, so that one is ready when a slot falls free
DENIED = (401, 403, 404)  # key or model name: no request would do better
RETRIED = (408, 409, 425, 429)  # client errors in name that pass with time
MAX_TEXT = 200  # characters of a server's own words in a reason


class ServerGenerator:
    """Answers prompts through the servers of ``data.servers``; see :class:`data_gen.backends.base.GenerateBackend`.

    Raises:
        ConfigError: ``data.servers.api_key_env`` names a variable that is not set.
    """

    def __init__(self, target: TargetConfig, data: DataConfig, sampling: SamplingSettings) -> None:
        self._servers = data.servers
        self._sampling = sampling
        self._vocab_size = target.vocab_size
        self._longest = data.max_prompt_tokens + sampling.max_tokens
        self._headers = _headers(data.servers)
        self._random = random.Random(data.sampling.seed)  # noqa: S311 - spreads retries in time
        self._runner = asyncio.Runner()
        self._tasks: set[asyncio.Task[Completion | Failure]] = set()
        self._client: httpx.AsyncClient | None = None
        self._pool: ServerPool | None = None

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        """One result for every request taken, as they finish.

        Raises:
            ServerRefusedError: a server that must not be used.
            ServersDownError: no server for too long.
        """
        self._runner.run(self._open())
        while True:
            results = self._runner.run(self._advance(take))
            if not results and not self._tasks:
                return
            yield from results
            heartbeat()

    def close(self) -> None:
        """End what is in flight and all connections."""
        self._runner.run(self._shut())
        self._runner.close()

    async def _open(self) -> None:
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self._servers.timeout_s, connect=self._servers.connect_timeout_s),
            # Idle connections are let go before a server's own limit (5 s in vLLM) closes them under a request.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,  # servers are named in the configuration; a proxy from the environment is not
        )
        self._pool = ServerPool(self._servers, self._probe)
        self._pool.start()

    async def _shut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pool is not None:
            await self._pool.stop()
        if self._client is not None:
            await self._client.aclose()

    async def _advance(self, take: TakeRequest) -> list[Completion | Failure]:
        """Fill up, wait for results or half a second, give what is finished."""
        assert self._pool is not None
        self._pool.check()
        while len(self._tasks) < QUEUED_A_SLOT * self._pool.slots and (request := take()) is not None:
            self._tasks.add(asyncio.create_task(self._answer(self._pool, request)))
        if not self._tasks:
            return []
        finished, self._tasks = await asyncio.wait(self._tasks, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in finished]

    async def _answer(self, pool: ServerPool, request: GenerationRequest) -> Completion | Failure:
        """Try a request until it is answered, refused, or out of tries."""
        server: Server | None = None
        causes: list[str] = []
        for attempt in range(1, self._servers.tries + 1):
            server = await pool.acquire(avoid=server)
            fault: str | None = None
            try:
                return await self._ask(server, request)
            except TryAgainError as error:
                fault = str(error)
                causes.append(fault)
            finally:
                await pool.release(server, fault)
            if attempt < self._servers.tries:
                await asyncio.sleep(self._backoff(attempt))
        return Failure(request_id=request.request_id, reason=f"{self._servers.tries} tries, the last: {causes[-1]}")

    def _backoff(self, attempt: int) -> float:
        """Seconds before the next try: doubled each time, less a random part of up to a half."""
        longest = min(self._servers.backoff_s * 2 ** (attempt - 1), self._servers.max_backoff_s)
        return longest * (1 - 0.5 * self._random.random())

    async def _ask(self, server: Server, request: GenerationRequest) -> Completion | Failure:
        body = request_body(request, self._sampling, self._servers.model)
        response = await self._call("POST", f"{server.url}/v1/completions", body)
        if response.status_code in DENIED:
            raise ServerRefusedError(
                f"{server.url}: HTTP {response.status_code} ({said(response)}). "
                "Check data.servers.model and data.servers.api_key_env."
            )
        if 400 <= response.status_code < 500 and response.status_code not in RETRIED:
            reason = f"HTTP {response.status_code}: {said(response)}"
            return Failure(request_id=request.request_id, reason=reason)
        return parse_answer(json_object(response), request, self._sampling, self._vocab_size, server.url)

    async def _call(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """A response below 500; everything else on the way is a TryAgainError."""
        assert self._client is not None
        try:
            async with asyncio.timeout(self._servers.timeout_s):
                response = await self._client.request(method, url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise TryAgainError(f"{type(error).__name__}{f': {error}' if str(error) else ''}") from error
        if response.status_code >= 500 or response.status_code in RETRIED:
            raise TryAgainError(f"HTTP {response.status_code}")
        return response

    async def _probe(self, server: Server) -> None:
        """Ask for the served models; see :class:`ServerPool`."""
        try:
            async with asyncio.timeout(2 * self._servers.connect_timeout_s):
                response = await self._call("GET", f"{server.url}/v1/models")
        except TimeoutError as error:
            raise TryAgainError("accepts connections but does not answer") from error
        if response.status_code in DENIED:
            raise ServerRefusedError(
                f"{server.url}: HTTP {response.status_code} ({said(response)}). Check data.servers.api_key_env."
            )
        check_models(json_object(response), self._servers.model, self._longest, server.url)


def _headers(servers: ServersConfig) -> dict[str, str]:
    if servers.api_key_env is None:
        return {}
    key = os.environ.get(servers.api_key_env, "")
    if not key:
        raise ConfigError(
            f"data.servers.api_key_env={servers.api_key_env!r}: that variable is not set. Set it, or leave it null."
        )
    return {"Authorization": f"Bearer {key}"}


def request_body(request: GenerationRequest, sampling: SamplingSettings, model: str) -> dict[str, Any]:
    """The JSON of a request, every field written out."""
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": request.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": sampling.stop_ids,
        "ignore_eos": False,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "stream": False,
        "return_token_ids": True,
    }


def said(response: httpx.Response) -> str:
    """The first words of a response, on one line."""
    return " ".join(response.text[:MAX_TEXT].split())


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        TryAgainError: it is none.
    """
    try:
        value = json.loads(response.content)
    except ValueError as error:
        raise TryAgainError("the body is not JSON") from error
    if response.status_code != 200 or not isinstance(value, dict):
        raise TryAgainError(f"HTTP {response.status_code}, the body is no answer")
    return value


def check_models(body: dict[str, Any], model: str, longest: int, url: str) -> None:
    """Refuse a server that serves something else, or answers that are shorter than the configured ones.

    Raises:
        ServerRefusedError: it does.
        TryAgainError: this is no list of models.
    """
    entries = body.get("data")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TryAgainError("no list of models")
    served = {str(entry.get("id")): entry for entry in entries}
    if model not in served:
        raise ServerRefusedError(f"{url}: serves {sorted(served)}, not data.servers.model={model!r}. Correct one.")
    limit = served[model].get("max_model_len")
    if isinstance(limit, int) and limit < longest:
        raise ServerRefusedError(
            f"{url}: its context of {limit} tokens is shorter than data.max_prompt_tokens + data.sampling.max_tokens = "
            f"{longest}. Start it with --max-model-len {longest}, or lower one of the two."
        )


def parse_answer(
    body: dict[str, Any], request: GenerationRequest, sampling: SamplingSettings, vocab_size: int, url: str
) -> Completion | Failure:
    """The answer in a response.

    Raises:
        TryAgainError: it is no finished answer.
        ServerRefusedError: it holds no token ids, or another prompt's.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise TryAgainError("no answer in the response")
    choice: dict[str, Any] = choices[0]
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise TryAgainError(f"finish_reason {reason!r}")
    ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
    if ids is None or prompt_ids is None:
        raise ServerRefusedError(
            f"{url}: answers without token ids. Text is never tokenised again, so this server is of no use here: "
            "take a vLLM that knows return_token_ids, or another server that honours it."
        )
    if not isinstance(ids, list) or not isinstance(prompt_ids, list):
        raise TryAgainError("token ids that are no list")
    if prompt_ids != request.prompt_ids:
        raise ServerRefusedError(
            f"{url}: reports a prompt of {len(prompt_ids)} tokens, not the one of {len(request.prompt_ids)} that was "
            "sent. Its tokenizer or template gets in between; serve the target with vLLM's defaults."
        )
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise TryAgainError("token ids that are not the target's")
    if len(ids) > sampling.max_tokens:
        raise TryAgainError(f"{len(ids)} tokens, more than asked for")
    if reason == "length" and len(ids) < sampling.max_tokens:
        return Failure(request_id=request.request_id, reason="the server cut the answer before max_tokens")
    return Completion(request_id=request.request_id, completion_ids=ids, finish_reason=reason)
