"""``run.json`` and ``PROVENANCE.txt`` of a conversion: from what, by which rules, and what was lost.

The record has the same ``files``, ``record_sha256`` and ``export`` as that of an export, so that
``dflash2-export verify-provenance`` and the doctor check it in the same way. What the source's own record says stands
inside, unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.export.payload import MASK, PROVENANCE, RECORD, TOOL, read_header
from dflash2_train.export.provenance_text import HASHES
from dflash2_train.export.record import SELF, hash_files
from dflash2_train.provenance import (
    atomic_write_json,
    atomic_write_text,
    public_value,
    run_record,
    sha256_file,
    sha256_json,
)

if TYPE_CHECKING:
    from dflash2_train.export.convert.conversion import Plan


def write_papers(folder: Path, plan: Plan, origin: dict[str, Any], *, output_name: str) -> None:
    """Both papers beside the converted files, with the sha256 of every file.

    Args:
        folder: with configuration, weights and mask vector as they will be published.
        plan: of the conversion.
        origin: what identifies the source.
        output_name: that the folder will have.
    """
    target, shape = plan.request.target, plan.described.shape
    hashes = hash_files(folder, leave_out=(PROVENANCE, RECORD))
    record: dict[str, Any] = {
        "tool": TOOL,
        **public_value(run_record({"name": output_name})),
        "conversion": {
            "from": plan.source.style.name,
            "to": plan.request.to.name,
            "source": public_value(origin),
            "mask_slots": plan.mask.origin,
            "said": {key: value for key, value in asdict(plan.request.hints).items() if value},
            "losses": [{**asdict(loss), "text": public_value(loss.text)} for loss in plan.losses],
            "target": None if target is None else _target(plan),
        },
        "export": {
            "dtype": plan.described.dtype,
            "num_proposals": shape.num_drafted,
            "tables": [],
            "parameters": sum(_elements(path) for path in sorted(folder.glob("*.safetensors"))),
            "mask_token_id": shape.mask_token_id,
            **_mask(folder, plan, hashes),
        },
        "evaluations": [],
    }
    atomic_write_text(folder / PROVENANCE, provenance_text(record, hashes))
    record["files"] = {**hashes, PROVENANCE: sha256_file(folder / PROVENANCE)}
    record[SELF] = sha256_json(record)
    atomic_write_json(folder / RECORD, record)


def _elements(path: Path) -> int:
    return sum(math.prod(size) for _, size in read_header(path).values())


def _target(plan: Plan) -> dict[str, Any]:
    target = plan.request.target
    assert target is not None
    name = target.name if target.info.revision is not None else Path(target.name).name
    return {"name": name, "revision": target.info.revision, "hash": target.info.target_hash}


def _mask(folder: Path, plan: Plan, hashes: Mapping[str, str]) -> dict[str, Any]:
    if plan.written_mask is None:
        return {}
    norm = round(float(plan.written_mask.float().norm()), 6)
    return {"mask_embedding_norm": norm, "mask_embedding_file_sha256": hashes[MASK]}


def provenance_text(record: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """PROVENANCE.txt of a converted drafter; a pure function of its record."""
    conversion = record["conversion"]
    source, losses = conversion["source"], conversion["losses"]
    at = f", commit {source['commit']}" if source["commit"] else ""
    lines = [
        f"drafter: {record['config']['name']}, converted with {TOOL} from {conversion['from']} to {conversion['to']}",
        f"written: {record['time_utc']}",
        "",
        f"source: {source['name']}{at}",
        f"  licence: {source['license'] or 'not stated in its files; that of the source holds'}",
        "  its files, sha256:",
        *(f"    {digest}  {name}" for name, digest in sorted(source["files"].items())),
        f"  record of its own: {'inside run.json' if source['record'] else 'none'}",
        f"mask slots: {conversion['mask_slots']}",
        "",
        "lost or left out:" if losses else "nothing is lost",
        *(f"  - {loss['what']}: {loss['text']}{' (changes the drafts)' if loss['drafts'] else ''}" for loss in losses),
        "",
        HASHES,
        *(f"  {digest}  {name}" for name, digest in sorted(hashes.items())),
    ]
    return "\n".join(lines) + "\n"
