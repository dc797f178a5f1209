"""What is known before an engine starts: the prompts of this job, counted in tokens, and all that shapes the answers.

Ids are not kept: 450,000 prompts of 500 tokens are 8 GB as Python lists. Every prompt is rendered once here, to count
it or reject it with a reason while that costs nothing, and once more when its turn comes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_gen.backends.base import SamplingSettings
from data_gen.backends.folder import end_ids, find_target
from data_gen.cache.jobs import Job
from data_gen.chat import ChatRenderer, PromptRefusedError
from data_gen.prompts import PromptPlan, PromptRecord, plan_prompts
from data_gen.turns import turn_points
from dflash2_train.config import ConfigError, DataConfig, RunConfig
from dflash2_train.overlap import Message
from dflash2_train.provenance import atomic_write_text, hash_model_folder

logger = logging.getLogger(__name__)
HOLDOUT_FILE = "holdout.jsonl"
MAX_CAUSES = 5  # rejected prompts that an error names


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """A prompt as token ids."""

    record: PromptRecord
    prompt_ids: list[int]


@dataclass(kw_only=True)
class PromptCounts:
    """The training prompts of this job."""

    turns: int = 0  # answers wanted, for one repeat
    prompt_tokens: int = 0  # of all turns, with the source's own words as history
    rejected: Counter[str] = field(default_factory=Counter)  # reason -> prompts
    causes: list[str] = field(default_factory=list)  # the first of them, by id
    holdout_rejected: Counter[str] = field(default_factory=Counter)  # reason -> hold-out prompts left out


@dataclass(kw_only=True)
class PreparedPrompts:
    """Everything known before the engine starts."""

    folder: Path
    plan: PromptPlan
    train: Sequence[PromptRecord]  # of this job, those that can be asked, in the plan's order
    counts: PromptCounts
    holdout: list[PromptTokens]
    content: dict[str, Any]  # what shapes the conversations
    sampling: SamplingSettings
    renderer: ChatRenderer

    @property
    def rejected(self) -> Counter[str]:
        """Reason -> training prompts that cannot be asked."""
        return self.counts.rejected


def job_of(data: DataConfig) -> Job:
    """The job of the array that this process is."""
    return Job(index=data.shard_index, count=data.num_shards)


def prepare(config: RunConfig) -> PreparedPrompts:
    """Plan all prompts, render and count those of this job.

    Raises:
        ConfigError: no target folder, no template, no prompt left, or too many rejected.
    """
    folder = find_target(config.target)
    data = config.data
    renderer = ChatRenderer.open(
        folder, enable_thinking=data.enable_thinking, trust_remote_code=config.target.trust_remote_code
    )
    plan = plan_prompts(data)
    counts = PromptCounts()
    job = job_of(data)
    logger.info("rendering and counting the prompts of job %d of %d", job.index, job.count)
    train = list(keep_askable((record for record in plan.train if job.owns(record.prompt_id)), renderer, data, counts))
    refuse_rejects(len(train), counts, data)
    sampling = sampling_of(data, folder)
    return PreparedPrompts(
        folder=folder,
        plan=plan,
        train=train,
        counts=counts,
        holdout=list(_tokenise(plan.holdout, renderer, data.max_prompt_tokens, counts.holdout_rejected)),
        content=conversation_content(config, folder, renderer, sampling, plan),
        sampling=sampling,
        renderer=renderer,
    )


def sampling_of(data: DataConfig, folder: Path) -> SamplingSettings:
    """Every field that goes into a request."""
    names = [entry.name for entry in dataclasses.fields(SamplingSettings) if entry.name != "stop_ids"]
    return SamplingSettings(**{name: vars(data.sampling)[name] for name in names}, stop_ids=end_ids(folder))


def conversation_content(
    config: RunConfig, folder: Path, renderer: ChatRenderer, sampling: SamplingSettings, plan: PromptPlan
) -> dict[str, Any]:
    """All that shapes the conversations, for their manifest."""
    data = config.data
    drop = {"drop_cut": data.drop_cut, "drop_repeats": data.drop_repeats, "repeat_window": data.repeat_window}
    return {
        "target": config.target.name,
        "revision": config.target.revision,
        "target_hash": hash_model_folder(folder),
        "tokenizer_hash": renderer.tokenizer_hash,
        "chat_template_hash": renderer.template_hash,
        "enable_thinking": data.enable_thinking,
        "dtype": config.target.dtype,
        "backend": data.backend,
        "served_model": data.servers.model if data.backend == "server" else None,
        "sampling": {**dataclasses.asdict(sampling), "seed": data.sampling.seed},
        "turns": data.turns,
        "max_prompt_tokens": data.max_prompt_tokens,
        "drop": drop,
        "holdout_hashes": plan.holdout_hashes,
    }


def check_length(ids: list[int], limit: int) -> list[int]:
    """``ids``, if they are neither none nor more than ``limit``.

    Raises:
        PromptRefusedError: they are.
    """
    if not ids:
        raise PromptRefusedError("renders to no tokens")
    if len(ids) > limit:
        raise PromptRefusedError(f"longer than data.max_prompt_tokens={limit}")
    return ids


def keep_askable(
    records: Iterable[PromptRecord], renderer: ChatRenderer, data: DataConfig, counts: PromptCounts
) -> Iterator[PromptRecord]:
    """The records whose first wanted turn fits and whose every turn renders; counts tokens and the others' reasons.

    Later turns are rendered with the source's own answers, which is what the token count of a plan rests on. Whether
    they fit is only known once the target has answered.
    """
    for record in records:
        try:
            tokens, turns = _count_turns(record, renderer, data)
        except PromptRefusedError as error:
            counts.rejected[str(error)] += 1
            if len(counts.causes) < MAX_CAUSES:
                counts.causes.append(f"{record.prompt_id} from {record.source}: {error}")
            continue
        counts.turns += turns
        counts.prompt_tokens += tokens
        yield record


def _count_turns(record: PromptRecord, renderer: ChatRenderer, data: DataConfig) -> tuple[int, int]:
    points = turn_points(record.messages, data.turns)
    tokens = 0
    for number, point in enumerate(points):
        ids = renderer.prompt_ids(record.messages[:point], record.tools)
        if number == 0:
            check_length(ids, data.max_prompt_tokens)
        tokens += len(ids)
    return tokens, len(points)


def refuse_rejects(kept: int, counts: PromptCounts, data: DataConfig) -> None:
    """Stop where hardly anything, or too little, of the prompts can be asked.

    Raises:
        ConfigError: more than ``data.max_rejected_share`` is rejected, or nothing is left; names the first causes.
    """
    rejected = counts.rejected.total()
    if kept and rejected <= data.max_rejected_share * (kept + rejected):
        return
    if not kept and not rejected:
        raise ConfigError(
            f"data.num_shards={data.num_shards}: no prompt falls to job {data.shard_index}. Use fewer jobs."
        )
    causes = "\n  ".join(counts.causes)
    raise ConfigError(
        f"data.max_prompt_tokens={data.max_prompt_tokens}, data.max_rejected_share={data.max_rejected_share}: "
        f"{rejected} of {kept + rejected} prompts cannot be asked ({dict(counts.rejected)}). The first:\n  {causes}\n"
        "Fix the prompts or their source, or raise the limit that is meant."
    )


def _tokenise(
    records: Iterable[PromptRecord], renderer: ChatRenderer, limit: int, rejected: Counter[str]
) -> Iterator[PromptTokens]:
    for record in records:
        try:
            ids = check_length(renderer.prompt_ids(record.messages, record.tools), limit)
        except PromptRefusedError as error:
            rejected[str(error)] += 1
            continue
        yield PromptTokens(record=record, prompt_ids=ids)


def write_holdout(root: Path, prompts: list[PromptTokens]) -> None:
    """Store the hold-out as prompts: id, source, licence, messages, tools where there are any, ids."""
    text = "".join(json.dumps(_holdout_line(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    path = root / HOLDOUT_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        atomic_write_text(path, text)


def _holdout_line(prompt: PromptTokens) -> dict[str, Any]:
    record = prompt.record
    messages: list[Message] = record.messages
    line: dict[str, Any] = {
        "prompt_id": record.prompt_id,
        "source": record.source,
        "license": record.license,
        "messages": messages,
        "prompt_ids": prompt.prompt_ids,
    }
    return {**line, "tools": record.tools} if record.tools else line
