"""``run.json`` of a conversion, and the papers made from it: from what, by which rules, and what was lost.

The record has the same ``files``, ``record_sha256``, ``target`` and ``export`` as that of an export, so that
``dflash2-export verify-provenance``, ``card``, ``push`` and the doctor take it in the same way. What the source's own
record says stands inside, unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.export.payload import MASK, TOOL, read_header
from dflash2_train.export.record import finish_papers
from dflash2_train.provenance import public_value, run_record, sha256_file

if TYPE_CHECKING:
    from dflash2_train.export.convert.conversion import Plan


def write_papers(
    folder: Path, plan: Plan, origin: dict[str, Any], *, output_name: str, hashes: Mapping[str, str]
) -> None:
    """The papers beside the converted files, with the sha256 of every file.

    Args:
        folder: with configuration, weights and mask vector as they will be published.
        plan: of the conversion.
        origin: what identifies the source.
        output_name: that the folder will have.
        hashes: weights file -> sha256, as the writer took it.
    """
    shape = plan.described.shape
    record: dict[str, Any] = {
        "tool": TOOL,
        **public_value(run_record({"name": output_name})),
        "target": _target(plan),
        "conversion": {
            "from": plan.source.style.name,
            "to": plan.request.to.name,
            "generation": plan.described.generation,
            "source": public_value(origin),
            "mask_slots": plan.mask.origin,
            "mask_is_targets": plan.mask.is_targets,
            "said": {key: value for key, value in asdict(plan.request.hints).items() if value},
            "losses": [{**asdict(loss), "text": public_value(loss.text)} for loss in plan.losses],
        },
        "export": {
            "dtype": plan.described.dtype,
            "num_proposals": shape.num_drafted,
            "tables": [],
            "parameters": sum(_elements(folder / name) for name in hashes),
            "mask_token_id": shape.mask_token_id,
            **_mask(folder, plan),
        },
        "evaluations": [],
    }
    finish_papers(folder, record, known=hashes)


def _elements(path: Path) -> int:
    return sum(math.prod(size) for _, size in read_header(path).values())


def _target(plan: Plan) -> dict[str, Any]:
    """Which target the drafter belongs to, as far as the user named one; of a local folder the last part alone."""
    target, named = plan.request.target, plan.request.hints.verifier
    if target is None:
        return {"name": named, "hub_id": named, "revision": None, "license": None, "hash": None}
    hub_id = target.name if target.info.revision is not None else named
    return {
        "name": hub_id or Path(target.name).name,
        "hub_id": hub_id,
        "revision": target.info.revision,
        "license": None,
        "hash": target.info.target_hash,
    }


def _mask(folder: Path, plan: Plan) -> dict[str, Any]:
    if plan.written_mask is None:
        return {}
    norm = round(float(plan.written_mask.float().norm()), 6)
    return {"mask_embedding_norm": norm, "mask_embedding_file_sha256": sha256_file(folder / MASK)}
