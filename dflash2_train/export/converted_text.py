"""Card and PROVENANCE.txt of a converted drafter: from what, by which rules, and what was lost.

Pure functions of its ``config.json`` and ``run.json``, as :mod:`card` and :mod:`provenance_text` are for a trained one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash2_train.export.card import TAGS, architecture_facts, files_lines, front_matter, table
from dflash2_train.export.card_evaluations import evaluation_lines
from dflash2_train.export.payload import CONFIG, RECORD, TOOL
from dflash2_train.export.provenance_text import HASHES, evaluation_text
from dflash2_train.export.serving import THIS_FOLDER, serving_lines

UNKNOWN = "unknown"  # the Hub's word for a licence that nobody stated


def card_text(published: Mapping[str, Any], record: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """The model card, Markdown with a metadata header.

    Args:
        published: content of ``config.json``, in the published layout.
        record: content of ``run.json``, but for its hashes.
        hashes: name -> sha256 of the files that the card lists.
    """
    conversion, target = record["conversion"], record["target"]
    source, second = conversion["source"], conversion["generation"] == 2
    kind = "DFlash 2" if second else "DFlash"
    target_name = target["name"] or "a target that its files do not name"
    licence = source["license"] or "its files do not state one"
    sections = [
        front_matter(
            record, licence=source["license"] or UNKNOWN, tags=[tag for tag in TAGS if second or "2" not in tag]
        ),
        [
            "",
            f"# {record['config']['name']}: a {kind} drafter for {target_name}",
            "",
            "Speculative decoding: this small model proposes a block of tokens in one pass, the target checks them in "
            "one pass, and the output keeps the target's own distribution. It is no language model by itself.",
            "",
            f"{TOOL} converted it from {source['name']} and did not train it.",
            "",
        ],
        ["## Architecture", "", *table(("", ""), architecture_facts(published, record))],
        serving_lines(
            published,
            target["hub_id"] or target["name"] or "TARGET",
            record.get("repo_id") or THIS_FOLDER,
            num_proposals=record["export"]["num_proposals"],
            targets_mask=conversion["mask_is_targets"] is True,
        ),
        evaluation_lines(record, published),
        ["## Origin", "", *table(("", ""), _origin(record))],
        ["Files of the source:", "", *table(("file", "sha256"), _hash_rows(source["files"]))],
        ["Lost or left out:", "", *_lost(conversion), ""],
        files_lines(hashes),
        [
            "## Licence",
            "",
            f"The licence of the source holds: {licence}. A conversion does not change it.",
            "",
        ],
    ]
    return "\n".join(line for section in sections for line in section)


def _origin(record: Mapping[str, Any]) -> list[tuple[str, object]]:
    conversion, source = record["conversion"], record["conversion"]["source"]
    made = f"not known here; the source's own record stands in `{RECORD}`" if source["record"] else None
    return [
        ("source", source["name"]),
        ("commit", source["commit"]),
        ("layout", f"{conversion['from']}, converted to {conversion['to']}"),
        ("licence", source["license"]),
        ("mask slots", conversion["mask_slots"]),
        ("training", made),
    ]


def _hash_rows(files: Mapping[str, str]) -> list[tuple[str, object]]:
    return [(f"`{name}`", f"`{digest}`") for name, digest in sorted(files.items())]


def _lost(conversion: Mapping[str, Any]) -> list[str]:
    return [
        f"- {loss['what']}: {loss['text']}{' (changes the drafts)' if loss['drafts'] else ''}"
        for loss in conversion["losses"]
    ] or ["- nothing"]


def provenance_text(record: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """PROVENANCE.txt.

    Args:
        record: content of ``run.json``, but for its hashes.
        hashes: name -> sha256 of the files to list; ``verify-provenance`` reads them back.
    """
    conversion, target = record["conversion"], record["target"]
    source = conversion["source"]
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
        f"target: {target['name'] or f'not named, see {CONFIG}'}, revision {target['revision'] or 'not recorded'}",
        f"  hash: {target['hash'] or 'not recorded'}",
        f"mask slots: {conversion['mask_slots']}",
        "",
        "lost or left out:",
        *(f"  {line}" for line in _lost(conversion)),
        "",
        *evaluation_text(record),
        "",
        HASHES,
        *(f"  {digest}  {name}" for name, digest in sorted(hashes.items())),
    ]
    return "\n".join(lines) + "\n"
