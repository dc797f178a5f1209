"""Where a drafter started from: the warm start of a run, its source's own warm start, and so on back to a fresh one.

Written into ``run.json`` when training starts, because later the source may be gone or replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash2_train.checkpoint import MANIFEST, newest_checkpoint
from dflash2_train.config import absolute
from dflash2_train.export.payload import CONFIG, MASK, RECORD
from dflash2_train.provenance import public_value, sha256_file

HASHED = (CONFIG, MASK, "*.safetensors", "*.safetensors.index.json")


def warm_start_chain(folder: str | None) -> list[dict[str, Any]]:
    """The drafters that a run descends from, its own source first; empty for a fresh drafter.

    Args:
        folder: ``train.warm_start``: a checkpoint, a run folder or a published folder, read already by
            ``warm_start.warm_drafter``; None = no warm start.

    Returns:
        For each: ``name``, ``kind`` ("checkpoint" or "published"), ``files`` (name -> sha256), and where its run left
        a record ``run_id``, ``step`` and ``git``. The chain ends where a drafter has no record.
    """
    if folder is None:
        return []
    source = absolute(folder)
    if (source / CONFIG).exists():
        return _published(source)
    checkpoint = source if (source / MANIFEST).exists() else _newest(source)
    return _checkpoint(checkpoint)


def _newest(run: Path) -> Path:
    found = newest_checkpoint(run)
    assert found is not None, f"{run}: the warm start was read from here a moment ago"
    return found.folder


def _published(folder: Path) -> list[dict[str, Any]]:
    paths = sorted({path for pattern in HASHED for path in folder.glob(pattern)})
    entry: dict[str, Any] = {
        "name": folder.name,
        "kind": "published",
        "files": {path.name: sha256_file(path) for path in paths},
    }
    record = _record(folder / RECORD)
    source = record.get("source") or {}
    training = source.get("training") or {}
    entry |= {"run_id": record.get("run_id"), "step": source.get("step"), "git": training.get("git")}
    if "conversion" in record:
        entry["converted_from"] = record["conversion"]["source"]
    return [entry, *(training.get("warm_start") or [])]


def _checkpoint(folder: Path) -> list[dict[str, Any]]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    record = _record(folder.parent / RECORD)
    entry = {
        "name": f"{folder.parent.name}/{folder.name}",
        "kind": "checkpoint",
        "files": manifest["files"],
        "run_id": record.get("run_id"),
        "step": manifest["step"],
        "git": record.get("git"),
    }
    return [entry, *(record.get("warm_start") or [])]


def _record(path: Path) -> dict[str, Any]:
    """A run's record as it may be published, or nothing where there is none: other tools leave none."""
    if not path.exists():
        return {}
    value: dict[str, Any] = public_value(json.loads(path.read_text(encoding="utf-8")))
    return value
