"""The papers of an exported drafter: ``run.json`` as the one record, card and PROVENANCE.txt made from it.

``run.json`` lists the sha256 of every other file under ``files`` and its own, computed without that entry, under
``record_sha256``. An export is written once; later only evaluations are added (:mod:`dflash2_train.export.rewrite`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash2_train.config import RunConfig, UserError, absolute, to_plain
from dflash2_train.export import converted_text
from dflash2_train.export.card import card_text
from dflash2_train.export.payload import CARD, CONFIG, MASK, PROVENANCE, PULLED, RECORD, TOOL, read_header, read_json
from dflash2_train.export.provenance_text import provenance_text
from dflash2_train.provenance import atomic_write_json, atomic_write_text, public_value, sha256_file, sha256_json
from dflash2_train.target import TargetInfo

PAPERS = (CARD, PROVENANCE, RECORD)
SELF = "record_sha256"


def target_record(config: RunConfig, target_info: TargetInfo) -> dict[str, Any]:
    """Which target the drafter belongs to; a Hub id as it is, of a local folder the last part alone."""
    name = config.target.name
    hub_id = name if target_info.revision is not None else config.export.base_model
    return {
        "name": hub_id or (absolute(name).name if absolute(name).exists() else name),
        "hub_id": hub_id,
        "revision": target_info.revision,
        "license": target_info.license,
        "hash": target_info.target_hash,
    }


def write_papers(
    folder: Path,
    config: RunConfig,
    target_info: TargetInfo,
    mask: Tensor,
    *,
    run_record: dict[str, Any],
    dtype: str,
    hashes: Mapping[str, str],
) -> None:
    """Card, provenance and record beside the weights, with the sha256 of every file.

    Args:
        folder: with the configuration, weights and mask vector as they will be published.
        config: the experiment.
        target_info: the opened target.
        mask: the mask vector [H] as written.
        run_record: ``provenance.run_record`` and what tells about the weights under ``source``.
        dtype: of the weights, by its torch name.
        hashes: weights file -> sha256, as the writer took it.
    """
    published = read_json(folder / CONFIG)
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    record = {
        "tool": TOOL,
        "run_id": (run_record.get("source") or {}).get("run_id"),
        **public_value(run_record),
        "config": public_value(to_plain(config)),
        "target": target_record(config, target_info),
        "export": {
            "dtype": dtype,
            "num_proposals": config.export.resolved_num_proposals(config.drafter),
            "tables": list(config.export.tables),
            "mask_folded": config.export.fold_mask,
            "parameters": sum(math.prod(shape) for header in headers for _, shape in header.values()),
            "mask_token_id": published["dflash_config"]["mask_token_id"],
            "mask_embedding_norm": round(float(mask.float().norm()), 6),
            "mask_embedding_file_sha256": sha256_file(folder / MASK),
        },
        "evaluations": [],
    }
    finish_papers(folder, record, known=hashes)


def finish_papers(folder: Path, record: dict[str, Any], *, known: Mapping[str, str] | None = None) -> None:
    """Write card and PROVENANCE.txt from ``record``, then ``run.json`` with all hashes, its own included.

    Args:
        folder: of the drafter.
        record: content of ``run.json`` but for the hashes.
        known: file name -> sha256 of files that need not be read for it.
    """
    record = {key: value for key, value in record.items() if key not in ("files", SELF)}
    known = known or {}
    hashes = dict(sorted({**hash_files(folder, leave_out=(*PAPERS, *known)), **known}.items()))
    texts = paper_texts(read_json(folder / CONFIG), record, hashes)
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    record["files"] = {**hashes, **{name: sha256_file(folder / name) for name in texts}}
    record[SELF] = sha256_json(record)
    atomic_write_json(folder / RECORD, record)


def paper_texts(published: dict[str, Any], record: dict[str, Any], hashes: Mapping[str, str]) -> dict[str, str]:
    """File name -> text of card and PROVENANCE.txt; a folder in another tool's layout gets no card of this one."""
    if "conversion" not in record:
        return {CARD: card_text(published, record, hashes), PROVENANCE: provenance_text(record, hashes)}
    card = {CARD: converted_text.card_text(published, record, hashes)} if "dflash_config" in published else {}
    return {**card, PROVENANCE: converted_text.provenance_text(record, hashes)}


def hash_files(folder: Path, *, leave_out: tuple[str, ...]) -> dict[str, str]:
    """Name -> sha256 of the files of a folder, hidden ones and the note of a pull left out."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    wanted = [name for name in names if name not in (*leave_out, PULLED) and not name.startswith(".")]
    return {name: sha256_file(folder / name) for name in wanted}


def read_record(folder: Path) -> dict[str, Any]:
    """``run.json`` of a drafter that this tool exported.

    Raises:
        UserError: no folder, no record, a damaged one, or another tool's.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Name the folder of an exported drafter.")
    if not (folder / RECORD).exists():
        raise UserError(
            f"{folder}: has no {RECORD}, so nothing says where this drafter comes from. Name a folder that "
            "dflash2-export wrote; dflash2-export doctor checks any other."
        )
    try:
        record = read_json(folder / RECORD)
    except ValueError as error:
        raise UserError(str(error)) from error
    if record.get("tool") != TOOL or not isinstance(record.get("files"), dict):
        raise UserError(f"{folder / RECORD}: is not a record of {TOOL}. Name a folder that dflash2-export wrote.")
    return record


def changed_files(folder: Path, record: dict[str, Any], found: dict[str, str] | None = None) -> list[str]:
    """Names of the recorded files that are missing or differ, ``run.json`` itself included.

    Args:
        folder: of the drafter.
        record: content of its ``run.json``.
        found: :func:`hash_files` of it where that is known already, since weights are large.
    """
    found = hash_files(folder, leave_out=(RECORD,)) if found is None else found
    changed = [name for name, digest in record["files"].items() if found.get(name) != digest]
    return [*changed, *([RECORD] if not self_hash_holds(record) else [])]


def self_hash_holds(record: dict[str, Any]) -> bool:
    """Whether a record is as it was written; one from before there was such a hash counts as unchanged."""
    return SELF not in record or record[SELF] == sha256_json({k: v for k, v in record.items() if k != SELF})
