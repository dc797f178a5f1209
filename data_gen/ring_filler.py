"""One producer's work on a ring: pick the next segment, capture it, publish it, and make room by what is behind.

:func:`next_work` decides from a snapshot alone. A producer decides, claims, and decides again with its claim in place;
only if the answer is still the claimed segment it goes to work. So of any two producers at least the later one has
counted the other's reservation, however old the snapshot of its first decision was, and the sum of bytes holds. A
snapshot lists claims before segments, while an owner publishes its segment before it drops its claim: nothing falls
between the two lists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from data_gen.cache.claims import Claim, ClaimFolder, ClaimLostError
from data_gen.cache.format import CacheIntegrityError, CapturedSample
from data_gen.cache.ring import Positions, Ring
from data_gen.cache.row_plan import Document, RowPlan
from data_gen.cache.segment import SegmentReader
from data_gen.cache.shard_file import write_shard_file
from dflash2_train.config import UserError
from dflash2_train.provenance import publish

logger = logging.getLogger(__name__)
MIB = 2**20
LINE_EVERY_S = 5.0
Beat = Callable[[], None]
CaptureDocuments = Callable[[Sequence[Document], Beat], list[CapturedSample]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A segment to claim, and the segments to delete once it is claimed."""

    segment: int
    delete: list[int]


@dataclass(frozen=True, kw_only=True)
class Look:
    """A snapshot of the ring."""

    claims: dict[int, Claim]  # in force
    stale: set[int]  # claimed segments whose owner is given up
    segments: dict[int, int]  # bytes
    positions: Positions


@dataclass(kw_only=True)
class FillTotals:
    """What one producer did."""

    segments: int = 0
    tokens: int = 0
    num_bytes: int = 0
    taken_over: int = 0  # segments that another producer had begun
    capture_seconds: float = 0.0
    wait_seconds: float = 0.0  # for room, or for other producers


def next_work(
    *,
    first: int,
    end: int | None,
    segments: Mapping[int, int],
    claims: Mapping[int, Claim],
    stale: Collection[int],
    size_of: Callable[[int], int],
    budget: int,
) -> Work | str:
    """The lowest missing segment and what must go for it, or why there is nothing to do now.

    Room is made first by segments behind all trainers, oldest first, then by those furthest ahead: they are in the way
    only if a trainer went back to its checkpoint, and are needed last.

    Args:
        first: segment of the lowest position.
        end: number of segments of the whole training, where known.
        segments: bytes of those on disk.
        claims: the claim in force of each claimed segment.
        stale: claimed segments whose owner is given up.
        size_of: the most that a segment may take, bytes.
        budget: bytes of the ring.
    """
    segment = first
    while segment in segments or (segment in claims and segment not in stale):
        segment += 1
    if end is not None and segment >= end:
        return "every segment that the training still needs is there or in work"
    reserved = sum(claim.num_bytes for number, claim in claims.items() if number not in segments and number != segment)
    used = sum(segments.values()) + reserved + size_of(segment)
    behind = sorted(number for number in segments if number < first)
    ahead = sorted((number for number in segments if number > segment), reverse=True)
    delete: list[int] = []
    for number in [*behind, *ahead]:
        if used <= budget:
            break
        delete.append(number)
        used -= segments[number]
    if used > budget:
        return "the ring is full; waiting for the trainers"
    return Work(segment=segment, delete=delete)


class RingFiller:
    """Fills a ring until told to stop.

    Args:
        ring: created with the settings of ``plan``.
        plan: which documents a segment holds.
        capture: makes the samples of documents, in their order, calling its second argument as a sign of life.
        size_of: the most bytes that a segment may take on disk.
        budget: bytes that the ring may take in all.
        stale_after_s: see :class:`data_gen.cache.claims.ClaimFolder`.
        poll_s: pause between looks while there is nothing to do.
    """

    def __init__(
        self,
        ring: Ring,
        plan: RowPlan,
        capture: CaptureDocuments,
        *,
        size_of: Callable[[int], int],
        budget: int,
        stale_after_s: float,
        poll_s: float = 0.2,
    ) -> None:
        self.ring, self.plan, self.totals = ring, plan, FillTotals()
        self.claims = ClaimFolder(ring.claims, stale_after_s=stale_after_s)
        self._capture, self._size_of, self._budget, self._poll_s = capture, size_of, budget, poll_s
        self._last_line = 0.0
        self._last_reason = ""

    def clear_damaged(self) -> None:
        """Delete segments that an earlier life of the ring left cut or changed; they are captured again."""
        for segment in self.ring.segments():
            try:
                with SegmentReader(self.ring.segment_path(segment)) as reader:
                    reader.check_content()
            except FileNotFoundError:
                continue  # deleted by another producer meanwhile
            except CacheIntegrityError as error:
                logger.warning("deleted: %s", error)
                self.ring.delete(segment)

    def run(self, is_done: Callable[[], bool]) -> FillTotals:
        """Fill segments until ``is_done``."""
        while not is_done():
            if not self.fill_next():
                self.totals.wait_seconds += self._poll_s
                time.sleep(self._poll_s)
        return self.totals

    def fill_next(self) -> bool:
        """Fill one segment; False when there is nothing to do now, or another process was first."""
        look = self._look()
        self._sweep(look)
        work = self._decide(look)
        if isinstance(work, str):
            self._say_waiting(work)
            return False
        stale = look.claims.get(work.segment)
        size = self._size_of(work.segment)
        claim = self.claims.take(work.segment, size) if stale is None else self.claims.take_over(stale, size)
        if claim is None:
            return False
        try:
            return self._fill_claimed(claim, stale)
        except ClaimLostError as lost:
            logger.warning("%s; another producer writes it", lost)
            return False
        finally:
            self.claims.release(claim)

    def _look(self) -> Look:
        claims = self.claims.newest()  # before the segments, see above
        segments = self.ring.segments()
        stale = {number for number, claim in claims.items() if self.claims.is_stale(claim)}
        return Look(claims=claims, stale=stale, segments=segments, positions=self.ring.positions())

    def _decide(self, look: Look) -> Work | str:
        goal = look.positions.goal
        return next_work(
            first=self.plan.segment_of(look.positions.lowest),
            end=None if goal is None else self.plan.segment_of(max(goal, 1) - 1) + 1,
            segments=look.segments,
            claims=look.claims,
            stale=look.stale,
            size_of=self._size_of,
            budget=self._budget,
        )

    def _sweep(self, look: Look) -> None:
        """Clear what dead owners left of segments that nobody will write again, and what no resume will need."""
        first = self.plan.segment_of(look.positions.lowest)
        for number in sorted(look.stale):
            if number in look.segments or number < first:
                self.ring.delete_temporaries(number)
                self.claims.release(look.claims.pop(number))
                look.stale.discard(number)
        keep = min(first, self.plan.segment_of(look.positions.checkpoint))
        for number in [number for number in look.segments if number < keep]:
            self.ring.delete(number)
            del look.segments[number]

    def _fill_claimed(self, claim: Claim, stale: Claim | None) -> bool:
        """Look again now that the claim stands, and fill the segment if that is still what is to be done."""
        look = self._look()
        look.claims.pop(claim.segment, None)
        work = self._decide(look)
        if isinstance(work, str) or work.segment != claim.segment:
            return False
        if stale is not None:
            logger.info("segment %d is taken over from process %d of %s", stale.segment, stale.pid, stale.host)
            self.totals.taken_over += 1
            self.ring.delete_temporaries(claim.segment)
        for number in work.delete:
            self.ring.delete(number)
        self._fill(claim)
        return True

    def _fill(self, claim: Claim) -> None:
        documents = self.plan.segment_documents(claim.segment)
        started = time.monotonic()
        samples = self._capture(documents, partial(self._beat, claim))
        for sample, document in zip(samples, documents, strict=True):
            check_against_plan(sample, document)
        written = self._publish(claim, samples)
        self.totals.segments += 1
        self.totals.tokens += sum(document.num_tokens for document in documents)
        self.totals.num_bytes += written
        self.totals.capture_seconds += time.monotonic() - started
        self._last_reason = ""
        self._say(f"segment {claim.segment}: {written / MIB:.1f} MiB in {time.monotonic() - started:.1f} s")

    def _beat(self, claim: Claim) -> None:
        """A sign of life from inside an engine, which must not be torn out of its work: a lost claim shows later."""
        with suppress(ClaimLostError):
            self.claims.beat(claim)

    def _publish(self, claim: Claim, samples: Sequence[CapturedSample]) -> int:
        """Write a segment under a temporary name and rename it; returns its bytes."""
        temporary = self.ring.temporary_path(claim.segment, claim.token)
        final = self.ring.segment_path(claim.segment)
        try:
            write_shard_file(temporary, samples, self.ring.capture)
            size = temporary.stat().st_size
            if size > claim.num_bytes:
                raise RuntimeError(f"segment {claim.segment} takes {size} bytes, {claim.num_bytes} were reserved")
            self.claims.beat(claim, force=True)
            publish(temporary, final)
        except (FileNotFoundError, UserError):
            self.claims.beat(claim, force=True)  # who took over removes our file: then this raises
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return size

    def _say_waiting(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._say(reason)

    def _say(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            logger.info("stream: %s; %d segments so far", line, self.totals.segments)


def check_against_plan(sample: CapturedSample, document: Document) -> None:
    """Refuse a sample of another length than the plan counted with.

    Raises:
        CacheIntegrityError: names the sample.
    """
    found = (sample.sample_id, len(sample), int(sample.loss_mask.sum()))
    if found != (document.sample_id, document.num_tokens, document.num_supervised):
        raise CacheIntegrityError(
            f"sample {found[0]}: {found[1]} tokens, {found[2]} supervised; the plan has {document}. The conversations "
            "changed after the ring was made: delete the ring and start its producers again."
        )
