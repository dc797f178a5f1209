"""The held-back answers, packed into rows and shared out to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest
from data_gen.cache.reader import CaptureReader
from data_gen.cache.row_plan import Document, PlannedRow, RowPlan
from data_gen.cache.split import by_place, conversation_of
from dflash2_train.config import RunConfig, absolute
from dflash2_train.data import CachedRows, PackedBatch, collate, padded_length
from dflash2_train.training_data import TrainingData, documents_of


class Captures:
    """Answers to validate on: the same ones, in the same rows, at every step and on any number of ranks.

    Args:
        source: gives their samples.
        manifest: of the cache that they lie in.
        documents: all that are held back, in the order in which they are wanted.
        limit: documents taken at most.
        row_tokens: context tokens a row.

    Raises:
        ConfigError: an answer longer than a row.
    """

    def __init__(
        self,
        source: CachedRows,
        manifest: CaptureManifest,
        documents: Sequence[Document],
        *,
        limit: int,
        row_tokens: int,
    ) -> None:
        self.manifest = manifest
        self.documents = documents[:limit]
        self._source, self._row_tokens = source, row_tokens
        self._plan = RowPlan(self.documents, row_tokens=row_tokens, seed=0)

    def sample(self, document: Document) -> CapturedSample:
        """One answer with its prompt."""
        return self._source.sample(document.sample_id)

    def one_a_conversation(self, count: int) -> list[Document]:
        """The first ``count`` documents of different conversations; fewer if there are no more."""
        first: dict[str, Document] = {}
        for document in self.documents:
            first.setdefault(conversation_of(document.sample_id), document)
        return list(first.values())[:count]

    def batches(self, rank: int, world_size: int) -> Iterator[PackedBatch]:
        """This rank's rows, one a batch, on the CPU; every position that can be an anchor is one."""
        for number, row in enumerate(self._rows()):
            if number % world_size == rank:
                yield self._batch(row)

    def _rows(self) -> Iterator[PlannedRow]:
        """Every document once: the first epoch of the endless list."""
        number = 0
        while (row := self._plan.row(number)).epoch == 0:
            yield row
            number += 1

    def _batch(self, row: PlannedRow) -> PackedBatch:
        tokens = sum(document.num_tokens for document in row.documents)
        states = torch.zeros((1, padded_length([tokens]), self._source.width), dtype=torch.bfloat16)
        samples = self._source.read(row, states[0, :tokens])
        # A limit that no document reaches: nothing is drawn, so seed and epoch do not matter.
        return collate([samples], anchors_per_document=self._row_tokens, seed=0, epochs=[0], tap_hidden=states)


def open_captures(config: RunConfig, data: TrainingData, *, verify_checksums: bool = False) -> Captures:
    """What ``train.validation`` names: a share of what could be trained on, or captures of their own.

    Args:
        config: the experiment.
        data: that is trained on.
        verify_checksums: of captures of their own.

    Raises:
        CacheIntegrityError: captures of their own that cannot be read, or that are trained on as well.
        ConfigError: an answer longer than a row.
    """
    settings = config.train.validation
    if settings.root is None:
        source, manifest, documents = data.held_back()
    else:
        reader = CaptureReader(absolute(settings.root) / "capture", verify_checksums=verify_checksums)
        source, manifest, documents = CachedRows(reader), reader.manifest, documents_of(reader)
        _refuse_trained(settings.root, documents, data)
        documents = by_place(documents, settings.seed)
    return Captures(source, manifest, documents, limit=settings.max_documents, row_tokens=config.train.row_tokens)


def _refuse_trained(root: str, documents: Sequence[Document], data: TrainingData) -> None:
    trained = {conversation_of(document.sample_id) for document in data.plan.documents}
    both = {conversation_of(document.sample_id) for document in documents} & trained
    if both:
        raise CacheIntegrityError(
            f"train.validation.root={root!r}: {len(both)} of its conversations, {min(both)} among them, are trained "
            "on. Capture others, or hold back a share of the training captures with train.validation.share."
        )
