"""The connection to a server: small requests that must work, and what is said when they do not."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx

from dflash2_train.config import ConfigError, EvalServerConfig, UserError

DENIED = (401, 403)
PASSING = (408, 409, 425, 429)  # client errors in name that pass with time
PAGE_TIMEOUT_S = 30.0  # a busy server answers /metrics late
MAX_TEXT = 200  # characters of a server's own words


class ServerError(UserError, RuntimeError):
    """A server that cannot be measured."""


def open_client(config: EvalServerConfig) -> httpx.AsyncClient:
    """A client of the server with its key; as many connections as requests in flight.

    Raises:
        ConfigError: ``eval.server.api_key_env`` names a variable that is not set.
    """
    headers = {}
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "")
        if not key:
            raise ConfigError(
                f"eval.server.api_key_env={config.api_key_env!r}: that variable is not set. Set it, or leave it null."
            )
        headers["Authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(
        base_url=config.url.rstrip("/"),
        headers=headers,
        timeout=httpx.Timeout(config.timeout_s, connect=config.connect_timeout_s),
        # Idle connections are let go before a server's own limit (5 s in vLLM) closes them under a request.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        verify=config.url.startswith("https"),  # plain http needs no certificates, and loading them takes a while
        trust_env=False,  # the server is named in the configuration; a proxy from the environment is not
    )


def address(client: httpx.AsyncClient, path: str = "") -> str:
    """A page of the server, in full."""
    return str(client.base_url).rstrip("/") + path


async def call(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response | None:
    """The response to a small request; None if the server has no such page.

    Raises:
        ServerError: no connection, no access, or another failure.
    """
    url = address(client, path)
    try:
        response = await client.request(method, path, timeout=PAGE_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(
            f"{url}: no answer ({described(error)}). Start the server, or correct eval.server.url."
        ) from error
    if response.status_code == 404:
        return None
    if response.status_code in DENIED:
        raise ServerError(f"{url}: HTTP {response.status_code}. Check eval.server.api_key_env.")
    if response.status_code != 200:
        raise ServerError(f"{url}: HTTP {response.status_code} ({said(response)}). Look into the server's log.")
    return response


async def get_object(client: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """The JSON object of a page; None if there is no such page.

    Raises:
        ServerError: see :func:`call`; or the page is no JSON object.
    """
    response = await call(client, "GET", path)
    if response is None:
        return None
    try:
        value = json.loads(response.content)
    except ValueError as error:
        raise ServerError(f"{address(client, path)}: not JSON ({said(response)}). Check eval.server.url.") from error
    if not isinstance(value, dict):
        raise ServerError(f"{address(client, path)}: not a JSON object. Check eval.server.url and eval.server.engine.")
    return value


def said(response: httpx.Response) -> str:
    """The first words of a response, on one line."""
    return " ".join(response.text[:MAX_TEXT].split())


def described(error: Exception) -> str:
    """An error's kind and, where it has any, its words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
