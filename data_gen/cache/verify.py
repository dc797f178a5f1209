"""Look at a cache: is every shard whole, are its numbers possible, and are its tokens those of the conversations?

Faults are gathered by shard, since a shard is what is set aside and made again. A few of them are chance (a bad block,
a careless copy); many have a cause that making them again would repeat. So setting aside has a budget, beyond
which nothing is moved and the first causes are told.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import (
    MANIFEST_FILE,
    CacheIntegrityError,
    CapturedSample,
    CaptureManifest,
    ShardRow,
    shard_index,
)
from data_gen.cache.fp8 import largest_magnitudes
from data_gen.cache.index import IndexState, append_index, append_removal, compare_index
from data_gen.cache.quarantine import quarantine
from data_gen.cache.shard_file import ShardReader, check_sample
from dflash2_train.config import StoreConfig

logger = logging.getLogger(__name__)
MASS_SLACK = 0.02  # rounding of k float16 log probabilities
LISTED_FAULTS = 5  # a shard; the rest is counted
OnBytes = Callable[[int], None]  # called with the bytes looked at since the last call


@dataclass(kw_only=True)
class VerifyReport:
    """Totals of the shards that were read. ``faults`` is empty for a cache that may be used."""

    shards: int = 0  # that the cache should hold
    read: int = 0  # of these
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    num_bytes: int = 0
    duplicates: int = 0  # samples whose tokens equal an earlier sample's
    compared: int = 0  # samples whose tokens were compared with their conversation
    without_states: int = 0  # conversations to capture, of the shards read, that are not in them
    in_top_k: int = 0  # supervised tokens among the teacher's stored ones
    argmax: int = 0  # supervised tokens that are the teacher's first choice
    faults: dict[str, list[str]] = field(default_factory=dict)  # by shard
    quarantined: list[str] = field(default_factory=list)

    @property
    def left(self) -> dict[str, list[str]]:
        """Faults of shards that are still in the cache."""
        return {name: faults for name, faults in self.faults.items() if name not in self.quarantined}

    def add(self, shard: str, fault: str) -> None:
        """Note a fault of a shard."""
        self.faults.setdefault(shard, []).append(fault)

    def to_dict(self) -> dict[str, Any]:
        """Totals and shares as a JSON value."""
        supervised = max(self.supervised, 1)
        shares = {"in_top_k_share": self.in_top_k / supervised, "argmax_share": self.argmax / supervised}
        return {**vars(self), **shares}


def teacher_hits(sample: CapturedSample) -> tuple[int, int, int]:
    """Of a sample's supervised tokens: how many, how many in the teacher's top-k, how many its first choice.

    Token i + 1 is judged by teacher row i; the first token of a sample has no row before it.
    """
    return label_hits(sample.input_ids, sample.loss_mask, sample.teacher_ids)


def label_hits(input_ids: Tensor, loss_mask: Tensor, teacher_ids: Tensor) -> tuple[int, int, int]:
    """:func:`teacher_hits` of a sample's ids [S], mask [S] bool and teacher ids [S, k], without its states."""
    supervised = loss_mask[1:]
    wanted = input_ids[1:][supervised]  # [M]
    ids = teacher_ids[:-1][supervised]  # [M, k]
    matches = ids == wanted[:, None]
    return int(wanted.shape[0]), int(matches.any(dim=-1).sum()), int(matches[:, 0].sum())


def sample_faults(sample: CapturedSample, manifest: CaptureManifest) -> list[str]:
    """What is wrong with one sample's values; shapes are checked elsewhere."""
    faults = []
    ids, vocab_size = sample.input_ids, manifest.content["vocab_size"]
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        faults.append("token ids outside the vocabulary")
    if bool((largest_magnitudes(sample.tap_hidden, manifest.num_taps) == 0).any()):
        faults.append("all-zero tap states")
    rows = sample.loss_mask.clone()
    rows[:-1] |= sample.loss_mask[1:]  # rows that must hold a teacher
    logprobs = sample.teacher_logprobs[rows].float()  # [M, k]
    if not bool(torch.isfinite(sample.teacher_log_normaliser).all()) or bool(logprobs.isnan().any()):
        faults.append("teacher values that are not finite")
    elif bool((logprobs.exp().sum(dim=-1) > 1 + MASS_SLACK).any()) or bool((logprobs[:, 0] == -torch.inf).any()):
        faults.append("teacher rows that are no distribution")
    elif bool((logprobs.diff(dim=-1) > 0).any()):
        faults.append("teacher rows that are not in descending order")
    teacher = sample.teacher_ids[rows]
    if bool(((teacher < 0) | (teacher >= vocab_size)).any()):
        faults.append("teacher ids outside the vocabulary")
    return faults


def text_fault(sample: CapturedSample, row: dict[str, Any]) -> str:
    """How a sample's tokens differ from its conversation; empty if they do not."""
    prompt, wanted = len(row["prompt_ids"]), [*row["prompt_ids"], *row["completion_ids"]]
    if len(wanted) != len(sample):
        return f"{len(sample)} tokens, its conversation has {len(wanted)}"
    if sample.input_ids.tolist() != wanted:
        return "foreign tokens: they are not those of its conversation"
    if bool(sample.loss_mask[:prompt].any()):
        return "prompt tokens that are supervised"
    return ""


def choose_shards(names: Sequence[str], share: float, seed: int) -> list[str]:
    """The share of the shards to read, at least one, in order; drawn by ``seed``."""
    count = min(len(names), max(1, math.ceil(share * len(names)))) if names else 0
    chosen = set(random.Random(f"{seed}/verify").sample(list(names), count))  # noqa: S311 - a sample, not a secret
    return [name for name in names if name in chosen]


def _repetitions(rows: Mapping[str, ShardRow]) -> list[tuple[str, str, str]]:
    """Every sample id that occurs again: the shard that had it before, the one that repeats it, and the id."""
    owners: dict[str, str] = {}
    found = []
    for name, row in rows.items():
        for sample_id in row.sample_ids:
            if sample_id in owners:
                found.append((owners[sample_id], name, sample_id))
            else:
                owners[sample_id] = name
    return found


class StoreVerifier:
    """Checks the cache under ``root``.

    Args:
        root: the ``capture`` folder.
        settings: share, budget, and whether to set aside.
        conversations: what the cache was captured from; None leaves the comparison of tokens out.

    Raises:
        CacheIntegrityError: no manifest, or no shard.
    """

    def __init__(self, root: Path, settings: StoreConfig, conversations: ConversationStore | None) -> None:
        self.root, self.settings, self.conversations = root, settings, conversations
        self.manifest = CaptureManifest.read(root / MANIFEST_FILE)
        self.state: IndexState = compare_index(root, self.manifest)
        self._rows = self.state.rows
        self.chosen = choose_shards(list(self._rows), settings.verify_share, settings.verify_seed)
        if not (self._rows or self.state.damaged or self.state.missing):
            raise CacheIntegrityError(f"{root}: holds no shard. Run dflash2-gen-data stage=capture first.")
        self._seen: set[bytes] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(self._rows[name].num_bytes for name in self.chosen)

    def run(self, on_bytes: OnBytes) -> VerifyReport:
        """Read the chosen shards, add lines that the index lacks, and set faulty shards aside if told to."""
        append_index(self.root, *self.state.found.values())
        state = self.state
        report = VerifyReport(shards=len(self._rows) + len(state.damaged) + len(state.missing), read=len(self.chosen))
        for name in state.missing:
            report.add(name, "stands in the index but is gone")
        for name, reason in state.damaged.items():
            report.add(name, reason)
        for name in self.chosen:
            try:
                self._check_shard(name, report, on_bytes)
            except CacheIntegrityError as error:
                report.add(name, str(error))
        self._find_repeated(report)
        if report.faults and self.settings.quarantine:
            self._set_aside(report)
        return report

    def _find_repeated(self, report: VerifyReport) -> None:
        """Sample ids must be unique over the whole cache; of two shards with one id the later is at fault.

        Judged by the files: where the lines of the index repeat an id, shards that were not read are asked for theirs.
        """
        suspects = {name for pair in _repetitions(self._rows) for name in pair[:2]}
        for name in sorted(suspects - set(self.chosen), key=shard_index):
            try:
                self._trust_file(ShardReader(self.root / name, self.manifest).row(), report)
            except CacheIntegrityError as error:
                report.add(name, str(error))
        for _, name, sample_id in _repetitions(self._rows):
            report.add(name, f"sample id {sample_id} occurs more than once")

    def _check_shard(self, name: str, report: VerifyReport, on_bytes: OnBytes) -> None:
        shard = ShardReader(self.root / name, self.manifest)
        row: ShardRow = shard.row()
        shard.check_content(on_bytes)
        self._trust_file(row, report)
        rows = self._conversations_of(name)
        for place in range(len(shard)):
            sample = shard.read(place)
            for fault in self._faults_of(sample, rows, report):
                report.add(name, f"sample {sample.sample_id}: {fault}")
            self._count(sample, report)
            on_bytes(0)
        report.num_bytes += row.num_bytes
        if rows is not None:
            report.without_states += len(rows.keys() - set(shard.sample_ids))

    def _trust_file(self, row: ShardRow, report: VerifyReport) -> None:
        """The shard's file is whole, so where its line in the index says something else the line is wrong."""
        if row == self._rows[row.shard]:
            return
        self._rows[row.shard] = row
        if self.settings.quarantine:
            append_index(self.root, row)
            logger.warning("%s: its line in the index was wrong and is corrected", row.shard)
        else:
            report.add(row.shard, "the index says something else of it than the file itself")

    def _faults_of(
        self, sample: CapturedSample, rows: dict[str, dict[str, Any]] | None, report: VerifyReport
    ) -> list[str]:
        try:
            check_sample(sample, self.manifest)
        except CacheIntegrityError as error:
            return [str(error)]
        faults = sample_faults(sample, self.manifest)
        if rows is not None:
            row = rows.get(sample.sample_id)
            fault = "no conversation of this shard has its id" if row is None else text_fault(sample, row)
            faults += [fault] if fault else []
            report.compared += 1
        return faults

    def _conversations_of(self, name: str) -> dict[str, dict[str, Any]] | None:
        """Conversations whose states belong into a shard, by row id; None if there are none to compare with."""
        if self.conversations is None:
            return None
        index = shard_index(name)
        if not self.conversations.path(index).exists():
            return {}
        rows = self.conversations.read(index, ["row_id", "prompt_ids", "completion_ids", "dropped"])
        return {row["row_id"]: row for row in rows if not row["dropped"]}

    def _count(self, sample: CapturedSample, report: VerifyReport) -> None:
        supervised, inside, first = teacher_hits(sample)
        report.samples += 1
        report.tokens += len(sample)
        report.supervised += supervised
        report.in_top_k += inside
        report.argmax += first
        key = xxhash.xxh3_128_digest(sample.input_ids.numpy().tobytes())
        report.duplicates += key in self._seen
        self._seen.add(key)

    def _set_aside(self, report: VerifyReport) -> None:
        """Move the faulty shards, if they are no more than the budget allows."""
        settings, faulty = self.settings, list(report.faults)
        looked_at = report.read + len(self.state.damaged) + len(self.state.missing)
        allowed = max(settings.max_damaged, int(settings.max_damaged_share * looked_at))
        if len(faulty) > allowed:
            causes = "\n  ".join(f"{name}: {report.faults[name][0]}" for name in faulty[:LISTED_FAULTS])
            raise CacheIntegrityError(
                f"{self.root}: {len(faulty)} of {looked_at} shards are faulty, more than the {allowed} that "
                f"data.store.max_damaged={settings.max_damaged} and max_damaged_share={settings.max_damaged_share} "
                f"allow, so nothing was moved. First causes:\n  {causes}\n"
                "Find the cause (disk, other settings, another capture into this folder); then raise the budget, or "
                "capture again into another data.root."
            )
        for name in faulty:
            if (self.root / name).exists():
                quarantine(self.root, name, report.faults[name])
            else:
                append_removal(self.root, name)
            report.quarantined.append(name)
