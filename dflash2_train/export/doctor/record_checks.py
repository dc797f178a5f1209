"""``run.json`` and ``PROVENANCE.txt``: files as they were exported, and a configuration as it was trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash2_train.export.doctor.findings import READERS, WARNING
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter
from dflash2_train.export.evaluations import contradiction
from dflash2_train.export.payload import PROVENANCE, PULLED, RECORD, TOOL, read_json
from dflash2_train.export.provenance_text import listed_hashes
from dflash2_train.export.record import self_hash_holds
from dflash2_train.provenance import sha256_file

check = DRAFTER_CHECKS.check
# config.json -> drafter.* of the experiment, both as lists, numbers or text
TRAINED = {
    "target_layer_ids": "target_layer_ids",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "sliding_window": "sliding_window",
    "rms_norm_eps": "rms_norm_eps",
}


@lru_cache(maxsize=256)
def _hash_of(path: Path, size: int, changed_ns: int) -> str:
    """The file's sha256; size and time are there to make another file another key."""
    return sha256_file(path)


def _sha256(drafter: OpenedDrafter, path: Path) -> str:
    """The file's sha256; of weights, which are large, it comes with the reading of their values."""
    known = drafter.weights.sha256(path)
    if known is not None:
        return known
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns)


def _listed(drafter: OpenedDrafter) -> dict[str, str]:
    """File name -> sha256 in ``run.json``, as far as it is such a list."""
    files = (drafter.record or {}).get("files")
    return {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else {}


def _present(folder: Path) -> set[str]:
    """Names of the folder's files; the note of a pull is no part of the drafter."""
    return {path.name for path in folder.iterdir() if path.is_file()} - {PULLED}


@check(
    "record-missing",
    group="record",
    severity=WARNING,
    rule=f"{RECORD} tells where the drafter comes from and the sha256 of its files",
    servers=(),
    next_step="Compare the files' hashes with those that the maker publishes",
)
def _missing(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is not None and not (drafter.folder / RECORD).exists():
        yield f"no {RECORD}: nothing says where this drafter comes from or whether files changed"


@check(
    "record-damaged",
    group="record",
    rule=f"{RECORD} is a JSON object that lists files",
    servers=(),
    next_step="Fetch the drafter again",
)
def _damaged(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is None or not (drafter.folder / RECORD).exists():
        return
    try:
        record = read_json(drafter.folder / RECORD)
    except ValueError as error:
        yield str(error).split(". ")[0]
        return
    if record.get("tool") == TOOL and not isinstance(record.get("files"), dict):
        yield f"{RECORD} lists no files"


@check(
    "record-self",
    group="record",
    rule=f"{RECORD} has the sha256 that it gives of itself",
    servers=(),
    next_step="Fetch the drafter again: what the record says of its training was edited",
)
def _self(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.record is not None and not self_hash_holds(drafter.record):
        yield f"{RECORD} changed after it was written"


@check(
    "record-file-missing",
    group="record",
    rule=f"every file in {RECORD} is there",
    servers=READERS,
    next_step="Copy it too, or fetch the drafter again",
)
def _file_missing(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is not None:
        missing = sorted(_listed(drafter).keys() - _present(drafter.folder))
        yield from (f"{name} is listed in {RECORD} but missing" for name in missing)


@check(
    "record-file-unlisted",
    group="record",
    severity=WARNING,
    rule=f"every file is in {RECORD}",
    servers=(),
    next_step="Remove it if you do not know it",
)
def _file_unlisted(drafter: OpenedDrafter) -> Iterator[str]:
    listed = _listed(drafter)
    if drafter.folder is not None and listed:
        unlisted = sorted(_present(drafter.folder) - listed.keys() - {RECORD})
        yield from (f"{name} is not listed in {RECORD}" for name in unlisted)


@check(
    "record-hash",
    group="record",
    rule=f"files have the sha256 that {RECORD} gives",
    servers=READERS,
    next_step="Fetch or export the drafter again, unless you changed the file yourself",
)
def _hash(drafter: OpenedDrafter) -> Iterator[str]:
    folder, listed = drafter.folder, _listed(drafter)
    if folder is not None:
        for name in sorted(listed.keys() & _present(folder)):
            if _sha256(drafter, folder / name) != listed[name]:
                yield f"{name} changed after it was exported"


@check(
    "provenance-hash",
    group="record",
    rule=f"files have the sha256 that {PROVENANCE} gives",
    servers=READERS,
    next_step="Take all files from one export",
)
def _provenance(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is None or not (drafter.folder / PROVENANCE).is_file():
        return
    text = (drafter.folder / PROVENANCE).read_text(encoding="utf-8", errors="replace")
    present = _present(drafter.folder)
    for name, digest in listed_hashes(text).items():
        if name in present and _sha256(drafter, drafter.folder / name) != digest:
            yield f"{name} is not the file that {PROVENANCE} speaks of"


@check(
    "record-config",
    group="record",
    rule=f"config.json says what {RECORD} says of the training",
    servers=READERS,
    next_step="Restore config.json; the weights belong to the trained values",
)
def _config(drafter: OpenedDrafter) -> Iterator[str]:
    trained: Any = (drafter.record or {}).get("config")
    trained = trained.get("drafter") if isinstance(trained, dict) else None
    if not isinstance(trained, dict):
        return
    for published, key in TRAINED.items():
        stated = drafter.either(published)
        if key in trained and stated != trained[key]:
            yield f"{published}={stated!r}, trained with drafter.{key}={trained[key]!r}"


def _evaluations(drafter: OpenedDrafter) -> list[dict[str, Any]]:
    """The measurements that ``run.json`` lists and the folder holds a report of."""
    found = (drafter.record or {}).get("evaluations")
    if drafter.folder is None or not isinstance(found, list):
        return []
    present = _present(drafter.folder)
    return [entry for entry in found if isinstance(entry, dict) and entry.get("file") in present]


@check(
    "evaluation-numbers",
    group="record",
    rule=f"evaluations measured these files, and {RECORD} and the card give their reports' numbers",
    servers=(),
    next_step="Export again, and add the report with dflash2-export card FOLDER --evaluation REPORT",
)
def _numbers(drafter: OpenedDrafter) -> Iterator[str]:
    for entry in _evaluations(drafter):
        assert drafter.folder is not None  # no entries without one
        wrong = contradiction(drafter.folder / entry["file"], entry, _listed(drafter))
        if wrong is not None:
            yield f"{entry['file']}: {wrong.split('. ')[0]}"


@check(
    "evaluation-lossless",
    group="record",
    severity=WARNING,
    rule="greedy output with drafts is the target's own",
    servers=(),
    next_step="Measure again in float32; if it fails there too, do not serve before the cause is known",
)
def _lossless(drafter: OpenedDrafter) -> Iterator[str]:
    for entry in _evaluations(drafter):
        equality = entry.get("equality")
        if isinstance(equality, dict) and equality.get("failures"):
            yield (
                f"{entry['file']}: {equality['failures']} of {equality.get('prompts_checked')} answers were not the "
                "target's own"
            )
