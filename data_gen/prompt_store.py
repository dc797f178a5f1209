"""The plan of a run on disk, so that a restarted run, or the next job of an array, meets the same prompts.

Without it every start would read the sources again, and a Hub data set that is not pinned could change in between.
``prompts.jsonl`` holds the records, ``prompts_report.json`` the report with a fingerprint of all that shapes the plan:
settings, local files (name, size, time) and the planning code. Another fingerprint means planning anew; so does a
removed report.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_gen.prompt_records import PromptPlan, PromptRecord
from data_gen.prompt_report import PromptReport
from data_gen.prompt_rows import source_files
from dflash2_train import overlap
from dflash2_train.config import DataConfig, PromptSourceConfig, absolute
from dflash2_train.provenance import atomic_write_json, publish, sha256_file, sha256_json

PROMPTS_FILE = "prompts.jsonl"
REPORT_FILE = "prompts_report.json"
PLANNING_CODE = ("prompt*.py", "near_duplicates.py", "prompt_sets/*.jsonl")  # in this package, and the overlap rules

_LOG = logging.getLogger(__name__)


def plan_fingerprint(config: DataConfig) -> str:
    """Hex sha256 of all that shapes a plan, but for what the Hub holds."""
    sources = {
        name: [dataclasses.asdict(source) for source in vars(config)[name]]
        for name in ("train_prompts", "holdout_prompts", "evaluation_prompts")
    }
    here = Path(__file__).parent
    code = {path.name: sha256_file(path) for pattern in PLANNING_CODE for path in sorted(here.glob(pattern))}
    code["overlap.py"] = sha256_file(Path(overlap.__file__))
    files = [_file_states(source) for name in sources for source in vars(config)[name]]
    limits = (config.max_prompts, config.near_duplicates, config.max_rejected_share, config.sampling.seed)
    return sha256_json({"sources": sources, "limits": limits, "files": files, "code": code})


def read_plan(config: DataConfig) -> PromptPlan | None:
    """The plan of these settings, or None if none is stored whole."""
    root = absolute(config.root)
    prompts, report = root / PROMPTS_FILE, root / REPORT_FILE
    if not prompts.is_file() or not report.is_file():
        return None
    stored = json.loads(report.read_text(encoding="utf-8"))
    if stored.get("fingerprint") != plan_fingerprint(config):
        return None
    if stored.get("prompts_sha256") != sha256_file(prompts):
        _LOG.warning("%s is not the file that %s describes; planning anew", prompts, REPORT_FILE)
        return None
    splits: dict[str, list[PromptRecord]] = {"train": [], "holdout": []}
    with open(prompts, encoding="utf-8") as file:
        for line in file:
            record = PromptRecord(**json.loads(line))
            splits[record.split].append(record)
    _LOG.info("prompts as planned before, from %s; remove %s to plan anew", prompts, REPORT_FILE)
    return assemble_plan(splits["train"], splits["holdout"], PromptReport.from_dict(stored))


def write_plan(config: DataConfig, plan: PromptPlan) -> None:
    """Store a plan; the report comes last, and with it the plan counts as stored."""
    root = absolute(config.root)
    root.mkdir(parents=True, exist_ok=True)
    path = root / PROMPTS_FILE
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # jobs of an array may plan at the same time
    try:
        digest = _write_lines(temporary, [*plan.train, *plan.holdout])
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    head = {"fingerprint": plan_fingerprint(config), "prompts_sha256": digest}
    atomic_write_json(root / REPORT_FILE, {**head, **plan.report.to_dict()})


def assemble_plan(train: list[PromptRecord], holdout: list[PromptRecord], report: PromptReport) -> PromptPlan:
    """A plan with the hashes of its hold-out."""
    hashes = sorted({overlap.holdout_hash(record.messages) for record in holdout})
    return PromptPlan(train=train, holdout=holdout, holdout_hashes=hashes, report=report)


def _write_lines(path: Path, records: Iterable[PromptRecord]) -> str:
    """Write records as JSON lines; returns the file's hex sha256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for record in records:
            line = json.dumps(vars(record), ensure_ascii=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _file_states(source: PromptSourceConfig) -> list[tuple[Any, ...]]:
    """Name, size and time of the local files of a source."""
    if source.kind == "starter" or source.from_hub:
        return []
    if source.kind == "datasets":
        paths = sorted(path for path in absolute(source.path).rglob("*") if path.is_file())
    else:
        paths = source_files(source)
    states = [(path, path.stat()) for path in paths]
    return [(path.name, state.st_size, state.st_mtime_ns) for path, state in states]
