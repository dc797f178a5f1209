"""The training order: which documents, in which row, in which epoch.

A pure function of (documents, ``row_tokens``, seed): no file, no tensor, no clock. The trainer that reads a finished
cache, the trainer that reads a ring and the producers that fill it all compute it from the same list of documents, so
that a stream holds the rows of the cache mode in the same order, and captures nothing twice or in vain.

The rows of all epochs form one endless list, so the position of a run is a single number, the rows consumed. Every
document is used once before any is used again.

A ring cuts that list into *segments* of ``segment_rows`` rows. With ``reuse`` r > 1 the rows of a segment are played r
times before those of the next: row numbers [s*R*r, (s+1)*R*r) all lie in segment s. The first pass keeps the rows'
order, later ones shuffle it, and each pass draws its own anchors. With r = 1 segments do not show in the order.
"""

from __future__ import annotations

import hashlib
import random
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_gen.cache.format import CacheIntegrityError
from dflash2_train.config import ConfigError

ORDER_VERSION = 2  # raise it when equal documents and seeds would give another order; 1 followed the cache's index
MIN_SUPERVISED = 2  # an anchor and the label after it
OPEN_ROWS = 16  # rows that the packer keeps open
EPOCHS_KEPT = 2  # epochs whose rows stay in memory; around the turn of an epoch both are in use


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One sample as the packer sees it."""

    sample_id: str
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """One row of the endless list."""

    documents: Sequence[Document]
    segment: int  # of a ring; without one, nobody asks
    epoch: int  # passes over all documents before this one
    draw: int  # fixes the anchors together with seed and sample id; equals epoch unless segments are reused


def trainable(documents: Iterable[Document]) -> list[Document]:
    """Documents that hold an anchor and a label, by sample id: the one list that all orders start from.

    Raises:
        CacheIntegrityError: two documents share an id.
    """
    ordered = sorted(
        (document for document in documents if document.num_supervised >= MIN_SUPERVISED),
        key=lambda document: document.sample_id,
    )
    for one, other in zip(ordered, ordered[1:], strict=False):
        if one.sample_id == other.sample_id:
            raise CacheIntegrityError(
                f"sample id {one.sample_id} occurs more than once. Run dflash2-gen-data stage=verify, which names "
                "the files."
            )
    return ordered


def documents_digest(documents: Sequence[Document]) -> str:
    """Hex sha256 over ids and lengths, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.sample_id}\t{document.num_tokens}\t{document.num_supervised}\n".encode())
    return digest.hexdigest()


def plan_epoch(documents: Sequence[Document], *, row_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of one epoch: lists of places in ``documents`` whose token counts fit ``row_tokens``.

    Documents are shuffled by (seed, epoch) and put into the first of a few open rows that has room, so
    that rows are nearly full and their order stays random.
    """
    order = list(range(len(documents)))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - a data order, not a secret
    open_rows: list[tuple[int, list[int]]] = []
    rows: list[list[int]] = []
    for place in order:
        tokens = documents[place].num_tokens
        for slot, (free, members) in enumerate(open_rows):
            if tokens <= free:
                members.append(place)
                open_rows[slot] = (free - tokens, members)
                break
        else:
            open_rows.append((row_tokens - tokens, [place]))
            if len(open_rows) > OPEN_ROWS:
                rows.append(open_rows.pop(0)[1])
    rows.extend(members for _, members in open_rows)
    return rows


class RowPlan:
    """Random access to the endless list of rows. Threads may share it.

    Args:
        documents: as :func:`trainable` gives them.
        row_tokens: context tokens a row at most.
        seed: of the order.
        segment_rows: R, rows of a ring's segment.
        reuse: r, times that the rows of a segment are played.

    Raises:
        ConfigError: a document longer than ``row_tokens``, or no document at all.
    """

    def __init__(
        self, documents: Sequence[Document], *, row_tokens: int, seed: int, segment_rows: int = 1, reuse: int = 1
    ) -> None:
        longest = max((document.num_tokens for document in documents), default=0)
        if longest == 0:
            raise ConfigError("there is no document with an anchor and a label. Regenerate with longer completions.")
        if longest > row_tokens:
            raise ConfigError(
                f"train.row_tokens={row_tokens}: the longest document has {longest} tokens and must fit a row. "
                f"Set train.row_tokens to at least {longest}."
            )
        self.documents = documents
        self.segment_rows, self.reuse = segment_rows, reuse
        self._row_tokens, self._seed = row_tokens, seed
        self._starts = [0]  # number of the first row of each epoch planned so far, and of the next one
        self._rows: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()

    def segment_of(self, number: int) -> int:
        """Segment that holds row ``number``."""
        return number // (self.segment_rows * self.reuse)

    def first_row_of(self, segment: int) -> int:
        """Number of the first row that lies in ``segment``."""
        return segment * self.segment_rows * self.reuse

    def row(self, number: int) -> PlannedRow:
        """Row ``number`` of the endless list."""
        segment, place = divmod(number, self.segment_rows * self.reuse)
        turn, offset = divmod(place, self.segment_rows)
        if turn:
            order = list(range(self.segment_rows))
            random.Random(f"{self._seed}/{segment}/{turn}").shuffle(order)  # noqa: S311 - a data order
            offset = order[offset]
        epoch, members = self._base_row(segment * self.segment_rows + offset)
        documents = [self.documents[place] for place in members]
        return PlannedRow(documents=documents, segment=segment, epoch=epoch, draw=epoch * self.reuse + turn)

    def segment_documents(self, segment: int) -> list[Document]:
        """Documents of a segment, each once, in the order of their first use."""
        first = segment * self.segment_rows
        found: dict[str, Document] = {}
        for number in range(first, first + self.segment_rows):
            for place in self._base_row(number)[1]:
                document = self.documents[place]
                found.setdefault(document.sample_id, document)
        return list(found.values())

    def _base_row(self, number: int) -> tuple[int, list[int]]:
        """(epoch, places) of a row of the list without reuse."""
        with self._lock:
            while number >= self._starts[-1]:
                epoch = len(self._starts) - 1
                self._starts.append(self._starts[-1] + len(self._epoch(epoch)))
            epoch = bisect_right(self._starts, number) - 1
            return epoch, self._epoch(epoch)[number - self._starts[epoch]]

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._rows:
            while len(self._rows) >= EPOCHS_KEPT:
                del self._rows[next(iter(self._rows))]
            self._rows[epoch] = plan_epoch(self.documents, row_tokens=self._row_tokens, seed=self._seed, epoch=epoch)
        return self._rows[epoch]
