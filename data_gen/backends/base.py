"""What a backend does for the two stages: answer prompts, and read the target's states for known tokens.

Results come as they finish, in any order, so that an engine stays full while finished shards go to disk. Requests are
pulled as there is room for them, so that the memory taken does not grow with their number; prompts one at a time, as an
answer can be the reason for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Heartbeat = Callable[[], None]  # called at least at every step of the engine, for progress output


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Every sampling field that a backend gets; nothing is left to an engine's defaults."""

    temperature: float
    top_p: float
    top_k: int  # 0 = off
    max_tokens: int
    stop_ids: list[int]
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to answer."""

    request_id: str
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer as the engine returned it; the ending token, if there was one, included."""

    request_id: str
    completion_ids: list[int]
    finish_reason: str  # stop | length


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """Known tokens whose states are wanted."""

    request_id: str
    input_ids: list[int] = field(repr=False)
    first_teacher_row: int  # teacher rows are wanted from here on


@dataclass(frozen=True, kw_only=True)
class CapturedStates:
    """States of one request; the tokens are those that the engine itself reports having seen."""

    request_id: str
    input_ids: list[int] = field(repr=False)
    tap_hidden: Tensor  # [S, T*H] bf16
    teacher_ids: Tensor  # [S, k] int32
    teacher_logprobs: Tensor  # [S, k] float16
    teacher_log_normaliser: Tensor  # [S] float32
    next_id: int  # the target's own greedy choice after the last token
    next_logprob: float  # its log probability, as the engine itself computes it
    cached_tokens: int = 0  # tokens that the engine took from a prefix cache instead of computing them


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request without an answer, for good as far as this run goes."""

    request_id: str
    reason: str


# The next request, or None if there is none now. More may follow once an answer has been taken, so an engine that got
# None asks again after every answer and is done when it got None with nothing under way.
TakeRequest = Callable[[], GenerationRequest | None]


def take_from(requests: Iterable[GenerationRequest]) -> TakeRequest:
    """Requests that are known beforehand, one by one."""
    remaining = iter(requests)
    return lambda: next(remaining, None)


class GenerateBackend(Protocol):
    """Answers prompts with the target."""

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        """One result for every request taken, as they finish."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


class CaptureBackend(Protocol):
    """Reads states of the target."""

    def capture(self, requests: Iterable[CaptureRequest], heartbeat: Heartbeat) -> Iterator[CapturedStates]:
        """States of all ``requests``, as they finish; pulls requests as there is room for them."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


def states_fault(request: CaptureRequest, states: CapturedStates) -> str:
    """Why states do not belong to the request's tokens, whole and in order; empty if they do.

    One rule without exception: as many rows as tokens, the last token included. Nothing is ever padded or cut.
    """
    wanted = len(request.input_ids)
    if states.input_ids != request.input_ids:
        return f"states of other tokens ({len(states.input_ids)} ids for {wanted})"
    if states.cached_tokens:
        return f"{states.cached_tokens} tokens came from the engine's prefix cache, which must be off"
    for name in ("tap_hidden", "teacher_ids", "teacher_logprobs", "teacher_log_normaliser"):
        rows = getattr(states, name).shape[0]
        if rows != wanted:
            return f"{name} has {rows} rows for {wanted} tokens, as prefix caching in the engine gives them"
    if not bool(states.tap_hidden.isfinite().all()):
        return "tap_hidden holds values that are not finite"
    if bool((states.tap_hidden == 0).all(dim=-1).any()):
        return "tap_hidden has rows of zeros, which the engine never filled"
    return ""
