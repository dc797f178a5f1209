"""Is this drafter, with its papers, what was exported?

Every recorded sha256 is computed anew: of the files in ``run.json``, of ``run.json`` itself, of the list in
PROVENANCE.txt, of the mask vector's file, of the evaluations and what they measured, and on demand of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_train.export.evaluations import contradiction
from dflash2_train.export.payload import MASK, PROVENANCE, RECORD
from dflash2_train.export.provenance_text import listed_hashes
from dflash2_train.export.record import SELF, hash_files, read_record, self_hash_holds
from dflash2_train.provenance import hash_chat_template, hash_model_folder, hash_tokenizer_files

SAME, DIFFERS, MISSING, UNLISTED, ABSENT = "same", "DIFFERS", "MISSING", "not listed", "not recorded"
BAD = (DIFFERS, MISSING)
RECORDED = "as in run.json"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: ``verdict`` is one of the words above."""

    what: str
    recorded: str  # sha256 or what stands for it; empty when nothing is recorded
    found: str
    verdict: str


def compare(what: str, recorded: str | None, found: str | None) -> Check:
    """A check of one value."""
    if recorded is None:
        verdict = UNLISTED if found else ABSENT
    elif found is None:
        verdict = MISSING
    else:
        verdict = SAME if recorded == found else DIFFERS
    return Check(what=what, recorded=recorded or "", found=found or "", verdict=verdict)


def verify(folder: Path, target: Path | None = None) -> list[Check]:
    """All checks of an exported drafter.

    Args:
        folder: the drafter's.
        target: folder of the target to hash too, or None.

    Raises:
        UserError: no drafter of this tool, or a damaged record.
    """
    record = read_record(folder)
    found = hash_files(folder, leave_out=(RECORD,))
    listed = record["files"]
    checks = [compare(name, listed.get(name), found.get(name)) for name in sorted(listed.keys() | found.keys())]
    if SELF in record:
        kept = record[SELF]
        checks.append(compare(RECORD, kept, kept if self_hash_holds(record) else "another content"))
    else:
        checks.append(compare(RECORD, None, None))
    checks += _papers(folder, record, found)
    checks += _evaluations(folder, record, found)
    if target is not None:
        checks += _target(record, target)
    return checks


def _papers(folder: Path, record: dict[str, Any], found: dict[str, str]) -> Iterator[Check]:
    """What PROVENANCE.txt says, and the mask vector's own entry."""
    text = (folder / PROVENANCE).read_text(encoding="utf-8") if (folder / PROVENANCE).exists() else ""
    for name, digest in sorted(listed_hashes(text).items()):
        yield compare(f"{name} as in {PROVENANCE}", digest, found.get(name))
    mask = (record.get("export") or {}).get("mask_embedding_file_sha256")
    yield compare(f"{MASK} as exported", mask, found.get(MASK))


def _evaluations(folder: Path, record: dict[str, Any], found: dict[str, str]) -> Iterator[Check]:
    """Each report: the file, that it is about these weights, and that its numbers are those that were taken over."""
    for entry in record.get("evaluations") or []:
        name = entry["file"]
        yield compare(f"{name} as taken over", entry["sha256"], found.get(name))
        if name not in found:
            continue
        yield compare(f"numbers of {name}", RECORDED, contradiction(folder / name, entry, found) or RECORDED)


def _target(record: dict[str, Any], folder: Path) -> Iterator[Check]:
    """The hashes of the target's folder that the records hold."""
    cache = ((record.get("source") or {}).get("training") or {}).get("cache") or {}
    yield compare("target", (record.get("target") or {}).get("hash"), hash_model_folder(folder))
    yield compare("tokenizer of the target", cache.get("tokenizer_hash"), hash_tokenizer_files(folder))
    yield compare("chat template of the target", cache.get("chat_template_hash"), hash_chat_template(folder))
