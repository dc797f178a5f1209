"""Evaluations that an exported drafter carries: read from ``dflash2-eval`` reports, checked, summed up for the card.

A card may only show what was measured with the very files beside it. So a report is taken when it names the sha256 of
these files, and its rates are computed anew from its raw counts. The report itself travels along as
``evaluation-<hash>.json``, without local paths, so that readers can do the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.export.payload import WEIGHTS
from dflash2_train.provenance import public_value, sha256_file

SCHEMA_VERSIONS = (1,)
RUNNER, SERVER = "runner", "server"
PROTOCOL_FACTS = (
    "experiment",
    "mode",
    "engine",
    "hardware",
    "dtype",
    "device",
    "num_drafted",
    "concurrency",
    "max_new_tokens",
    "prompts",
    "prompts_sha256",
    "enable_thinking",
    "template",
    "prefix_caching",
    "temperature",
    "top_p",
    "draft_sampling",
)
COUNTS = ("rounds", "proposed", "accepted", "committed")
POSITIONS = ("proposed_per_position", "reached_per_position", "accepted_per_position")


class EvaluationError(UserError):
    """A report that cannot stand in a card; the text names the file and the reason."""


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
        if protocol["mode"] == SERVER:
            served = str(protocol["engine"]).split()[0].lower()
            return {"measured_with": served, "passes": _served_passes(report, path), **summary}
        return {"measured_with": RUNNER, "passes": _runner_passes(report, path), **summary}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise EvaluationError(f"{path}: a field is missing or of another kind ({error!r}). Run it again.") from error


def _equality(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not found:
        return None
    kept = {key: found[key] for key in ("rule", "prompts_checked", "prompts_equal")}
    return {**kept, "failures": len(found["failures"])}


def _runner_passes(report: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The greedy pass, and the sampled one if there was one."""
    protocol = report["protocol"]
    named = [("greedy", 0.0, report["greedy"])]
    if report.get("sampled"):
        temperature = float(protocol["temperature"])
        named.append((f"sampled at temperature {temperature:g}", temperature, report["sampled"]))
    passes = []
    for name, temperature, part in named:
        counts, rates = part["counts"], part["rates"]
        found = {
            "name": name,
            "temperature": temperature,
            "concurrency": protocol.get("concurrency"),
            "prompts": counts["prompts"],
            **{key: counts[key] for key in (*COUNTS, *POSITIONS)},
            "acceptance_length_pooled": _ratio(counts["committed"], counts["rounds"]),
            "acceptance_length_per_request": rates["acceptance_length_per_request"],
            "tokens_per_second": (part.get("speed") or {}).get("decode_tokens_per_second"),
            "failed_requests": 0,
        }
        _refuse_contradiction(found, path, stated=rates["acceptance_length_pooled"])
        passes.append(found)
    return passes


def _served_passes(report: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Each cell of a served run: a task, or a category of it, at one concurrency."""
    passes = []
    for cell in report["cells"]:
        acceptance = cell["acceptance"]
        if cell["method"] != "drafter" or acceptance is None:
            raise EvaluationError(f"{path}: measured {cell['method']}, not this drafter. Name a run of the drafter.")
        rounds, accepted = acceptance["rounds"], acceptance["accepted"]
        by_position = list(acceptance["accepted_per_position"])
        seconds = cell["seconds"]
        found = {
            "name": " / ".join(part for part in (cell["task"], cell.get("category")) if part),
            "temperature": cell["temperature"],
            "concurrency": cell["concurrency"],
            "prompts": cell["requests"]["answered"],
            "rounds": rounds,
            "proposed": acceptance["proposed"],
            "accepted": accepted,
            "committed": accepted + rounds,
            "proposed_per_position": [rounds] * len(by_position),  # servers propose all K in nearly every round
            "reached_per_position": [rounds, *by_position][: len(by_position)],
            "accepted_per_position": by_position,
            "acceptance_length_pooled": _ratio(accepted + rounds, rounds),
            "acceptance_length_per_request": _mean_length(cell.get("per_request")),
            "tokens_per_second": _ratio(cell["output_tokens"], seconds),
            "failed_requests": sum(cell["requests"]["failed"].values()),
        }
        _refuse_contradiction(found, path, stated=found["acceptance_length_pooled"])
        passes.append(found)
    return passes


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean_length(rows: list[list[int]] | None) -> float | None:
    """Mean over requests of 1 + accepted / rounds; rows hold prompt, rounds, accepted, prompt tokens."""
    lengths = [1 + row[2] / row[1] for row in rows or [] if row[1]]
    return sum(lengths) / len(lengths) if lengths else None


def _refuse_contradiction(found: Mapping[str, Any], path: Path, *, stated: float | None) -> None:
    """Raise EvaluationError unless counts add up and the stated acceptance length follows from them."""
    length, by_position = found["acceptance_length_pooled"], found["accepted_per_position"]
    consistent = (
        found["committed"] == found["accepted"] + found["rounds"]
        and found["accepted"] <= found["proposed"]
        and (not by_position or sum(by_position) == found["accepted"])
        and (length is stated is None or (length and stated and math.isclose(length, stated, rel_tol=1e-9)))
    )
    if not consistent:
        raise EvaluationError(f"{path}: counts and rates of {found['name']!r} contradict each other. Run it again.")


def add_evaluations(folder: Path, record: dict[str, Any], reports: list[Path]) -> list[str]:
    """Check reports against the drafter in ``folder``, copy them there and list them in ``record``.

    A report that is there already is passed over; a later one with the same protocol takes the place of an earlier.

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
        for old in [entry for entry in known if entry["protocol"] == summary["protocol"]]:
            (folder / old["file"]).unlink(missing_ok=True)
            known.remove(old)
        entry = {"file": name, "sha256": sha256_file(folder / name), "report_sha256": digest, **summary}
        known.append(entry)
        added.append(name)
    record["evaluations"] = known
    return [entry["file"] for entry in known if entry["file"] in added]
