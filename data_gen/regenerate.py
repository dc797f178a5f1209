"""Stage ``regenerate``: the target answers every training prompt, and the answers go to disk as the engine gave them.

A further run answers only what no shard holds, and refuses to under other settings: those that shape content stand in
the manifest. Whatever ends a run in order, Ctrl-C included, writes the finished answers first; a run that is killed
loses those of unfinished shards and nothing else, and they are answered again.

Hold-out prompts are never answered here. They are stored as prompts (``holdout.jsonl``) for the evaluation.
"""

from __future__ import annotations

import logging
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_gen.backends import open_generator
from data_gen.backends.base import GenerateBackend
from data_gen.cache.conversations import ConversationStore, KeySet
from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.jobs import Job, alone_in, hold_job, key64
from data_gen.ledger import FAILED, LEDGER_FILES, SKIPPED, Ledger
from data_gen.prepare import PreparedPrompts, job_of, write_holdout
from data_gen.turns import row_id, turn_points
from data_gen.workload import WorkList, Workload
from dflash2_train.config import ConfigError, RunConfig, absolute

logger = logging.getLogger(__name__)
BYTES_A_ROW = 8192  # generous guess of a row in Parquet, for the check of free space


class StageProgress(Protocol):
    """Where a stage says how far it is."""

    def update(self, done: int, facts: str = "") -> None:
        """``done`` units are finished."""
        ...


OpenProgress = Callable[[str, int, int], Any]  # title, total, done before -> context manager giving a StageProgress


@dataclass(kw_only=True)
class ConversationTotals:
    """Counts over every row on disk, of all jobs, and what this run did."""

    prompts: int = 0  # whose first turn is answered
    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut: int = 0  # ended for length
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows kept out of the capture
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> later turns that cannot be asked
    failed: Counter[str] = field(default_factory=Counter)  # reason -> rows that have no answer yet
    dead: int = 0  # of these, given up
    new_completions: int = 0  # written by this run
    new_tokens: int = 0
    seconds: float = 0.0  # of this run, engine start left out
    start_seconds: float = 0.0


def need_space(folder: Path, wanted: int) -> None:
    """Refuse to start what will not fit.

    Raises:
        ConfigError: the file system has less than ``wanted`` bytes free.
    """
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise ConfigError(
            f"data.root={str(folder)!r}: about {wanted / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free. "
            "Free space, choose another data.root, or use fewer prompts."
        )


def read_stored(store: ConversationStore, totals: ConversationTotals) -> KeySet:
    """Ids of all rows on disk; adds the rows up in ``totals``.

    Raises:
        CacheIntegrityError: a damaged shard, or a row that is there twice.
    """
    keys = array("Q")
    for facts in store.facts():
        keys.extend(map(key64, facts.row_id))
        totals.prompts += list(zip(facts.repeat, facts.turn, strict=True)).count((0, 0))
        totals.completions += len(facts.row_id)
        totals.prompt_tokens += sum(facts.num_prompt_tokens)
        totals.completion_tokens += sum(facts.num_completion_tokens)
        totals.cut += facts.finish_reason.count("length")
        totals.dropped.update(reason for reason in facts.dropped if reason)
    stored = KeySet(keys)
    if stored.repeated():
        raise CacheIntegrityError(
            f"{store.folder}: {stored.repeated()} answers are stored twice, so shards were copied or two "
            "processes wrote here without a common file system lock. Remove the copies, or use another data.root."
        )
    return stored


def refuse_foreign(stored: KeySet, prepared: PreparedPrompts, repeats: int, turns: str) -> None:
    """Refuse answers that no configured prompt asks for, whichever job it falls to.

    Raises:
        ConfigError: there are some.
    """
    foreign = stored.count_outside(
        row_id(record.prompt_id, repeat, turn)
        for record in prepared.plan.train
        for turn in range(len(turn_points(record.messages, turns)))
        for repeat in range(repeats)
    )
    if foreign:
        raise ConfigError(
            f"data.train_prompts: {foreign} answers on disk belong to no configured prompt, or to more repeats of it "
            f"than data.sampling.repeats={repeats}. Set the sources and the repeats back, or choose another data.root."
        )


def list_work(config: RunConfig, prepared: PreparedPrompts, store: ConversationStore, ledger: Ledger) -> WorkList:
    """What this job has still to answer; with ``data.retry_failed`` also what was given up.

    Raises:
        CacheIntegrityError: see :func:`read_stored`.
        ConfigError: see :func:`refuse_foreign`.
    """
    stored = read_stored(store, ConversationTotals())
    repeats, turns = config.data.sampling.repeats, config.data.turns
    refuse_foreign(stored, prepared, repeats, turns)
    if config.data.retry_failed:
        logger.info("%d answers that were given up are tried again", ledger.reopen_dead())
    return WorkList(prepared.train, repeats, turns, stored, ledger)


def regenerate(config: RunConfig, prepared: PreparedPrompts, open_progress: OpenProgress) -> ConversationTotals:
    """Answer every turn of this job that is not answered yet; does not start an engine if there is none.

    Raises:
        CacheIntegrityError: conversations of other settings are there, or damaged ones.
        ConfigError: they belong to other prompts, or the disk is too small.
        JobBusyError: another process is at work on the same rows.
        TooManyFailuresError: too many requests were not answered; those that were are stored.
    """
    root = absolute(config.data.root)
    job = job_of(config.data)
    store = ConversationStore(root)
    store.folder.mkdir(parents=True, exist_ok=True)
    with hold_job(store.folder, job):
        store.open(prepared.content, job)
        with alone_in(store.folder):  # every job of an array has the same one to write
            write_holdout(root, prepared.holdout)
        totals = ConversationTotals()
        with Ledger(store.folder, job, config.data.max_attempts) as ledger:
            work = list_work(config, prepared, store, ledger)
            if work.turns_left:
                need_space(root, work.turns_left * BYTES_A_ROW)
                _answer(config, prepared, work, store, ledger, job, open_progress, totals)
            return _add_up(store, ledger, totals)


def _answer(
    config: RunConfig,
    prepared: PreparedPrompts,
    work: WorkList,
    store: ConversationStore,
    ledger: Ledger,
    job: Job,
    open_progress: OpenProgress,
    totals: ConversationTotals,
) -> None:
    """Start the engine and take its answers in."""
    import datasets  # noqa: F401 - loaded now: at the first shard it would hold the engine up for half a second

    data = config.data
    workload = Workload(
        prepared,
        work,
        store,
        ledger,
        numbers=job.free_numbers(set(store.shards())),
        shard_size=data.conversations_per_shard,
        max_prompt_tokens=data.max_prompt_tokens,
        max_failed_share=data.max_failed_share,
    )
    started = time.monotonic()
    logger.info("starting %s to write %d answers", data.backend, work.turns_left)
    backend = open_generator(config, prepared.folder, prepared.sampling)
    totals.start_seconds = time.monotonic() - started
    try:
        with open_progress("answers", work.turns_done + work.turns_left, work.turns_done) as progress:
            drive(backend, workload, work.turns_done, progress, totals)
    finally:
        backend.close()


def drive(
    backend: GenerateBackend, workload: Workload, before: int, progress: StageProgress, totals: ConversationTotals
) -> None:
    """Take results in until the engine has none left; ``before`` turns were settled by earlier runs."""
    counts = workload.counts
    started = time.monotonic()

    def beat() -> None:
        seconds = time.monotonic() - started
        facts = f"{counts.tokens / max(seconds, 1e-9):.0f} tokens/s" if counts.tokens else "first answers"
        if counts.failed:
            facts += f", {counts.failed.total()} failed"
        progress.update(before + counts.settled, facts)

    try:
        for result in backend.generate(workload.take, beat):
            workload.settle(result)
            beat()
        workload.finish()
    finally:
        workload.flush()
        totals.new_completions, totals.new_tokens = counts.answers, counts.tokens
        totals.seconds = time.monotonic() - started


def _add_up(store: ConversationStore, ledger: Ledger, totals: ConversationTotals) -> ConversationTotals:
    """Count every row on disk and everything that the ledger knows."""
    stored = read_stored(store, totals)
    missing = [entry for entry in ledger.entries(FAILED) if entry.row_id not in stored]
    totals.failed = Counter(entry.reason for entry in missing)
    totals.dead = sum(ledger.is_dead(entry.row_id) for entry in missing)
    totals.skipped = Counter(entry.reason for entry in ledger.entries(SKIPPED))
    if missing:
        logger.warning(
            "%d answers failed so far; which and why stands in %s", len(missing), store.folder / LEDGER_FILES
        )
    return totals
