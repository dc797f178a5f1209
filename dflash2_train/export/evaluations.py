"""Evaluations that an exported drafter carries: read from ``dflash2-eval`` reports, checked, summed up for the card.

A card may only show what was measured with the very files beside it. So a report is taken when it names the sha256 of
these files, and its rates are computed anew from its raw counts. The report itself travels along as
``evaluation-<hash>.json``, without local paths, so that readers can do the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash2_train.export.evaluation_passes import SERVER, EvaluationError, passes_of
from dflash2_train.export.payload import WEIGHTS
from dflash2_train.provenance import public_value, sha256_file

SCHEMA_VERSIONS = (1,)
RUNNER = "runner"
PROTOCOL_FACTS = (
    "experiment",
    "mode",
    "engine",
    "hardware",
    "dtype",
    "device",
    "num_drafted",
    "draft_lengths",
    "concurrency",
    "max_new_tokens",
    "prompts",
    "prompts_sha256",
    "enable_thinking",
    "template",
    "prefix_caching",
    "temperature",
    "temperatures",
    "top_p",
    "draft_sampling",
)


def read_report(path: Path) -> dict[str, Any]:
    """A ``dflash2-eval`` report.

    Raises:
        EvaluationError: no file, no JSON, or another layout than this version reads.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EvaluationError(f"{path}: no such file. Name a report.json that dflash2-eval wrote.") from error
    except ValueError as error:
        raise EvaluationError(f"{path}: not readable as JSON ({error}). Run dflash2-eval again.") from error
    version = report.get("schema_version") if isinstance(report, dict) else None
    if version not in SCHEMA_VERSIONS or not isinstance(report.get("protocol"), dict):
        raise EvaluationError(
            f"{path}: not a report of dflash2-eval with schema_version in {SCHEMA_VERSIONS} (found {version!r}). "
            "Name its report.json, or run the evaluation again with this version."
        )
    whole: dict[str, Any] = report
    return whole


def refuse_other_drafter(report: Mapping[str, Any], path: Path, hashes: Mapping[str, str]) -> None:
    """Raise EvaluationError unless ``report`` was measured with the files of these ``hashes`` (name -> sha256)."""
    measured = report["protocol"].get("drafter_sha256")
    if isinstance(measured, str):  # of a served run: the weights that the experiment exported
        measured = {WEIGHTS: measured}
    if not isinstance(measured, dict) or not measured:
        raise EvaluationError(
            f"{path}: does not say which drafter it measured (protocol.drafter_sha256), so no card takes it. "
            "Run dflash2-eval on this folder: eval.drafter=FOLDER."
        )
    other = [name for name, digest in sorted(measured.items()) if hashes.get(name) != digest]
    if other:
        raise EvaluationError(
            f"{path}: was measured with another drafter; {', '.join(other)} differ from the files of this folder. "
            "Run dflash2-eval on this folder: eval.drafter=FOLDER."
        )


def thinking_notes(record: Mapping[str, Any] | None, measured: bool | None) -> list[str]:
    """A sentence where a drafter was measured in another thinking mode than it was trained in; else nothing.

    Args:
        record: ``run.json`` of the export, or None.
        measured: ``enable_thinking`` of the measurement; None = the template's own default.
    """
    training = ((record or {}).get("source") or {}).get("training") or {}
    trained = (training.get("cache") or {}).get("enable_thinking")
    if not training or trained == measured:
        return []
    return [f"Measured with enable_thinking={measured}, but trained on text with {trained}."]


def summarise(report: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the card shows of a report, every rate computed from its counts.

    Returns:
        ``measured_with`` ("runner", or the server's name in small letters), ``protocol`` (selected facts), ``passes``
        (one a way of decoding, or a task at a concurrency), ``labels`` (what the report says about itself),
        ``equality``, ``speedup``, ``time_utc`` and ``machine``; the last four None where the report has none.

    Raises:
        EvaluationError: a field is missing, or the counts contradict each other or the rates beside them.
    """
    protocol = report["protocol"]
    try:
        evaluation = report["run"].get("evaluation") or {}
        summary = {
            "protocol": {key: protocol.get(key) for key in PROTOCOL_FACTS},
            "labels": list(report.get("labels") or []),
            "equality": _equality(report.get("equality")),
            "speedup": report.get("speedup"),
            "time_utc": evaluation.get("time_utc"),
            "machine": evaluation.get("machine"),
        }
        served = protocol["mode"] == SERVER
        measured_with = str(protocol["engine"]).split()[0].lower() if served else RUNNER
        return {"measured_with": measured_with, "passes": passes_of(report, path), **summary}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise EvaluationError(f"{path}: a field is missing or of another kind ({error!r}). Run it again.") from error


def _equality(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not found:
        return None
    kept = {key: found[key] for key in ("rule", "prompts_checked", "prompts_equal")}
    return {**kept, "failures": len(found["failures"])}


def _condition(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """What two measurements share that measured the same thing: protocol, and the prompts of every pass."""
    keys = ("name", "temperature", "concurrency", "prompts_sha256")
    protocol = {key: value for key, value in entry["protocol"].items() if value is not None}
    return protocol, [tuple(part.get(key) for key in keys) for part in entry["passes"]]


def holds_numbers(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether every fact and number of ``entry`` is that of ``summary``; entries of earlier versions have fewer."""
    parts = [(summary["protocol"], entry["protocol"])]
    parts += zip(summary["passes"], entry["passes"], strict=False)
    return len(summary["passes"]) == len(entry["passes"]) and all(
        key in found and found[key] == value for found, kept in parts for key, value in kept.items()
    )


def contradiction(path: Path, entry: Mapping[str, Any], hashes: Mapping[str, str]) -> str | None:
    """What is wrong with the report of ``entry`` at ``path``; None if it gives the entry's numbers for these files."""
    try:
        report = read_report(path)
        refuse_other_drafter(report, path, hashes)
        return None if holds_numbers(summarise(report, path), entry) else "other numbers"
    except EvaluationError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError) as error:
        return f"its entry in the record is damaged ({error!r})"


def add_evaluations(folder: Path, record: dict[str, Any], reports: list[Path]) -> list[str]:
    """Check reports against the drafter in ``folder``, copy them there and list them in ``record``.

    A report that is there already is passed over; a later one of the same prompts under the same protocol takes
    the place of an earlier.

    Args:
        folder: of a drafter, being rewritten; ``evaluation-*.json`` files are added and removed in it.
        record: content of ``run.json``; its ``evaluations`` are replaced.
        reports: ``report.json`` files.

    Returns:
        Names of the files that were added.

    Raises:
        EvaluationError: see :func:`read_report`, :func:`refuse_other_drafter`, :func:`summarise`.
    """
    known: list[dict[str, Any]] = list(record.get("evaluations") or [])
    added = []
    for path in reports:
        report = read_report(path)
        refuse_other_drafter(report, path, record["files"])
        digest = sha256_file(path)
        public = public_value({**report, "run": {"evaluation": (report.get("run") or {}).get("evaluation")}})
        summary = summarise(public, path)
        if any(entry["report_sha256"] == digest for entry in known):
            continue
        name = f"evaluation-{digest[:12]}.json"
        (folder / name).write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for old in [entry for entry in known if _condition(entry) == _condition(summary)]:
            (folder / old["file"]).unlink(missing_ok=True)
            known.remove(old)
        entry = {"file": name, "sha256": sha256_file(folder / name), "report_sha256": digest, **summary}
        known.append(entry)
        added.append(name)
    record["evaluations"] = known
    return [entry["file"] for entry in known if entry["file"] in added]
