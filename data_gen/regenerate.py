"""Stage ``regenerate``: the target answers every training prompt, and the answers go to disk as the engine gave them.

Shards hold one row a (prompt, repeat), see ``data_gen.cache.conversations``. All work is queued at once; a shard is
written the moment its last answer is there, under a temporary name first, so a run killed at any time loses unfinished
shards and nothing else. A further run answers only what no shard holds, and refuses to under other settings: those
that shape content stand in the manifest.

Hold-out prompts are never answered here. They are stored as prompts (``holdout.jsonl``) for the evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_gen.backends import open_generator
from data_gen.backends.base import Completion, GenerateBackend, GenerationRequest, SamplingSettings
from data_gen.backends.folder import end_ids, find_target
from data_gen.cache.conversations import ConversationStore
from data_gen.chat import ChatRenderer, PromptRefusedError
from data_gen.prompts import PromptPlan, PromptRecord, plan_prompts
from dflash2_train.config import ConfigError, RunConfig, absolute
from dflash2_train.provenance import atomic_write_text, hash_model_folder

logger = logging.getLogger(__name__)
HOLDOUT_FILE = "holdout.jsonl"
BYTES_A_ROW = 8192  # generous guess of a row in Parquet, for the check of free space


class StageProgress(Protocol):
    """Where a stage says how far it is."""

    def update(self, done: int, facts: str = "") -> None:
        """``done`` units are finished."""
        ...


OpenProgress = Callable[[str, int, int], Any]  # title, total, done before -> context manager giving a StageProgress


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """A prompt as token ids."""

    record: PromptRecord
    prompt_ids: list[int]


@dataclass(kw_only=True)
class PreparedPrompts:
    """Everything known before the engine starts."""

    folder: Path
    plan: PromptPlan
    train: list[PromptTokens]
    holdout: list[PromptTokens]
    rejected: Counter[str] = field(default_factory=Counter)  # reason -> training prompts
    content: dict[str, Any]  # what shapes the conversations
    sampling: SamplingSettings
    renderer: ChatRenderer


@dataclass(kw_only=True)
class ConversationTotals:
    """Counts over every row on disk."""

    prompts: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut: int = 0  # ended for length
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows kept out of the capture
    new_completions: int = 0  # written by this run
    new_tokens: int = 0
    seconds: float = 0.0  # of this run, engine start left out
    start_seconds: float = 0.0


def row_id(prompt_id: str, repeat: int) -> str:
    """Name of one answer: of its request, its row and its captured sample."""
    return f"{prompt_id}-{repeat}"


def row_seed(seed: int, prompt_id: str, repeat: int) -> int:
    """Seed of one answer, 32 bits, from these three alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}:{repeat}".encode()).digest()[:4], "big")


def prepare(config: RunConfig) -> PreparedPrompts:
    """Plan, render and tokenise all prompts.

    Raises:
        ConfigError: no target folder, no template, or no prompt left.
    """
    folder = find_target(config.target)
    data = config.data
    renderer = ChatRenderer.open(
        folder, enable_thinking=data.enable_thinking, trust_remote_code=config.target.trust_remote_code
    )
    plan = plan_prompts(data)
    rejected: Counter[str] = Counter()
    train = list(_tokenise(plan.train, renderer, data.max_prompt_tokens, rejected))
    holdout = list(_tokenise(plan.holdout, renderer, data.max_prompt_tokens, Counter()))
    if not train:
        raise ConfigError(
            f"data.max_prompt_tokens={data.max_prompt_tokens}: none of {len(plan.train)} prompts is left "
            f"({dict(rejected)}). Raise the limit or fix the prompts."
        )
    sampling = SamplingSettings(
        temperature=data.sampling.temperature,
        top_p=data.sampling.top_p,
        top_k=data.sampling.top_k,
        max_tokens=data.sampling.max_tokens,
        stop_ids=end_ids(folder),
    )
    content = {
        "target": config.target.name,
        "revision": config.target.revision,
        "target_hash": hash_model_folder(folder),
        "tokenizer_hash": renderer.tokenizer_hash,
        "chat_template_hash": renderer.template_hash,
        "enable_thinking": data.enable_thinking,
        "dtype": config.target.dtype,
        "backend": data.backend,
        "sampling": {**dataclasses.asdict(sampling), "seed": data.sampling.seed},
        "max_prompt_tokens": data.max_prompt_tokens,
        "drop_cut": data.drop_cut,
        "holdout_hashes": plan.holdout_hashes,
    }
    return PreparedPrompts(
        folder=folder,
        plan=plan,
        train=train,
        holdout=holdout,
        rejected=rejected,
        content=content,
        sampling=sampling,
        renderer=renderer,
    )


def _tokenise(
    records: Sequence[PromptRecord], renderer: ChatRenderer, limit: int, rejected: Counter[str]
) -> Iterator[PromptTokens]:
    for record in records:
        try:
            ids = renderer.prompt_ids(record.messages)
        except PromptRefusedError as error:
            rejected[str(error)] += 1
            continue
        if len(ids) > limit:
            rejected[f"longer than data.max_prompt_tokens={limit}"] += 1
            continue
        yield PromptTokens(record=record, prompt_ids=ids)


def drop_reason(completion: Completion, *, drop_cut: bool) -> str:
    """Why an answer is not trained on; empty if it is."""
    if not completion.completion_ids:
        return "empty answer"
    if completion.finish_reason not in ("stop", "length"):
        return f"ended by {completion.finish_reason}"
    return "cut by max_tokens" if drop_cut and completion.finish_reason == "length" else ""


def _make_row(
    prompt: PromptTokens, repeat: int, seed: int, done: Completion, prepared: PreparedPrompts
) -> dict[str, Any]:
    content, record = prepared.content, prompt.record
    return {
        "row_id": row_id(record.prompt_id, repeat),
        "prompt_id": record.prompt_id,
        "repeat": repeat,
        "messages": json.dumps(record.messages, ensure_ascii=False),
        "source": record.source,
        "license": record.license,
        "prompt_ids": prompt.prompt_ids,
        "completion_ids": done.completion_ids,
        "completion_text": prepared.renderer.tokenizer.decode(done.completion_ids),
        "finish_reason": done.finish_reason,
        "dropped": drop_reason(done, drop_cut=bool(content["drop_cut"])),
        "seed": seed,
        **dataclasses.asdict(prepared.sampling),
        **{key: content[key] for key in ("target", "revision", "target_hash", "enable_thinking")},
    }


@dataclass(kw_only=True)
class _Shard:
    """Rows of a shard in the making, in their final order."""

    index: int
    work: list[tuple[PromptTokens, int]]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


def plan_shards(
    prompts: Sequence[PromptTokens], repeats: int, done: set[str], taken: set[int], size: int
) -> list[_Shard]:
    """Cut what is not done into shards of ``size``, numbered by the lowest free numbers.

    First answers of all prompts come before second ones, so that a run cut short has seen every prompt.

    Raises:
        ConfigError: answers on disk belong to prompts that are no longer configured.
    """
    wanted = [(prompt, repeat) for repeat in range(repeats) for prompt in prompts]
    unknown = done - {row_id(prompt.record.prompt_id, repeat) for prompt, repeat in wanted}
    if unknown:
        raise ConfigError(
            f"data.train_prompts: {len(unknown)} answers on disk, as {min(unknown)}, belong to no configured prompt. "
            "Set the sources and data.sampling.repeats back, or choose another data.root."
        )
    left = [(prompt, repeat) for prompt, repeat in wanted if row_id(prompt.record.prompt_id, repeat) not in done]
    free = (number for number in itertools.count() if number not in taken)
    return [_Shard(index=next(free), work=left[begin : begin + size]) for begin in range(0, len(left), size)]


def write_holdout(root: Path, prompts: Sequence[PromptTokens]) -> None:
    """Store the hold-out as prompts: id, source, licence, messages, ids."""
    lines = [
        {
            "prompt_id": prompt.record.prompt_id,
            "source": prompt.record.source,
            "license": prompt.record.license,
            "messages": prompt.record.messages,
            "prompt_ids": prompt.prompt_ids,
        }
        for prompt in prompts
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = root / HOLDOUT_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        atomic_write_text(path, text)


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


def regenerate(config: RunConfig, prepared: PreparedPrompts, open_progress: OpenProgress) -> ConversationTotals:
    """Answer every prompt that is not answered yet; does not start an engine if there is none.

    Raises:
        CacheIntegrityError: conversations of other settings are there.
        ConfigError: they belong to other prompts, or the disk is too small.
    """
    root = absolute(config.data.root)
    store = ConversationStore(root)
    store.open(prepared.content)
    write_holdout(root, prepared.holdout)
    present = store.shards()
    done = {row["row_id"] for index in present for row in store.read(index, ["row_id"])}
    shards = plan_shards(
        prepared.train, config.data.sampling.repeats, done, set(present), config.data.conversations_per_shard
    )
    totals = ConversationTotals()
    left = sum(len(shard.work) for shard in shards)
    if left:
        need_space(root, left * BYTES_A_ROW)
        started = time.monotonic()
        logger.info("starting %s to write %d answers", config.data.backend, left)
        backend = open_generator(config, prepared.folder, prepared.sampling)
        totals.start_seconds = time.monotonic() - started
        try:
            with open_progress("answers", left + len(done), len(done)) as progress:
                answer_all(backend, shards, prepared, store, progress, totals)
        finally:
            backend.close()
    return count_rows(store, totals)


def answer_all(
    backend: GenerateBackend,
    shards: list[_Shard],
    prepared: PreparedPrompts,
    store: ConversationStore,
    progress: StageProgress,
    totals: ConversationTotals,
) -> None:
    """Queue everything, write each shard when its last answer comes in."""
    seed = int(prepared.content["sampling"]["seed"])
    place: dict[str, tuple[_Shard, PromptTokens, int]] = {}
    requests = []
    for shard in shards:
        for prompt, repeat in shard.work:
            name = row_id(prompt.record.prompt_id, repeat)
            place[name] = (shard, prompt, repeat)
            own = row_seed(seed, prompt.record.prompt_id, repeat)
            requests.append(GenerationRequest(request_id=name, prompt_ids=prompt.prompt_ids, seed=own))
    before = sum(len(store.read(index, ["row_id"])) for index in store.shards())
    started = time.monotonic()

    def beat() -> None:
        seconds = time.monotonic() - started
        facts = f"{totals.new_tokens / max(seconds, 1e-9):.0f} tokens/s" if totals.new_tokens else "first answers"
        progress.update(before + totals.new_completions, facts)

    for done in backend.generate(requests, beat):
        shard, prompt, repeat = place.pop(done.request_id)
        own = row_seed(seed, prompt.record.prompt_id, repeat)
        shard.rows[done.request_id] = _make_row(prompt, repeat, own, done, prepared)
        totals.new_completions += 1
        totals.new_tokens += len(done.completion_ids)
        if len(shard.rows) == len(shard.work):
            order = [row_id(entry.record.prompt_id, number) for entry, number in shard.work]
            store.write(shard.index, [shard.rows[name] for name in order])
            shard.rows.clear()
        beat()
    totals.seconds = time.monotonic() - started
    if place:
        raise RuntimeError(
            f"the engine returned no answer for {len(place)} prompts, as {min(place)}; run again to retry"
        )


def count_rows(store: ConversationStore, totals: ConversationTotals) -> ConversationTotals:
    """Add up every row on disk."""
    prompts: set[str] = set()
    for index in store.shards():
        for row in store.read(index, ["prompt_id", "prompt_ids", "completion_ids", "finish_reason", "dropped"]):
            prompts.add(row["prompt_id"])
            totals.completions += 1
            totals.prompt_tokens += len(row["prompt_ids"])
            totals.completion_tokens += len(row["completion_ids"])
            totals.cut += row["finish_reason"] == "length"
            if row["dropped"]:
                totals.dropped[row["dropped"]] += 1
    totals.prompts = len(prompts)
    return totals
