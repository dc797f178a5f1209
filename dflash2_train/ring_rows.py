"""Rows out of a ring: wait for segments, read them, tell the producers what is behind."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from data_gen.cache.claims import ClaimFolder
from data_gen.cache.format import (
    MANIFEST_FILE,
    CacheIntegrityError,
    CapturedSample,
    list_differences,
    read_json_object,
)
from data_gen.cache.ring import Ring
from data_gen.cache.row_plan import PlannedRow, RowPlan
from data_gen.cache.segment import SegmentReader
from data_gen.cache.split import WHOLE_FILE
from dflash2_train.config import StreamConfig, UserError, ValidationConfig
from dflash2_train.data import split_states

logger = logging.getLogger(__name__)
LINE_EVERY_S = 10.0
POLL_S = 0.1
START_HINT = "Start one, with the same experiment and overrides: dflash2-gen-data stage=stream"


class WaitStopped(Exception):  # noqa: N818 - a request, not an error
    """Asked to stop while waiting for data."""


class Patience:
    """Waits with a line every few seconds, and ends when there was no sign of life for too long.

    Args:
        what: names what is waited for.
        timeout_s: without a sign of life for so long the wait ends in an error.
        give_up: asked at every look; True ends the wait.
    """

    def __init__(self, what: str, *, timeout_s: float, give_up: Callable[[], bool]) -> None:
        self._what, self._timeout_s, self._give_up = what, timeout_s, give_up
        self._started = self._last_sign = self._last_line = time.monotonic()
        self._sign: object = None

    def pause(self, sign: object, why: Callable[[], str]) -> None:
        """One look that found nothing.

        Args:
            sign: anything that changes while a producer is alive.
            why: tells the likely cause.

        Raises:
            WaitStopped: ``give_up`` said so.
            UserError: no sign of life for ``timeout_s``.
        """
        if self._give_up():
            raise WaitStopped(f"stopped while waiting for {self._what}")
        now = time.monotonic()
        if sign != self._sign:
            self._sign, self._last_sign = sign, now
        if now - self._last_sign > self._timeout_s:
            raise UserError(
                f"no sign of life for data.stream.timeout_s={self._timeout_s:g} s while waiting for {self._what}: "
                f"{why()}. The same command continues from the last checkpoint."
            )
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            logger.info("waiting for %s for %.0f s: %s", self._what, now - self._started, why())
        time.sleep(POLL_S)


def wait_for_ring(root: Path, settings: StreamConfig, give_up: Callable[[], bool]) -> Ring:
    """The ring at ``root``, as soon as a producer has made it.

    Raises:
        UserError: none came in ``data.stream.timeout_s``.
    """
    patience = Patience(f"the ring {root}", timeout_s=settings.timeout_s, give_up=give_up)
    while not (root / MANIFEST_FILE).exists():
        patience.pause(None, lambda: f"no producer has made it yet. {START_HINT}")
    return Ring(root)


def wait_for_held_back(
    root: Path, validation: ValidationConfig, settings: StreamConfig, give_up: Callable[[], bool]
) -> None:
    """Return as soon as a producer has captured the held-back answers of a ring into ``root``.

    Raises:
        CacheIntegrityError: they are of another choice than this configuration's.
        UserError: none came in ``data.stream.timeout_s``.
        WaitStopped: asked to stop meanwhile.
    """
    patience = Patience(f"the held-back answers in {root}", timeout_s=settings.timeout_s, give_up=give_up)
    while not (root / WHOLE_FILE).exists():
        captured = sorted(path.name for path in root.glob("shard-*"))
        patience.pause(
            captured,
            lambda: f"no producer with train.validation.share={validation.share} has captured them all. {START_HINT}",
        )
    wanted = {"share": validation.share, "seed": validation.seed}
    lines = list_differences(read_json_object(root / WHOLE_FILE), wanted, "train.validation.")
    if lines:
        listed = "\n  ".join(lines)
        raise CacheIntegrityError(
            f"{root} holds answers of another choice (captured -> config):\n  {listed}\n"
            "Start producers and trainer with the same settings."
        )


class RingRows:
    """A :class:`dflash2_train.data.RowSource` over a ring, for one rank.

    Args:
        ring: opened.
        plan: of the ring.
        rank: whose position is told.
        settings: ``data.stream``.
        give_up: asked while waiting.
    """

    def __init__(
        self, ring: Ring, plan: RowPlan, *, rank: int, settings: StreamConfig, give_up: Callable[[], bool]
    ) -> None:
        self._ring, self._plan, self._rank = ring, plan, rank
        self._settings, self._give_up = settings, give_up
        content = ring.capture.content
        self.width = len(content["target_layer_ids"]) * content["hidden_size"]
        self._claims = ClaimFolder(ring.claims, stale_after_s=settings.stale_after_s)
        self._reader: SegmentReader | None = None
        self._segment = -1  # of the open reader
        self._told = -1  # segment of the last position told

    def announce(self, rows: Sequence[PlannedRow]) -> None:
        """Nothing: a segment was written a moment ago, or is not there yet."""

    def read(self, row: PlannedRow, states: Tensor) -> list[CapturedSample]:
        """Samples of a row, in order, their states in ``states``, as soon as its segment is there.

        Raises:
            WaitStopped: asked to stop meanwhile.
            UserError: the producers are silent.
            CacheIntegrityError: the segment is damaged or not of this plan.
        """
        return [
            self.sample(row.segment, document.sample_id, part)
            for document, part in zip(row.documents, split_states(row, states), strict=True)
        ]

    def sample(self, segment: int, sample_id: str, states: Tensor | None = None) -> CapturedSample:
        """One sample of a segment, its states put into ``states`` if given."""
        while True:
            reader = self._open(segment)
            try:
                return reader.read(sample_id, states)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self.close()  # another host deleted the file under us; it is made again

    def passed(self, number: int) -> None:
        """Tell the position once it enters another segment; the file of the old one is closed first."""
        segment = self._plan.segment_of(number)
        if segment != self._told:
            if segment != self._segment:
                self.close()
            self._ring.move(self._rank, number)
            self._told = segment

    def close(self) -> None:
        """Close the segment that is open."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._segment = -1

    def _open(self, segment: int) -> SegmentReader:
        if self._reader is None or self._segment != segment:
            self.close()
            self._reader, self._segment = self._wait(segment), segment
        return self._reader

    def _wait(self, segment: int) -> SegmentReader:
        what = f"segment {segment} of the ring (row {self._plan.first_row_of(segment)})"
        patience = Patience(what, timeout_s=self._settings.timeout_s, give_up=self._give_up)
        while True:
            try:
                return SegmentReader(self._ring.segment_path(segment))
            except FileNotFoundError:
                patience.pause(self._sign(), lambda: self._why(segment))

    def _sign(self) -> object:
        """Changes with every segment made or deleted and every sign of life of a producer."""
        stamps = []
        for path in self._ring.claims.glob("segment-*"):
            try:
                stamps.append((path.name, path.stat().st_mtime_ns))
            except FileNotFoundError:
                continue  # released since the folder was listed
        return sorted(stamps), sorted(self._ring.segments())

    def _why(self, segment: int) -> str:
        claims = self._claims.newest()
        mine = claims.get(segment)
        if mine is not None:
            silent = self._claims.silence(mine)
            return f"process {mine.pid} of {mine.host} captures it, last sign of life {silent:.0f} s ago or more"
        if claims:
            return f"producers are at work on other segments ({', '.join(map(str, sorted(claims)))})"
        return f"no producer is at work. {START_HINT}"
