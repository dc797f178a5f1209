"""How the exported weights came about, gathered from what prompt planning, capture and training left on disk.

Nothing is asked of the present configuration where the run itself wrote it down, and nothing is made up: what no record
tells stays out, and the card says "not recorded". Paths are cut to their last part, see ``provenance.public_value``.

    train/run.json, run.attemptN.json   code, versions, machine, configuration, data, warm start of each start
    train/stepN/state.json              steps, rows, time, dropped windows of the exported checkpoint
    train/metrics.jsonl                 losses and rates of the last logged step up to that checkpoint
    data/prompts_report.json            prompt sources with licences and counts
    data/capture/index.jsonl            samples and tokens
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_gen.cache.format import MANIFEST_FILE
from data_gen.cache.index import read_index
from dflash2_train.checkpoint import MANIFEST, STATE
from dflash2_train.config import RunConfig, absolute
from dflash2_train.export.payload import read_json
from dflash2_train.provenance import public_value

METRICS = "metrics.jsonl"
PROMPT_REPORT = "prompts_report.json"
CAPTURE = "capture"
RUN_FACTS = ("time_utc", "command", "python", "git", "packages", "machine")
TRAINING_FACTS = (*RUN_FACTS, "config", "cache", "attestation", "deepspeed", "warm_start")
SOURCE_FACTS = ("label", "split", "revision", "terms", "rows", "kept", "licenses")


def training_facts(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """How the weights of a checkpoint were trained.

    Args:
        config: the experiment; names the data folder.
        checkpoint: a committed checkpoint folder inside its run folder.

    Returns:
        ``run_id`` and ``training``, each None where nothing beside the checkpoint tells.
    """
    step = int(read_json(checkpoint / MANIFEST)["step"])
    state = _optional(checkpoint / STATE)
    run_id = state.get("trainer", {}).get("run_id") or None
    return {"run_id": run_id, "training": _training(config, checkpoint.parent, step, state)}


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no file; ValueError for a damaged file."""
    return read_json(path) if path.exists() else {}


def _training(config: RunConfig, output: Path, step: int, state: dict[str, Any]) -> dict[str, Any] | None:
    first = _optional(output / "run.json")
    if not first:
        return None
    later = [read_json(path) for path in sorted(output.glob("run.attempt*.json"), key=_attempt)]
    trainer = state.get("trainer", {})
    progress = {key: trainer.get(key) for key in ("rows_consumed", "seconds", "attempt", "dropped")}
    facts: dict[str, Any] = {key: first.get(key) for key in TRAINING_FACTS}
    facts["later_attempts"] = [{key: record.get(key) for key in RUN_FACTS} for record in later]
    facts["progress"] = {**progress, "world_size": state.get("world_size")}
    facts["final_metrics"] = last_metrics(output / METRICS, step)
    facts["data"] = data_facts(absolute(config.data.root), first.get("cache"))
    public: dict[str, Any] = public_value(facts)
    return public


def _attempt(path: Path) -> int:
    return int(path.stem.removeprefix("run.attempt"))


def last_metrics(path: Path, step: int) -> dict[str, Any] | None:
    """The last line of a metrics log that is not past ``step``, which a later attempt may have written anew."""
    if not path.exists():
        return None
    found: dict[str, Any] | None = None
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):  # cut by a crash, or being written
                continue
            values = json.loads(line)
            if values["step"] <= step and (found is None or values["step"] >= found["step"]):
                found = values
    return found


def data_facts(root: Path, cache: Any) -> dict[str, Any] | None:
    """Prompt sources and the size of the capture under a data folder, as far as they lie there.

    Args:
        root: ``data.root`` of the present configuration.
        cache: content of the manifest that was trained on. None is returned where another cache lies in ``root``.

    Returns:
        ``prompts`` (one entry a source: label, split, revision, terms, rows, kept, licences with counts), the number
        of prompts removed for an overlap with held-out ones, and ``capture`` (samples, tokens, supervised tokens; None
        in stream mode, where the ring keeps no index).
    """
    manifest = _optional(root / CAPTURE / MANIFEST_FILE)
    if manifest and manifest.get("content") != cache:
        return None
    report = _optional(root / PROMPT_REPORT)
    shards = read_index(root / CAPTURE).values()
    capture = {
        "samples": sum(shard.num_samples for shard in shards),
        "tokens": sum(sum(shard.num_tokens) for shard in shards),
        "supervised_tokens": sum(sum(shard.num_supervised) for shard in shards),
    }
    sources = report.get("sources")
    return {
        "prompts": sources and [{key: source.get(key) for key in SOURCE_FACTS} for source in sources],
        "removed_for_overlap": len(report["removed"]) if "removed" in report else None,
        "capture": capture if shards else None,
    }
