"""Stage ``capture``: the target's tap states and next-token distribution for every conversation, into the cache.

Capture shard i holds the kept rows of conversation shard i, in their order, and job j of n (``data.num_shards``) makes
those whose number is j modulo n. How rows become samples, and what is
checked on the way, stands in ``data_gen.capture_rows``. A row that failed twice is listed in ``capture/failures.jsonl``
with the reason and left out of its shard; more of them than ``data.max_failed_share`` end the stage. A shard that is
there is done, and must hold every kept row that is not listed. To try listed rows again, remove their shard.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_gen.backends import open_capturer
from data_gen.backends.base import CaptureBackend
from data_gen.backends.folder import find_target
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import (
    FLOAT8,
    TEACHER_NORM,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    shard_name,
)
from data_gen.cache.jobs import Job, alone_in
from data_gen.cache.writer import CaptureWriter
from data_gen.capture_rows import ROW_COLUMNS, CaptureTally, RowFailure, capture_rows, check_backend
from data_gen.prepare import job_of
from data_gen.regenerate import OpenProgress, StageProgress, need_space
from dflash2_train.config import RunConfig, absolute
from dflash2_train.provenance import (
    atomic_write_text,
    hash_chat_template,
    hash_model_folder,
    hash_tokenizer_files,
    sha256_json,
)
from dflash2_train.taps import STREAM_RULE, TAP_CONVENTION, check_taps

logger = logging.getLogger(__name__)
CAPTURE = "capture"
FAILURES_FILE = "failures.jsonl"
# What regenerate recorded of the target's folder, and how capture reads the same.
FOLDER_HASHES: dict[str, Callable[[Path], str | None]] = {
    "target_hash": hash_model_folder,
    "tokenizer_hash": hash_tokenizer_files,
    "chat_template_hash": hash_chat_template,
}
TEACHER_BYTES = 4 + 2  # of one teacher entry: id and log probability


@dataclass(kw_only=True)
class CaptureTotals:
    """What this run wrote."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    num_bytes: int = 0
    skipped_shards: int = 0  # there already
    seconds: float = 0.0
    start_seconds: float = 0.0
    failed: int = 0  # rows listed as failed, those of earlier runs included
    tally: CaptureTally = field(default_factory=CaptureTally)

    @property
    def next_equal(self) -> int:
        """Samples whose teacher says what the engine would say next."""
        return self.tally.agreeing


def token_bytes(config: RunConfig) -> int:
    """Bytes of the cache a token: tap states, teacher, ids and mask."""
    taps = len(config.drafter.target_layer_ids)
    values = config.target.hidden_size * taps
    states = values + 4 * taps if config.data.store.dtype == FLOAT8 else 2 * values
    return states + TEACHER_BYTES * config.data.teacher_top_k + 4 + 4 + 1


def capture_content(config: RunConfig, conversations: dict[str, Any]) -> dict[str, Any]:
    """Everything that shapes the cache: the conversations' settings and the capture's own.

    The ``capture_*`` hashes are read from the target's folder now and must equal those that the conversations were
    made with; the trainer looks at both again.

    Raises:
        CacheIntegrityError: the folder is not that of the conversations.
    """
    folder = find_target(config.target)
    kept = {key: value for key, value in conversations.items() if key != "backend"}
    hashes = {key: read(folder) for key, read in FOLDER_HASHES.items()}
    changed = [key for key, value in hashes.items() if conversations.get(key, value) != value]
    if changed:
        raise CacheIntegrityError(
            f"target.name={config.target.name!r}: {', '.join(changed)} of {folder} are not those of the target that "
            "wrote the conversations. Point target.name at that folder, or regenerate into another data.root."
        )
    return {
        **kept,
        "generated_by": conversations["backend"],
        "captured_by": config.data.capturer,
        "conversations": sha256_json(conversations),
        **{f"capture_{key}": value for key, value in hashes.items()},
        "capture_dtype": config.target.dtype,
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "tap_convention": TAP_CONVENTION,
        "tap_streams": STREAM_RULE,
        "hidden_size": config.target.hidden_size,
        "vocab_size": config.target.vocab_size,
        "cache_dtype": config.data.store.dtype,
        "teacher_top_k": config.data.teacher_top_k,
        "teacher_norm": TEACHER_NORM,
    }


class FailedRows:
    """Rows that failed for good, in ``capture/failures.jsonl``: one JSON object a line.

    Jobs share the file: each reads it anew before it changes it, one at a time.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FAILURES_FILE
        self.rows = self._read()

    def _read(self) -> dict[str, RowFailure]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        try:
            found = [RowFailure(**json.loads(line)) for line in text.splitlines()]
        except (ValueError, TypeError) as error:
            raise CacheIntegrityError(
                f"{self._path}: not a list of failed rows ({error}). Remove it; the rows it named are captured again."
            ) from error
        return {failure.row_id: failure for failure in found}

    def __contains__(self, row_id: str) -> bool:
        return row_id in self.rows

    def add(self, failure: RowFailure) -> None:
        """List a row, on the disk before this returns."""
        with alone_in(self._path.parent):
            self.rows = {**self._read(), failure.row_id: failure}
            self._write()

    def forget(self, row_ids: set[str]) -> None:
        """Take rows off the list that are about to be tried again."""
        if self.rows.keys() & row_ids:
            with alone_in(self._path.parent):
                self.rows = {name: failure for name, failure in self._read().items() if name not in row_ids}
                self._write()

    def check(self, share: float, total: int) -> None:
        """End the stage if too many of ``total`` rows failed.

        Raises:
            CacheIntegrityError: more than ``share`` of them; names the first causes.
        """
        if len(self.rows) <= share * total:
            return
        first = "; ".join(f"{failure.row_id}: {failure.reason}" for failure in list(self.rows.values())[:3])
        raise CacheIntegrityError(
            f"data.max_failed_share={share}: {len(self.rows)} of {total} conversations could not be captured, as "
            f"{first}. All of them: {self._path}. Mend the cause and run stage=capture again."
        )

    def _write(self) -> None:
        lines = (json.dumps(asdict(failure), ensure_ascii=False) + "\n" for failure in self.rows.values())
        atomic_write_text(self._path, "".join(lines))


@dataclass(kw_only=True)
class _Plan:
    """What is left to capture."""

    shards: list[int]  # of this job
    rows: int  # kept rows of all shards, captured or not, whichever job they fall to
    tokens: int  # of the shards that are left


def capture(config: RunConfig, folder: Path, open_progress: OpenProgress) -> CaptureTotals:
    """Capture every conversation shard of this job that has no sound capture shard; starts no engine if there is none.

    Args:
        config: the experiment.
        folder: the target's folder.
        open_progress: gives the progress display.

    Raises:
        CacheIntegrityError: no conversations, a cache of other settings, or states that do not fit their tokens.
        ConfigError: the disk is too small.
    """
    check_taps(config.drafter.target_layer_ids, config.target.num_layers)
    root = absolute(config.data.root)
    store = ConversationStore(root)
    writer = CaptureWriter(root / CAPTURE, CaptureManifest(content=capture_content(config, store.content())))
    failures = FailedRows(root / CAPTURE)
    plan = _plan(store, writer, failures, job_of(config.data))
    totals = CaptureTotals(skipped_shards=len(writer.existing_shards()))
    failures.check(config.data.max_failed_share, plan.rows)
    if plan.shards:
        need_space(root, plan.tokens * token_bytes(config))
        started = time.monotonic()
        logger.info("starting %s to capture %d tokens", config.data.capturer, plan.tokens)
        with closing(open_capturer(config, folder)) as backend:
            check_backend(backend, config.target.vocab_size)
            totals.start_seconds = time.monotonic() - started
            with open_progress("captured tokens", plan.tokens, 0) as progress:
                _Stage(config, store, writer, failures, plan, totals).run(backend, progress)
    totals.failed = len(failures.rows)
    return totals


def _kept(store: ConversationStore, index: int, columns: Sequence[str] = ROW_COLUMNS) -> list[dict[str, Any]]:
    """Rows of a conversation shard that are to be captured, in order."""
    return [row for row in store.read(index, [*columns, "dropped"]) if not row["dropped"]]


def _plan(store: ConversationStore, writer: CaptureWriter, failures: FailedRows, job: Job) -> _Plan:
    """Shards of ``job`` that are not there. Reads one conversation shard at a time.

    Raises:
        CacheIntegrityError: a shard of it that is there lacks a kept row that is not listed as failed.
    """
    plan = _Plan(shards=[], rows=0, tokens=0)
    present = writer.existing_shards()
    for index in store.shards():
        mine = job.owns_shard(index)
        rows = _kept(store, index, ROW_COLUMNS if mine and index not in present else ["row_id"])
        plan.rows += len(rows)
        names = {row["row_id"] for row in rows}
        if not mine:
            continue
        if index in present:
            missing = [name for name in sorted(names - set(writer.sample_ids(index))) if name not in failures]
            if missing:
                raise CacheIntegrityError(
                    f"{writer.root / shard_name(index)}: {len(missing)} of its conversations, as {missing[0]}, are "
                    f"neither in it nor in {FAILURES_FILE}. Remove that file to capture the shard again."
                )
        elif rows:
            failures.forget(names)
            plan.shards.append(index)
            plan.tokens += sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    return plan


class _Stage:
    """One run over the shards that are left."""

    def __init__(
        self,
        config: RunConfig,
        store: ConversationStore,
        writer: CaptureWriter,
        failures: FailedRows,
        plan: _Plan,
        totals: CaptureTotals,
    ) -> None:
        self._max_failed, self._store, self._writer = config.data.max_failed_share, store, writer
        self._failures, self._plan, self._totals = failures, plan, totals
        self._place: dict[str, int] = {}  # row id -> shard, of rows that are neither captured nor given up
        self._left: Counter[int] = Counter()  # shard -> such rows
        self._groups: defaultdict[int, list[CapturedSample]] = defaultdict(list)  # shard -> its samples so far

    def run(self, backend: CaptureBackend, progress: StageProgress) -> None:
        """Capture, and write every shard with its last row."""
        totals, started = self._totals, time.monotonic()

        def beat() -> None:
            seconds = time.monotonic() - started
            progress.update(totals.tokens, f"{totals.tokens / max(seconds, 1e-9):.0f} tokens/s")

        samples = capture_rows(backend, self._rows(), on_failure=self._fail, tally=totals.tally, heartbeat=beat)
        for sample in samples:
            self._groups[self._place[sample.sample_id]].append(sample)
            totals.samples += 1
            totals.tokens += len(sample)
            totals.supervised += int(sample.loss_mask.sum())
            self._settle(sample.sample_id)
            beat()
        totals.seconds = time.monotonic() - started

    def _rows(self) -> Iterator[dict[str, Any]]:
        for index in self._plan.shards:
            rows = _kept(self._store, index)
            self._place.update((row["row_id"], index) for row in rows)
            self._left[index] = len(rows)
            yield from rows

    def _fail(self, failure: RowFailure) -> None:
        logger.warning("conversation %s is left out: %s", failure.row_id, failure.reason)
        self._failures.add(failure)
        self._failures.check(self._max_failed, self._plan.rows)
        self._settle(failure.row_id)

    def _settle(self, row_id: str) -> None:
        """A row is captured or given up; write its shard if it was the last one."""
        shard = self._place.pop(row_id)
        self._left[shard] -= 1
        if self._left[shard]:
            return
        del self._left[shard]
        samples = self._groups.pop(shard, [])
        if samples:
            self._totals.num_bytes += self._writer.write_shard(shard, samples).num_bytes
