"""Which server takes the next request: slots, failures in a row, dropping out and coming back.

A server is asked for its model before its first request and again, every few seconds, after it dropped out. It drops
out after ``drop_after`` failures in a row. One that is back is on trial: it gets one request at a time until it has
answered one, since an engine can hang behind a front that says it is well. Whoever waits for a slot holds none. All
servers away for longer than ``max_outage_s`` ends the run with what each of them said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dflash2_train.config import ServersConfig, UserError

logger = logging.getLogger(__name__)


class ServerRefusedError(UserError, RuntimeError):
    """A server that must not be used: another model, no access, or no token ids in its answers."""


class ServersDownError(UserError, RuntimeError):
    """No server has been there for too long."""


class TryAgainError(Exception):
    """A fault of a server or of the way to it; the request may do well elsewhere or later. The text is the cause."""


@dataclass(kw_only=True)
class Server:
    """One server and how it does."""

    url: str
    concurrency: int
    busy: int = 0  # requests in flight
    is_up: bool = False
    was_up: bool = False  # at any time of this run
    on_trial: bool = False  # back, and has not answered anything yet
    failures: int = 0  # in a row
    cause: str = "not reached yet"

    @property
    def has_slot(self) -> bool:
        """Whether it can take a request now."""
        return self.is_up and self.busy < (1 if self.on_trial else self.concurrency)


class ServerPool:
    """The servers of a run; used inside one event loop.

    Args:
        config: URLs, limits and times.
        probe: asks a server whether it serves the target; raises TryAgainError or ServerRefusedError if not.
    """

    def __init__(self, config: ServersConfig, probe: Callable[[Server], Awaitable[None]]) -> None:
        self.servers = [Server(url=url.rstrip("/"), concurrency=config.concurrency) for url in config.urls]
        self._config, self._probe = config, probe
        self._freed = asyncio.Condition()
        self._down_since: float | None = time.monotonic()
        self._probes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look after every server; each comes up with its first good probe."""
        self._probes = [asyncio.create_task(self._look_after(server)) for server in self.servers]

    async def stop(self) -> None:
        """End the probes."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    @property
    def slots(self) -> int:
        """Requests in flight at most."""
        return sum(server.concurrency for server in self.servers)

    def check(self) -> None:
        """Raise what ends the run, if anything does.

        Raises:
            ServerRefusedError: a server that was never up serves something else.
            ServersDownError: none has been up for ``max_outage_s``.
        """
        for task in self._probes:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._down_since is None or time.monotonic() - self._down_since < self._config.max_outage_s:
            return
        causes = "\n  ".join(f"{server.url}: {server.cause}" for server in self.servers)
        raise ServersDownError(
            f"data.servers.urls: no server for more than data.servers.max_outage_s={self._config.max_outage_s:g} s:\n"
            f"  {causes}\nStart one and run again; what was answered is kept."
        )

    async def acquire(self, avoid: Server | None) -> Server:
        """The least busy server with a free slot, another than ``avoid`` if there is one; waits for it."""
        async with self._freed:
            while not (free := [server for server in self.servers if server.has_slot]):
                await self._freed.wait()
            server = min(free, key=lambda server: (server is avoid, server.busy / server.concurrency))
            server.busy += 1
            return server

    async def release(self, server: Server, failure: str | None = None) -> None:
        """Give a slot back; ``failure`` says that the server did not do its part."""
        server.busy -= 1
        freed = 1
        if failure is None:
            server.failures = 0
            if server.on_trial:
                server.on_trial, freed = False, server.concurrency
        else:
            server.failures += 1
            server.cause = failure
            if server.is_up and (server.on_trial or server.failures >= self._config.drop_after):
                self._take_out(server)
        async with self._freed:
            self._freed.notify(freed)

    def _take_out(self, server: Server) -> None:
        server.is_up = False
        logger.warning("%s dropped out after %d failures in a row: %s", server.url, server.failures, server.cause)
        if not any(other.is_up for other in self.servers):
            self._down_since = time.monotonic()

    async def _look_after(self, server: Server) -> None:
        """Probe a server whenever it is not up."""
        while True:
            if not server.is_up:
                with contextlib.suppress(TryAgainError):
                    await self._try_probe(server)
            await asyncio.sleep(self._config.probe_every_s)

    async def _try_probe(self, server: Server) -> None:
        try:
            await self._probe(server)
        except TryAgainError as error:
            server.cause = str(error)
            raise
        except ServerRefusedError as error:
            if not server.was_up:
                raise
            if server.cause != str(error):  # it came back as something else: the others go on without it
                logger.error("%s stays out: %s", server.url, error)
            server.cause = str(error)
            return
        if server.was_up:
            logger.warning("%s is back", server.url)
        server.on_trial = server.was_up
        server.is_up = server.was_up = True
        server.failures = 0
        self._down_since = None
        async with self._freed:
            self._freed.notify(server.concurrency)
