"""Conversation rows -> captured samples, in the rows' order, with every check on the way.

Whatever reads states (the capture stage, a producer of stream mode) goes through :func:`capture_requests`. States that
do not belong to a row's tokens, whole and in order, are thrown away and asked for once more through a fresh request; a
row that fails again is reported and left out. No state is ever padded or cut.

The teacher is held against the engine's own word: after its last token every request says which token the target
would write next and with which log probability. The first choice shows a wrong layer or a norm too many, the
probability a scale or cap of the logits that ``backends.head`` does not know.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_gen.backends.base import CaptureBackend, CapturedStates, CaptureRequest, Heartbeat, states_fault
from data_gen.cache.format import CacheIntegrityError, CapturedSample
from data_gen.chat import join_turn

ROW_COLUMNS = ("row_id", "prompt_ids", "completion_ids")  # what a row must hold
ATTEMPTS = 2  # of one row: asked once, and once more through a fresh request
MIN_AGREEMENT = 0.8  # bf16 ties leave a few per cent; a wrong norm or layer leaves next to nothing
MAX_LOGPROB_ERROR = 0.2  # one rounding step of a bf16 logit between 16 and 32 is 0.125
JUDGED_SAMPLES = 16  # samples after which that share is judged
PROBE_LENGTHS = (9, 17, 26, 33)  # tokens of the requests that a fresh engine is tried with


@dataclass(frozen=True, kw_only=True)
class RowFailure:
    """A conversation whose states could not be had."""

    row_id: str
    reason: str  # of the last attempt
    attempts: int


@dataclass(kw_only=True)
class CaptureTally:
    """What one call of :func:`capture_rows` met so far."""

    samples: int = 0
    agreeing: int = 0  # samples whose teacher says what the engine says
    retried: int = 0  # attempts thrown away and asked for again
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # reason -> attempts


def capture_request(row: Mapping[str, Any]) -> CaptureRequest:
    """The request for a row's prompt and completion; teacher rows from the prompt's last token on.

    Raises:
        ValueError: the row has no prompt or no completion.
    """
    if not row["prompt_ids"] or not row["completion_ids"]:
        raise ValueError(f"row {row['row_id']} has no prompt or no completion; such rows must be dropped before")
    return CaptureRequest(
        request_id=row["row_id"],
        input_ids=[*row["prompt_ids"], *row["completion_ids"]],
        first_teacher_row=len(row["prompt_ids"]) - 1,
    )


def make_sample(request: CaptureRequest, states: CapturedStates) -> CapturedSample:
    """A cache sample of checked states."""
    split = request.first_teacher_row + 1
    ids, mask = join_turn(request.input_ids[:split], request.input_ids[split:])
    return CapturedSample(
        sample_id=request.request_id,
        input_ids=ids,
        loss_mask=mask,
        tap_hidden=states.tap_hidden,
        teacher_ids=states.teacher_ids,
        teacher_logprobs=states.teacher_logprobs,
        teacher_log_normaliser=states.teacher_log_normaliser,
    )


def refuse_failure(failure: RowFailure) -> None:
    """For callers that can leave no row out.

    Raises:
        CacheIntegrityError: always; names row and reason.
    """
    raise CacheIntegrityError(
        f"{failure.row_id}: no states after {failure.attempts} attempts: {failure.reason}. Mend the engine and run the "
        "same command again."
    )


def capture_rows(
    backend: CaptureBackend,
    rows: Iterable[Mapping[str, Any]],
    *,
    on_failure: Callable[[RowFailure], None],
    tally: CaptureTally | None = None,
    heartbeat: Heartbeat = lambda: None,
) -> Iterator[CapturedSample]:
    """Samples of ``rows``, mappings with :data:`ROW_COLUMNS`; see :func:`capture_requests` for all else.

    Dropped rows must not be among them.
    """
    return capture_requests(
        backend, map(capture_request, rows), on_failure=on_failure, tally=tally, heartbeat=heartbeat
    )


def capture_requests(
    backend: CaptureBackend,
    requests: Iterable[CaptureRequest],
    *,
    on_failure: Callable[[RowFailure], None],
    tally: CaptureTally | None = None,
    heartbeat: Heartbeat = lambda: None,
) -> Iterator[CapturedSample]:
    """Samples of ``requests``, in their order; they are pulled as the backend has room for them.

    Args:
        backend: a started engine, see :func:`check_backend`.
        requests: one a row; their ids become sample ids and must be unique.
        on_failure: called for a row that failed for good, before any later row is yielded. It may raise.
        tally: filled on the way.
        heartbeat: called at least at every step of the engine.

    Raises:
        CacheIntegrityError: teacher and engine do not say the same.
        ValueError: a row without prompt or completion, or a row id that occurs twice.
    """
    work = _Work(iter(requests), on_failure, tally or CaptureTally())
    while batch := work.requests():
        for states in backend.capture(batch, heartbeat):
            work.take(states)
            yield from work.ready()
        work.give_up_on_silence()
        yield from work.ready()


@dataclass(kw_only=True)
class _Row:
    request: CaptureRequest
    attempts: int = 1
    sample: CapturedSample | None = None
    failed: bool = False


class _Work:
    """Rows between being asked for and being yielded."""

    def __init__(
        self, rows: Iterator[CaptureRequest], on_failure: Callable[[RowFailure], None], tally: CaptureTally
    ) -> None:
        self._rows, self._on_failure, self._tally = rows, on_failure, tally
        self._exhausted = False
        self._order: deque[str] = deque()  # row ids, asked for and not yielded
        self._open: dict[str, _Row] = {}  # the same rows
        self._asked: dict[str, str] = {}  # request id -> row id, no answer yet
        self._again: deque[str] = deque()  # row ids to ask for once more

    def requests(self) -> Iterator[CaptureRequest] | None:
        """Requests for a call of the backend: what failed first, then new rows. None: nothing is left to ask for."""
        if not self._again and not self._pull():
            return None
        return self._feed()

    def _feed(self) -> Iterator[CaptureRequest]:
        while self._again or self._pull():
            row_id = self._again.popleft()
            row = self._open[row_id]
            name = row_id if row.attempts == 1 else f"{row_id}#{row.attempts}"
            self._asked[name] = row_id
            yield CaptureRequest(
                request_id=name,
                input_ids=row.request.input_ids,
                first_teacher_row=row.request.first_teacher_row,
            )

    def _pull(self) -> bool:
        """Queue the next row; False when there is none."""
        request = None if self._exhausted else next(self._rows, None)
        if request is None:
            self._exhausted = True
            return False
        if request.request_id in self._open:
            raise ValueError(f"row {request.request_id} is there twice; row ids must be unique")
        self._open[request.request_id] = _Row(request=request)
        self._order.append(request.request_id)
        self._again.append(request.request_id)
        return True

    def take(self, states: CapturedStates) -> None:
        """Judge an answer of the engine and keep it, ask again, or give the row up."""
        row_id = self._asked.pop(states.request_id, None)
        if row_id is None:
            raise CacheIntegrityError(
                f"the engine answered request {states.request_id!r}, which is not open. Its results cannot be trusted; "
                "use data.backend=hf."
            )
        row = self._open[row_id]
        fault = states_fault(row.request, states)
        if fault:
            self._fault(row_id, fault)
            return
        row.sample = make_sample(row.request, states)
        self._tally.samples += 1
        self._tally.agreeing += agrees(states)
        if self._tally.samples >= JUDGED_SAMPLES:
            judge(self._tally.agreeing, self._tally.samples)

    def give_up_on_silence(self) -> None:
        """Treat requests that the engine took and never answered as failed attempts."""
        silent, self._asked = list(self._asked.values()), {}
        for row_id in silent:
            self._fault(row_id, "the engine returned no states")

    def _fault(self, row_id: str, reason: str) -> None:
        row = self._open[row_id]
        self._tally.faults[reason] += 1
        if row.attempts < ATTEMPTS:
            row.attempts += 1
            self._tally.retried += 1
            self._again.append(row_id)
            return
        row.failed = True
        self._tally.failed += 1
        self._on_failure(RowFailure(row_id=row_id, reason=reason, attempts=row.attempts))

    def ready(self) -> Iterator[CapturedSample]:
        """Finished rows from the front of the queue."""
        while self._order:
            row = self._open[self._order[0]]
            if row.sample is None and not row.failed:
                return
            del self._open[self._order.popleft()]
            if row.sample is not None:
                yield row.sample


def agrees(states: CapturedStates) -> bool:
    """Whether the teacher's last row gives the engine's own next token the engine's own probability, and the top.

    Tokens that rounding may swap at the top count as equal.
    """
    found = (states.teacher_ids[-1] == states.next_id).nonzero()
    if not len(found):
        return False
    logprobs = states.teacher_logprobs[-1].float()
    mine = float(logprobs[int(found[0])])
    return abs(mine - states.next_logprob) <= MAX_LOGPROB_ERROR and float(logprobs[0]) - mine <= MAX_LOGPROB_ERROR


def judge(agreeing: int, samples: int) -> None:
    """Refuse a teacher that is not the engine's.

    Raises:
        CacheIntegrityError: fewer than ``MIN_AGREEMENT`` of the samples agree.
    """
    if agreeing < MIN_AGREEMENT * samples:
        raise CacheIntegrityError(
            f"the teacher's first choice and its log probability equal the engine's own for only {agreeing} of "
            f"{samples} samples: final norm, head or logit scale of this target are not what data_gen assumes. "
            "Use data.backend=hf, which takes the model's own logits."
        )


def check_backend(backend: CaptureBackend, vocab_size: int) -> None:
    """Try a fresh engine on a few short made-up requests, before it is given work.

    Raises:
        CacheIntegrityError: its states do not fit their tokens, or final norm and head do not give its own logits.
    """
    reach = min(vocab_size, 1000)  # the low ids: no placeholders of images among them
    requests = [
        CaptureRequest(
            request_id=f"probe-{length}",
            input_ids=[(5 + 13 * place * (length + place)) % reach for place in range(length)],
            first_teacher_row=length // 2,
        )
        for length in PROBE_LENGTHS
    ]
    answers = {states.request_id: states for states in backend.capture(requests, lambda: None)}
    for request in requests:
        states = answers.get(request.request_id)
        fault = "the engine returned no states" if states is None else states_fault(request, states)
        if fault:
            raise CacheIntegrityError(f"a try of the engine on {len(request.input_ids)} tokens failed: {fault}.")
    judge(sum(agrees(answers[request.request_id]) for request in requests), len(requests))
