"""The answers that are still wanted, drawn one request at a time, and what comes back for them.

Work is cut into shards of whole conversations in a fixed order: the first answer of every prompt before any second
one, so that a run cut short has seen every prompt. A shard is written the moment its last conversation ends, whatever
order the engine answers in. Alive are only conversations that the engine holds or that wait for their next turn, and
the rows of shards that they keep open; their number follows the engine's size, not the number of prompts.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_gen.answers import ends_dialogue, make_row
from data_gen.backends.base import Completion, Failure, GenerationRequest
from data_gen.cache.conversations import ConversationStore, KeySet
from data_gen.chat import PromptRefusedError
from data_gen.ledger import Ledger
from data_gen.prepare import PreparedPrompts, check_length
from data_gen.prompts import PromptRecord
from data_gen.turns import Dialogue, row_seed, turn_points
from dflash2_train.config import UserError

JUDGED_REQUESTS = 100  # results after which the failed share is judged; a run's end is judged at any number
MAX_CAUSES = 5  # failed rows that an error names
AFTER_CUT = "an earlier answer was cut or empty"
HISTORY_COLUMNS = ["completion_ids", "finish_reason"]


class TooManyFailuresError(UserError, RuntimeError):
    """More requests than allowed were not answered."""


@dataclass(kw_only=True)
class RunCounts:
    """What this run did."""

    answers: int = 0
    tokens: int = 0
    settled: int = 0  # turns that are answered, failed or cannot be asked
    failed: Counter[str] = field(default_factory=Counter)  # reason -> requests
    causes: list[str] = field(default_factory=list)  # the first of them, by row


@dataclass(kw_only=True)
class _Shard:
    """Rows of a shard in the making."""

    index: int
    waiting: int  # conversations that have not ended
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # place of the conversation, row
    skips: list[tuple[str, str]] = field(default_factory=list)  # row id, reason; told to the ledger after the rows


@dataclass(kw_only=True)
class _Active:
    """A conversation under way and where its rows go."""

    dialogue: Dialogue
    place: int
    shard: _Shard


class WorkList:
    """Which conversations still want an answer; a byte each, wanted or not.

    Conversation ``repeat * len(records) + position`` is the given repeat of the record at that position.
    """

    def __init__(self, records: Sequence[PromptRecord], repeats: int, turns: str, done: KeySet, ledger: Ledger) -> None:
        self._records, self._turns = records, turns
        self._open = bytearray(len(records) * repeats)
        self.turns_left = self.turns_done = 0
        self.begun: set[str] = set()  # row ids of the answered turns of conversations that want more
        for number in range(len(self._open)):
            self._sort_in(number, done, ledger)

    def numbers(self) -> Iterator[int]:
        """Numbers of the wanted conversations, ascending."""
        return itertools.compress(itertools.count(), self._open)

    def dialogue(self, number: int) -> Dialogue:
        """The conversation of that number, nothing answered."""
        repeat, position = divmod(number, len(self._records))
        record = self._records[position]
        return Dialogue(record=record, repeat=repeat, points=turn_points(record.messages, self._turns))

    def _sort_in(self, number: int, done: KeySet, ledger: Ledger) -> None:
        names = self.dialogue(number).later_names(0)
        answered = 0
        while answered < len(names) and names[answered] in done:
            answered += 1
        ended = answered == len(names) or ledger.is_skipped(names[answered]) or ledger.is_dead(names[answered])
        self.turns_done += len(names) if ended else answered
        if not ended:
            self._open[number] = True
            self.turns_left += len(names) - answered
            self.begun.update(names[:answered])


class Workload:
    """Gives requests to the engine and takes its results to the shards and the ledger.

    Args:
        prepared: prompts, renderer and settings.
        work: what is wanted.
        store: where shards go; their numbers come from ``numbers``.
        ledger: open for writing.
        shard_size: conversations of a shard.
        max_prompt_tokens: of a turn's prompt.
        max_failed_share: of this run's requests.
    """

    def __init__(
        self,
        prepared: PreparedPrompts,
        work: WorkList,
        store: ConversationStore,
        ledger: Ledger,
        *,
        numbers: Iterator[int],
        shard_size: int,
        max_prompt_tokens: int,
        max_failed_share: float,
    ) -> None:
        self.counts = RunCounts()
        self._prepared, self._work, self._store, self._ledger = prepared, work, store, ledger
        self._max_prompt_tokens, self._max_failed_share = max_prompt_tokens, max_failed_share
        self._seed = int(prepared.content["sampling"]["seed"])
        self._stored = store.find(work.begun, HISTORY_COLUMNS)
        self._fresh = self._open_shards(numbers, shard_size)
        self._ready: deque[tuple[_Active, GenerationRequest]] = deque()
        self._asked: dict[str, tuple[_Active, GenerationRequest]] = {}
        self._open: dict[int, _Shard] = {}

    def _open_shards(self, numbers: Iterator[int], size: int) -> Iterator[_Active]:
        """Every wanted conversation in order, each with its shard."""
        wanted = self._work.numbers()
        while places := list(itertools.islice(wanted, size)):
            shard = _Shard(index=next(numbers), waiting=len(places))
            self._open[shard.index] = shard
            for place in places:
                yield _Active(dialogue=self._work.dialogue(place), place=place, shard=shard)

    def take(self) -> GenerationRequest | None:
        """The next request: a later turn if one is ready, else the first of a new conversation; None if none is now."""
        while not self._ready:
            active = next(self._fresh, None)
            if active is None:
                return None
            self._resume(active)
        active, request = self._ready.popleft()
        self._asked[request.request_id] = (active, request)
        return request

    def _resume(self, active: _Active) -> None:
        """Take up a conversation after the turns of it that are stored."""
        dialogue = active.dialogue
        while (row := self._stored.pop(dialogue.name, None)) is not None:
            if not self._go_on(active, row["completion_ids"], row["finish_reason"]):
                return
        self._ask(active)

    def _ask(self, active: _Active) -> None:
        """Make the wanted turn ready, or end the conversation where it cannot be asked."""
        dialogue = active.dialogue
        try:
            ids = self._prepared.renderer.prompt_ids(dialogue.messages(), dialogue.record.tools)
            check_length(ids, self._max_prompt_tokens)
        except PromptRefusedError as error:
            self._skip_rest(active, dialogue.turn, str(error))
            return
        seed = row_seed(self._seed, dialogue.record.prompt_id, dialogue.repeat, dialogue.turn)
        self._ready.append((active, GenerationRequest(request_id=dialogue.name, prompt_ids=ids, seed=seed)))

    def _go_on(self, active: _Active, completion_ids: list[int], finish_reason: str) -> bool:
        """Put the wanted turn's answer into the history; False if the conversation ends there."""
        dialogue = active.dialogue
        if dialogue.is_last:
            self._end(active)
            return False
        if ends_dialogue(finish_reason, completion_ids):
            self._skip_rest(active, dialogue.turn + 1, AFTER_CUT)
            return False
        renderer, stop_ids = self._prepared.renderer, self._prepared.sampling.stop_ids
        dialogue.answers.append(renderer.answer_text(completion_ids, stop_ids))
        return True

    def settle(self, result: Completion | Failure) -> None:
        """Take a result in.

        Raises:
            TooManyFailuresError: too large a share of the requests failed.
            RuntimeError: a result that nothing asked for, or a second one.
            OSError: a shard could not be written.
        """
        if result.request_id not in self._asked:
            raise RuntimeError(f"the engine returned {result.request_id}, which is not under way; an answer came twice")
        active, request = self._asked.pop(result.request_id)
        if isinstance(result, Failure):
            self._fail(active, result)
            return
        self.counts.answers += 1
        self.counts.settled += 1
        self.counts.tokens += len(result.completion_ids)
        active.shard.rows.append((active.place, make_row(active.dialogue, request, result, self._prepared)))
        if self._go_on(active, result.completion_ids, result.finish_reason):
            self._ask(active)

    def _fail(self, active: _Active, failure: Failure) -> None:
        dialogue, counts = active.dialogue, self.counts
        self._ledger.fail(failure.request_id, failure.reason)
        counts.failed[failure.reason] += 1
        counts.settled += len(dialogue.points) - dialogue.turn  # later turns wait for this one
        if len(counts.causes) < MAX_CAUSES:
            counts.causes.append(f"{failure.request_id}: {failure.reason}")
        self._end(active)
        if counts.answers + counts.failed.total() >= JUDGED_REQUESTS:
            self.judge_failures()

    def _skip_rest(self, active: _Active, first: int, reason: str) -> None:
        """End a conversation whose turns from ``first`` on cannot be asked."""
        names = active.dialogue.later_names(first)
        active.shard.skips += [(name, reason) for name in names]
        self.counts.settled += len(names)
        self._end(active)

    def _end(self, active: _Active) -> None:
        active.shard.waiting -= 1
        if active.shard.waiting == 0:
            self._write(active.shard)

    def _write(self, shard: _Shard) -> None:
        del self._open[shard.index]
        if shard.rows:
            shard.rows.sort(key=lambda entry: (entry[0], entry[1]["turn"]))
            self._store.write(shard.index, [row for _, row in shard.rows])
        for name, reason in shard.skips:  # they follow from the rows, so never stand without them
            self._ledger.skip(name, reason)

    def finish(self) -> None:
        """The engine has returned all it will: what it left out has failed, and the failed share is judged.

        Raises:
            TooManyFailuresError: it is above the limit.
        """
        for name in list(self._asked):
            self._fail(self._asked.pop(name)[0], Failure(request_id=name, reason="the engine returned no answer"))
        self.judge_failures()

    def flush(self) -> None:
        """Write the rows of shards that are not complete, so that a run that is stopped keeps what it has."""
        for shard in list(self._open.values()):
            self._write(shard)

    def judge_failures(self) -> None:
        """Stop if the share of failed requests of this run is above the limit.

        Raises:
            TooManyFailuresError: it is; names the first causes.
        """
        failed = self.counts.failed.total()
        asked = failed + self.counts.answers
        if failed <= self._max_failed_share * asked:
            return
        causes = "\n  ".join(self.counts.causes)
        raise TooManyFailuresError(
            f"data.max_failed_share={self._max_failed_share}: {failed} of {asked} requests were not answered. The "
            f"first:\n  {causes}\nWhat was answered is kept. Mend the cause and run again: failed rows are tried again."
        )
