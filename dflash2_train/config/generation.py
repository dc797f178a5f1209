"""How prompts become answers: turns, servers, job arrays, and how many faults a run takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dflash2_train.config.rules import require

TURNS = ("all", "last")


@dataclass(kw_only=True)
class ServersConfig:
    """OpenAI-compatible servers of the target, for ``data.backend=server``."""

    urls: list[str] = field(default_factory=list)  # as http://host:8000, without /v1
    model: str = ""  # the name under which every one of them serves the target
    concurrency: int = 64  # requests in flight, each server
    timeout_s: float = 1800.0  # one answer, queueing in the server included
    connect_timeout_s: float = 10.0  # until a server takes the connection
    tries: int = 5  # of one request within a run; each waits longer than the one before
    backoff_s: float = 1.0  # before the second try, doubled from try to try
    max_backoff_s: float = 60.0  # that doubling ends here
    drop_after: int = 3  # failures in a row after which a server gets no more requests
    probe_every_s: float = 5.0  # how often a dropped server is asked whether it is back
    max_outage_s: float = 600.0  # all servers away for longer than this ends the run
    api_key_env: str | None = None  # name of the environment variable that holds the key

    def check(self) -> None:
        require(len(self.urls) > 0, "data.servers.urls", self.urls, "data.backend=server needs one", "Name a server.")
        require(
            len(set(self.urls)) == len(self.urls),
            "data.servers.urls",
            self.urls,
            "names a server twice",
            "Once will do.",
        )
        for url in self.urls:
            parts = urlsplit(url)
            require(
                parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc,
                "data.servers.urls",
                parts.hostname or url,
                "must be http(s)://host:port without a user name or password",
                "Put a key into an environment variable and name it in data.servers.api_key_env.",
            )
            require(
                not parts.path.rstrip("/").endswith("/v1"),
                "data.servers.urls",
                url,
                "/v1 is added here",
                "Leave it out.",
            )
        require(self.model != "", "data.servers.model", self.model, "must be the served name", "See /v1/models.")
        for key in ("concurrency", "tries", "drop_after"):
            value = getattr(self, key)
            require(value > 0, f"data.servers.{key}", value, "must be positive", "Leave it at its default.")
        for key in (
            "timeout_s",
            "connect_timeout_s",
            "backoff_s",
            "max_backoff_s",
            "probe_every_s",
            "max_outage_s",
        ):
            value = getattr(self, key)
            require(value > 0, f"data.servers.{key}", value, "must be a positive number of seconds", "Use the default.")


@dataclass(kw_only=True)
class GenerationConfig:
    """The part of ``data.*`` that only stage regenerate reads."""

    servers: ServersConfig = field(default_factory=ServersConfig)
    # all: every assistant turn of a conversation is written anew, each on the history written before it.
    # last: the source's own turns stay as context, only the last user turn is answered.
    turns: str = "all"
    drop_cut: bool = False  # True drops completions that ended for length
    drop_repeats: bool = True  # drops completions that ended for length in an endless cycle
    repeat_window: int = 256  # tokens at the end that such a cycle must fill, at least four times round
    max_attempts: int = 3  # runs that try a failed answer before it is given up (a dead letter)
    retry_failed: bool = False  # True tries dead letters again
    shard_index: int = 0  # this job of a job array; a prompt's hash says which job answers it
    num_shards: int = 1  # jobs of the array

    def check_generation(self, backend: str) -> None:
        require(self.turns in TURNS, "data.turns", self.turns, f"must be one of {TURNS}", "Pick one.")
        for key in ("max_attempts", "num_shards"):
            value = getattr(self, key)
            require(value > 0, f"data.{key}", value, "must be positive", "Leave it at its default.")
        require(
            self.repeat_window >= 4, "data.repeat_window", self.repeat_window, "must be at least 4 tokens", "Use 256."
        )
        require(
            0 <= self.shard_index < self.num_shards,
            "data.shard_index",
            self.shard_index,
            f"counts from 0 and lies below data.num_shards={self.num_shards}",
            "Pass the index of the array's job.",
        )
        if backend == "server":
            self.servers.check()
