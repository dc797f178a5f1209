"""Stage ``capture``: the target's tap states and next-token distribution for every conversation, into the cache.

Capture shard i holds the kept rows of conversation shard i. The ids are the stored ones; an engine that returns states
of other tokens, or of fewer, stops the stage. Two free checks run along: the teacher's first choice after the last
token must be what the engine itself would say next (the final norm was applied once, to the right layer), and a shard
counts as there only if its checksum holds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_gen.backends import open_capturer
from data_gen.backends.base import CaptureBackend, CapturedStates, CaptureRequest, check_states
from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import (
    FLOAT8,
    TEACHER_NORM,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
)
from data_gen.cache.writer import CaptureWriter
from data_gen.chat import join_turn
from data_gen.regenerate import OpenProgress, StageProgress, need_space
from dflash2_train.config import RunConfig, absolute
from dflash2_train.provenance import sha256_json
from dflash2_train.taps import TAP_CONVENTION, check_taps

logger = logging.getLogger(__name__)
CAPTURE = "capture"
TEACHER_BYTES = 4 + 2  # of one teacher entry: id and log probability
MIN_NEXT_AGREEMENT = 0.8  # bf16 ties leave a few per cent; a wrong norm or layer leaves next to nothing
JUDGED_SAMPLES = 16  # samples after which that share is judged


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
    next_equal: int = 0  # samples whose teacher says what the engine would say next


@dataclass(kw_only=True)
class _Shard:
    index: int
    requests: dict[str, CaptureRequest]  # in row order
    samples: dict[str, CapturedSample] = field(default_factory=dict)


def token_bytes(config: RunConfig) -> int:
    """Bytes of the cache a token: tap states, teacher, ids and mask."""
    taps = len(config.drafter.target_layer_ids)
    values = config.target.hidden_size * taps
    states = values + 4 * taps if config.data.store.dtype == FLOAT8 else 2 * values
    return states + TEACHER_BYTES * config.data.teacher_top_k + 4 + 4 + 1


def capture_content(config: RunConfig, conversations: dict[str, Any]) -> dict[str, Any]:
    """Everything that shapes the cache: the conversations' settings and the capture's own."""
    kept = {key: value for key, value in conversations.items() if key != "backend"}
    return {
        **kept,
        "generated_by": conversations["backend"],
        "captured_by": config.data.backend,
        "conversations": sha256_json(conversations),
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "tap_convention": TAP_CONVENTION,
        "hidden_size": config.target.hidden_size,
        "vocab_size": config.target.vocab_size,
        "cache_dtype": config.data.store.dtype,
        "teacher_top_k": config.data.teacher_top_k,
        "teacher_norm": TEACHER_NORM,
    }


def capture(config: RunConfig, folder: Path, open_progress: OpenProgress) -> CaptureTotals:
    """Capture every conversation shard that has no sound capture shard; starts no engine if there is none.

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
    content = capture_content(config, store.content())
    writer = CaptureWriter(root / CAPTURE, CaptureManifest(content=content))
    present = writer.existing_shards()
    totals = CaptureTotals(skipped_shards=len(present))
    shards = [shard for index in store.shards() if index not in present and (shard := _load(store, index)).requests]
    if not shards:
        return totals
    tokens = sum(len(request.input_ids) for shard in shards for request in shard.requests.values())
    need_space(root, tokens * token_bytes(config))
    started = time.monotonic()
    logger.info("starting %s to capture %d tokens", config.data.backend, tokens)
    backend = open_capturer(config, folder)
    totals.start_seconds = time.monotonic() - started
    try:
        with open_progress("captured tokens", tokens, 0) as progress:
            _capture_all(backend, shards, writer, progress, totals)
    finally:
        backend.close()
    return totals


def _load(store: ConversationStore, index: int) -> _Shard:
    requests = {}
    for row in store.read(index, ["row_id", "prompt_ids", "completion_ids", "dropped"]):
        if row["dropped"]:
            continue
        requests[row["row_id"]] = CaptureRequest(
            request_id=row["row_id"],
            input_ids=[*row["prompt_ids"], *row["completion_ids"]],
            first_teacher_row=len(row["prompt_ids"]) - 1,
        )
    return _Shard(index=index, requests=requests)


def _capture_all(
    backend: CaptureBackend,
    shards: list[_Shard],
    writer: CaptureWriter,
    progress: StageProgress,
    totals: CaptureTotals,
) -> None:
    place = {name: shard for shard in shards for name in shard.requests}
    started = time.monotonic()

    def beat() -> None:
        seconds = time.monotonic() - started
        progress.update(totals.tokens, f"{totals.tokens / max(seconds, 1e-9):.0f} tokens/s")

    requests = [request for shard in shards for request in shard.requests.values()]
    for states in backend.capture(requests, beat):
        shard = place.pop(states.request_id)
        request = shard.requests[states.request_id]
        check_states(request, states)
        sample = make_sample(request, states)
        shard.samples[sample.sample_id] = sample
        _count(sample, states, totals)
        if len(shard.samples) == len(shard.requests):
            written = writer.write_shard(shard.index, [shard.samples[name] for name in shard.requests])
            totals.num_bytes += written.num_bytes
            shard.samples.clear()
        beat()
    totals.seconds = time.monotonic() - started
    if place:
        raise RuntimeError(f"the engine returned no states for {len(place)} rows, as {min(place)}; run again to retry")


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


def _count(sample: CapturedSample, states: CapturedStates, totals: CaptureTotals) -> None:
    """Add a sample up; stop early if teacher and engine do not say the same."""
    totals.samples += 1
    totals.tokens += len(sample)
    totals.supervised += int(sample.loss_mask.sum())
    totals.next_equal += int(states.teacher_ids[-1, 0]) == states.next_id
    if totals.samples >= JUDGED_SAMPLES and totals.next_equal < MIN_NEXT_AGREEMENT * totals.samples:
        raise CacheIntegrityError(
            f"the teacher's first choice equals the engine's own next token for only {totals.next_equal} of "
            f"{totals.samples} samples: final norm or head of this target are not what data_gen assumes. "
            "Use data.backend=hf, which takes the model's own logits."
        )
