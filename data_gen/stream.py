"""Stage ``stream``: capture in training order into a ring, while ``dflash2-train data.mode=stream`` trains from it.

The conversations must be finished: their lengths are all that the training order hangs on. Started several times, on
one or many hosts that see the ring, the producers share the work. Each runs until the trainer says that it is done.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from data_gen.backends import open_capturer
from data_gen.backends.base import CaptureBackend, CaptureRequest
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest
from data_gen.cache.ring import Ring, plan_content, ring_plan
from data_gen.cache.row_plan import Document, RowPlan, trainable
from data_gen.cache.segment import segment_bytes
from data_gen.cache.split import HELD_BACK_FOLDER, split_documents
from data_gen.capture import capture_content, token_bytes
from data_gen.capture_rows import (
    ROW_COLUMNS,
    CaptureTally,
    capture_request,
    capture_requests,
    check_backend,
    refuse_failure,
)
from data_gen.held_back import capture_held_back
from data_gen.ring_filler import MIB, Beat, FillTotals, RingFiller
from dflash2_train.config import ConfigError, RunConfig, absolute
from dflash2_train.taps import check_taps

logger = logging.getLogger(__name__)
SHARDS_IN_MEMORY = 32  # conversation shards whose ids are kept at hand; a segment's documents lie all over them


def stream(config: RunConfig, folder: Path) -> FillTotals:
    """Fill the ring of ``config`` until its training is done; starts no engine if it is done already.

    Args:
        config: the experiment.
        folder: the target's folder.

    Raises:
        CacheIntegrityError: no conversations, a ring of other settings, or states that do not fit their tokens.
        ConfigError: the budget is too small for two segments, or the disk for the budget.
    """
    check_taps(config.drafter.target_layer_ids, config.target.num_layers)
    ring, plan, rows, held_back = open_ring(config)
    finished = DoneCheck(ring, config)
    if finished.at_start:
        logger.info("the training of %s is done; nothing to capture", config.train.output_dir)
        return FillTotals()
    need_room(ring, config)
    started = time.monotonic()
    logger.info("starting %s to capture into %s", config.data.capturer, ring.root)
    backend = open_capturer(config, folder)
    logger.info("%s started in %.0f s", config.data.capturer, time.monotonic() - started)
    tally = CaptureTally()
    filler = RingFiller(
        ring,
        plan,
        lambda documents, beat: capture_documents(backend, rows.requests(documents), tally, beat),
        size_of=lambda segment: size_of(plan, segment, token_bytes(config)),
        budget=config.data.stream.budget_mib * MIB,
        stale_after_s=config.data.stream.stale_after_s,
    )
    try:
        check_backend(backend, config.target.vocab_size)
        capture_held_back(
            ring.root / HELD_BACK_FOLDER,
            ring.capture,
            held_back,
            lambda documents: capture_documents(backend, rows.requests(documents), tally, lambda: None),
            config.train.validation,
        )
        filler.clear_damaged()
        return filler.run(finished)
    finally:
        backend.close()


def open_ring(config: RunConfig) -> tuple[Ring, RowPlan, ConversationRows, list[Document]]:
    """The ring of ``config``, made if need be, its plan, where tokens come from, and the documents held back."""
    settings = config.data.stream
    store = ConversationStore(absolute(config.data.root))
    manifest = CaptureManifest(content=capture_content(config, store.content()))
    rows = ConversationRows(store)
    validation = config.train.validation
    documents, held_back = split_documents(trainable(rows.documents), share=validation.share, seed=validation.seed)
    order = {"row_tokens": config.train.row_tokens, "seed": config.train.seed}
    RowPlan(documents, row_tokens=config.train.row_tokens, seed=config.train.seed)  # refuse before a ring is made
    content = plan_content(documents, stream=settings, **order)
    ring = Ring.create(settings.folder(absolute(config.data.root)), manifest, content, documents)
    return ring, ring_plan(ring, stream=settings, **order), rows, held_back


def size_of(plan: RowPlan, segment: int, bytes_per_token: int) -> int:
    """The most bytes that a segment may take on disk."""
    documents = plan.segment_documents(segment)
    tokens = sum(document.num_tokens for document in documents)
    return segment_bytes([document.sample_id for document in documents], tokens, bytes_per_token)


def need_room(ring: Ring, config: RunConfig) -> None:
    """Refuse a budget in which capture and training could not run side by side, or that the disk does not have.

    Raises:
        ConfigError: with the size that is needed.
    """
    settings = config.data.stream
    row_mib = config.train.row_tokens * token_bytes(config) / MIB
    needed = 2 * settings.segment_rows * row_mib
    if settings.budget_mib < needed:
        fitting = int(settings.budget_mib / (2 * row_mib))
        advice = f"or lower data.stream.segment_rows to {fitting}" if fitting else "since even segments of one row need"
        raise ConfigError(
            f"data.stream.budget_mib={settings.budget_mib}: two segments of {settings.segment_rows} rows take up to "
            f"{needed:.0f} MiB, and one is captured while another is trained on. Raise the budget, {advice}"
            f"{'.' if fitting else f' {2 * row_mib:.0f} MiB.'}"
        )
    there = sum(ring.segments().values()) / MIB
    free = ring.free_bytes() / MIB
    if there + free < settings.budget_mib:
        raise ConfigError(
            f"data.stream.budget_mib={settings.budget_mib}: {ring.root} has {free:.0f} MiB free and holds {there:.0f}. "
            "Free space, lower the budget, or choose another data.stream.root."
        )


class DoneCheck:
    """Tells when the training of this configuration is done; what another run or fewer steps left does not count."""

    def __init__(self, ring: Ring, config: RunConfig) -> None:
        self._ring = ring
        found = ring.done()
        wanted = (str(absolute(config.train.output_dir)), config.train.steps)
        self.at_start = found is not None and (found["output_dir"], found["steps"]) == wanted
        self._old_token = None if found is None else found["token"]

    def __call__(self) -> bool:
        found = self._ring.done()
        return found is not None and found["token"] != self._old_token


class ConversationRows:
    """Tokens of conversations by id. Lengths of all are read once; tokens a shard at a time, the last few kept."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._shard_of: dict[str, int] = {}
        self._shards: OrderedDict[int, dict[str, CaptureRequest]] = OrderedDict()
        self.documents: list[Document] = []
        for shard, facts in zip(store.shards(), store.facts(), strict=True):
            lengths = zip(
                facts.row_id, facts.num_prompt_tokens, facts.num_completion_tokens, facts.dropped, strict=True
            )
            for name, prompt, completion, dropped in lengths:
                if not dropped:
                    self._shard_of[name] = shard
                    tokens = prompt + completion
                    self.documents.append(Document(sample_id=name, num_tokens=tokens, num_supervised=completion))
        if not self.documents:
            raise CacheIntegrityError(f"{store.folder}: holds no conversation. Run dflash2-gen-data stage=regenerate.")

    def requests(self, documents: Sequence[Document]) -> list[CaptureRequest]:
        """What to capture for ``documents``, in their order."""
        names = {document.sample_id for document in documents}
        found: dict[str, CaptureRequest] = {}
        for shard in sorted({self._shard_of[name] for name in names}):
            found.update((name, request) for name, request in self._shard(shard).items() if name in names)
        return [found[document.sample_id] for document in documents]

    def _shard(self, shard: int) -> dict[str, CaptureRequest]:
        if shard not in self._shards:
            self._shards[shard] = self._load(shard)
            if len(self._shards) > SHARDS_IN_MEMORY:
                self._shards.popitem(last=False)
        self._shards.move_to_end(shard)
        return self._shards[shard]

    def _load(self, shard: int) -> dict[str, CaptureRequest]:
        rows = self._store.read(shard, [*ROW_COLUMNS, "dropped"])
        return {row["row_id"]: capture_request(row) for row in rows if not row["dropped"]}


def capture_documents(
    backend: CaptureBackend, requests: Sequence[CaptureRequest], tally: CaptureTally, beat: Beat
) -> list[CapturedSample]:
    """Samples of ``requests``, in their order. The plan counts with every one, so none may be left out.

    Raises:
        CacheIntegrityError: a row failed for good, or teacher and engine do not say the same.
    """
    return list(capture_requests(backend, requests, on_failure=refuse_failure, tally=tally, heartbeat=beat))
