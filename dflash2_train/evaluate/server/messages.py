"""What goes to a server and what comes back, in one form for all engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from dflash2_train.evaluate.server.counters import Counters


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    prompt_ids: list[int] | None  # None = ``messages`` are rendered by the server
    messages: list[dict[str, str]]
    salt: str | None  # of the prefix cache, where the engine knows such a thing
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all requests of a run share."""

    model: str
    temperature: float
    top_p: float
    top_k: int  # 0 = off
    min_p: float
    enable_thinking: bool | None


@dataclass(frozen=True, kw_only=True)
class RequestAcceptance:
    """A request's own counts, where the server tells them."""

    rounds: int
    proposed: int
    accepted: int
    accepted_per_position: list[int]  # empty where the server gives no histogram


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer."""

    text: str  # think marks kept, without the token that ended it
    prompt_tokens: int
    output_tokens: int
    finish_reason: str  # stop | length
    acceptance: RequestAcceptance | None
    cached_tokens: int | None  # of the prompt, found in the prefix cache


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server tells about itself, and no more of it than belongs into a report."""

    engine: str
    version: str | None
    model: str  # served name
    context: int | None  # tokens of prompt and answer together
    num_drafted: int | None  # K; None = it does not speculate, or does not tell
    prefix_caching: bool | None
    hardware: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)


class BadAnswerError(ValueError):
    """A response that is no answer. ``cause`` is counted, the whole text stands in the raw record."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


class EngineApi(Protocol):
    """One engine's way of being asked."""

    async def facts(self, client: httpx.AsyncClient, model: str) -> ServerFacts:
        """Version, model, context, speculation. UserError for a server that cannot be measured."""

    async def counters(self, client: httpx.AsyncClient, model: str) -> Counters | None:
        """The cumulative counters; None if the engine can be measured without and was started without."""

    async def make_cold(self, client: httpx.AsyncClient) -> None:
        """Empty the prefix cache where requests cannot carry a salt."""

    def request(self, ask: Ask, asking: Asking) -> tuple[str, dict[str, Any]]:
        """Path and JSON body, every sampling field written out."""

    def answer(self, body: dict[str, Any]) -> Answer:
        """The answer in a response. BadAnswerError if it is none, or if its counts contradict each other."""


def positions_of(histogram: list[int]) -> list[int]:
    """Rounds with 0, 1, .., K accepted -> rounds that accepted position 1, .., K."""
    return [sum(histogram[k:]) for k in range(1, len(histogram))]


def checked_acceptance(*, rounds: int, proposed: int, accepted: int, histogram: list[int]) -> RequestAcceptance:
    """A request's counts, if they agree with each other.

    Raises:
        BadAnswerError: they do not.
    """
    positions = positions_of(histogram)
    if not 0 <= accepted <= proposed or (histogram and (sum(histogram) != rounds or sum(positions) != accepted)):
        raise BadAnswerError(
            "speculation counts that contradict each other",
            f"{rounds} rounds, {accepted} of {proposed} accepted, histogram {histogram}",
        )
    return RequestAcceptance(rounds=rounds, proposed=proposed, accepted=accepted, accepted_per_position=positions)
