"""What the trainer trains on, as one interface over the two modes: a finished cache, or a ring that is being filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_gen.cache.format import MANIFEST_FILE, CapturedSample, CaptureManifest, IndexRow
from data_gen.cache.reader import CaptureReader
from data_gen.cache.ring import ring_plan
from data_gen.cache.row_plan import ORDER_VERSION, Document, RowPlan, documents_digest, trainable
from data_gen.cache.split import HELD_BACK_FOLDER, by_place, split_documents
from dflash2_train.config import RunConfig, ValidationConfig, absolute
from dflash2_train.data import CachedRows, RowSource, WindowLoader
from dflash2_train.ring_rows import RingRows, wait_for_held_back, wait_for_ring

FIRST_SAMPLES = 64  # at most; shown before training to the checks and to the start of layer 0


class FirstSamples:
    """The first documents of the training order, with the methods of a cache reader.

    The start of a drafter looks at these in both modes, so that both start alike. They lie in the first segment, the
    one part of the order that a stream surely holds at its start.
    """

    def __init__(
        self, manifest: CaptureManifest, documents: Sequence[Document], read: Callable[[str], CapturedSample]
    ) -> None:
        self.manifest, self._read = manifest, read
        self.index = [
            IndexRow(
                sample_id=document.sample_id,
                shard="",
                row=row,
                num_tokens=document.num_tokens,
                num_supervised=document.num_supervised,
            )
            for row, document in enumerate(documents[:FIRST_SAMPLES])
        ]

    def __len__(self) -> int:
        return len(self.index)

    def read(self, sample_index: int) -> CapturedSample:
        """One of the samples."""
        return self._read(self.index[sample_index].sample_id)


class HeldBack(NamedTuple):
    """Answers that are never trained on, in the order of validation, and where they are read."""

    source: CachedRows
    manifest: CaptureManifest
    documents: Sequence[Document]


class TrainingData(Protocol):
    """Samples in training order, and whom to tell how far the training is."""

    manifest: CaptureManifest
    plan: RowPlan

    @property
    def source(self) -> RowSource:
        """Where the samples come from."""
        ...

    def first_samples(self) -> FirstSamples:
        """The first samples of the order; only at the start of a training."""
        ...

    def attestable(self) -> Any:
        """Samples for the checks before training, with the methods of a cache reader."""
        ...

    def held_back(self) -> HeldBack:
        """Captured answers that are in no row (``train.validation.share``); may wait for them."""
        ...

    def order(self) -> dict[str, Any]:
        """What shapes the order of rows; part of a run's fingerprint."""
        ...

    def begin(self, *, row: int, world_size: int, goal: int) -> None:
        """The training starts or resumes at ``row`` of ``goal``. The first rank calls it, before any rank reads."""
        ...

    def saved(self, row: int) -> None:
        """A checkpoint at ``row`` is safe on disk. The first rank calls it."""
        ...

    def finish(self) -> None:
        """All steps are done. The first rank calls it."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


class CachedData:
    """A finished cache."""

    def __init__(self, config: RunConfig, *, verify_checksums: bool) -> None:
        self.reader = CaptureReader(absolute(config.data.root) / "capture", verify_checksums=verify_checksums)
        self.manifest = self.reader.manifest
        self._validation = config.train.validation
        trained, self._held_back = split_documents(
            documents_of(self.reader), share=self._validation.share, seed=self._validation.seed
        )
        self.plan = RowPlan(
            trained,
            row_tokens=config.train.row_tokens,
            seed=config.train.seed,
            segment_rows=config.data.stream.segment_rows,
        )
        self.source = CachedRows(self.reader)

    def first_samples(self) -> FirstSamples:
        return FirstSamples(self.manifest, self.plan.segment_documents(0), self.source.sample)

    def attestable(self) -> CaptureReader:
        return self.reader

    def held_back(self) -> HeldBack:
        return HeldBack(self.source, self.manifest, self._held_back)

    def order(self) -> dict[str, Any]:
        return order_of(self.plan, self._validation)

    def begin(self, *, row: int, world_size: int, goal: int) -> None:
        """A cache need not know."""

    def saved(self, row: int) -> None:
        """A cache need not know."""

    def finish(self) -> None:
        """A cache need not know."""

    def close(self) -> None:
        self.reader.close()


class StreamedData:
    """A ring that producers fill meanwhile."""

    def __init__(self, config: RunConfig, *, rank: int, give_up: Callable[[], bool]) -> None:
        settings = config.data.stream
        self._validation, self._settings, self._give_up = config.train.validation, settings, give_up
        self.ring = wait_for_ring(ring_folder(config), settings, give_up)
        self.manifest = self.ring.capture
        self.plan = ring_plan(self.ring, row_tokens=config.train.row_tokens, seed=config.train.seed, stream=settings)
        self.source = RingRows(self.ring, self.plan, rank=rank, settings=settings, give_up=give_up)
        self._output_dir, self._steps = str(absolute(config.train.output_dir)), config.train.steps

    def first_samples(self) -> FirstSamples:
        return FirstSamples(
            self.manifest, self.plan.segment_documents(0), lambda sample_id: self.source.sample(0, sample_id)
        )

    def attestable(self) -> FirstSamples:
        return self.first_samples()

    def held_back(self) -> HeldBack:
        root = self.ring.root / HELD_BACK_FOLDER
        wait_for_held_back(root, self._validation, self._settings, self._give_up)
        reader = CaptureReader(root)
        return HeldBack(CachedRows(reader), reader.manifest, by_place(documents_of(reader), self._validation.seed))

    def order(self) -> dict[str, Any]:
        """As of a cache of the same documents, unless segments are reused: then a run may change its mode."""
        order = order_of(self.plan, self._validation)
        if self.plan.reuse > 1:
            order.update(segment_rows=self.plan.segment_rows, reuse=self.plan.reuse)
        return order

    def begin(self, *, row: int, world_size: int, goal: int) -> None:
        self.ring.begin(row=row, world_size=world_size, goal=goal)

    def saved(self, row: int) -> None:
        self.ring.save_checkpoint(row)

    def finish(self) -> None:
        self.ring.finish(output_dir=self._output_dir, steps=self._steps)

    def close(self) -> None:
        self.source.close()


def documents_of(reader: CaptureReader) -> list[Document]:
    """What a cache holds that can be trained on, by sample id."""
    return trainable(
        Document(sample_id=row.sample_id, num_tokens=row.num_tokens, num_supervised=row.num_supervised)
        for row in reader.index
    )


def order_of(plan: RowPlan, validation: ValidationConfig) -> dict[str, Any]:
    """What shapes the order of rows in both modes."""
    order: dict[str, Any] = {"version": ORDER_VERSION, "documents": documents_digest(plan.documents)}
    if validation.share > 0:
        order["held_back"] = {"share": validation.share, "seed": validation.seed}
    return order


def ring_folder(config: RunConfig) -> Path:
    """Where the ring of ``config`` lies."""
    return config.data.stream.folder(absolute(config.data.root))


def ring_is_gone(config: RunConfig) -> bool:
    """Whether ``config`` trains from a ring that is not there (yet, or any more)."""
    return config.data.mode == "stream" and not (ring_folder(config) / MANIFEST_FILE).exists()


def open_training_data(
    config: RunConfig, *, rank: int, verify_checksums: bool, give_up: Callable[[], bool]
) -> TrainingData:
    """Open what ``data.mode`` names; in stream mode wait until the ring is there.

    Args:
        config: the experiment.
        rank: this process among all.
        verify_checksums: of a cache; a ring's producers check their segments themselves.
        give_up: asked while waiting for a ring.

    Raises:
        CacheIntegrityError: nothing to train on, or something else than the configuration says.
        ConfigError: no document fits the rows.
    """
    if config.data.mode == "stream":
        return StreamedData(config, rank=rank, give_up=give_up)
    return CachedData(config, verify_checksums=verify_checksums)


def build_loader(config: RunConfig, data: TrainingData, *, rank: int, world_size: int, pin: bool) -> WindowLoader:
    """This rank's windows over ``data``."""
    return WindowLoader(
        data.source,
        data.plan,
        rows=config.train.rows,
        accumulation=config.train.accumulation,
        anchors_per_document=config.train.anchors_per_document,
        seed=config.train.seed,
        rank=rank,
        world_size=world_size,
        pin=pin,
    )
