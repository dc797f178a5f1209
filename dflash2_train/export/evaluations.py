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
from dflash2_train.provenance import public_value, sha256_file

SCHEMA_VERSIONS = (1,)
PROTOCOL_FACTS = (
    "experiment",
    "mode",
    "dtype",
    "device",
    "num_drafted",
    "concurrency",
    "max_new_tokens",
    "prompts",
    "prompts_sha256",
    "enable_thinking",
    "temperature",
    "top_p",
    "draft_sampling",
)
COUNTS = ("prompts", "rounds", "proposed", "accepted", "committed")
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
    if not isinstance(measured, dict) or not measured:
        raise EvaluationError(
            f"{path}: does not say which drafter it measured (protocol.drafter_sha256), so it is not taken into a card. "
            "Run dflash2-eval on this folder: eval.drafter=FOLDER."
        )
    other = [name for name, digest in sorted(measured.items()) if hashes.get(name) != digest]
    if other:
        raise EvaluationError(
            f"{path}: was measured with another drafter; {', '.join(other)} differ from the files of this folder. "
            "Run dflash2-eval on this folder: eval.drafter=FOLDER."
        )


def summarise(report: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the card shows of a report, every rate computed from its counts.

    Returns:
        ``protocol`` (selected facts), ``passes`` (see :func:`_pass`), ``equality``, ``speedup``, ``baseline_tokens_per_second``,
        ``time_utc`` and ``machine``.

    Raises:
        EvaluationError: a field is missing, or the counts contradict each other or the rates beside them.
    """
    protocol = report["protocol"]
    try:
        passes = [_pass("greedy", 0.0, report["greedy"], path)]
        if report.get("sampled"):
            temperature = float(protocol["temperature"])
            passes.append(_pass(f"sampled at temperature {temperature:g}", temperature, report["sampled"], path))
        evaluation = report["run"].get("evaluation") or {}
        equality, baseline = report.get("equality"), report.get("baseline")
        return {
            "protocol": {key: protocol.get(key) for key in PROTOCOL_FACTS},
            "passes": passes,
            "equality": equality
            and {
                **{key: equality[key] for key in ("rule", "prompts_checked", "prompts_equal")},
                "failures": len(equality["failures"]),
            },
            "speedup": report.get("speedup"),
            "baseline_tokens_per_second": baseline and baseline.get("decode_tokens_per_second"),
            "time_utc": evaluation.get("time_utc"),
            "machine": evaluation.get("machine"),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path}: a field is missing or of another kind ({error!r}). Run it again.") from error


def _pass(name: str, temperature: float, part: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Counts and rates of one pass over the prompts; lists have one entry a drafted position, 1..K."""
    counts, rates = part["counts"], part["rates"]
    rounds, accepted = counts["rounds"], counts["accepted"]
    length = counts["committed"] / rounds if rounds else None
    stated = rates["acceptance_length_pooled"]
    consistent = (
        counts["committed"] == accepted + rounds
        and sum(counts["accepted_per_position"]) == accepted
        and sum(counts["proposed_per_position"]) == counts["proposed"]
        and (length is stated is None or (length and stated and math.isclose(length, stated, rel_tol=1e-9)))
    )
    if not consistent:
        raise EvaluationError(f"{path}: the counts and rates of its {name} pass contradict each other. Run it again.")
    return {
        "name": name,
        "temperature": temperature,
        **{key: counts[key] for key in (*COUNTS, *POSITIONS)},
        "acceptance_length_pooled": length,
        "acceptance_length_per_request": rates["acceptance_length_per_request"],
        "tokens_per_second": (part.get("speed") or {}).get("decode_tokens_per_second"),
    }


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
        summary = summarise(report, path)
        if any(entry["report_sha256"] == digest for entry in known):
            continue
        name = f"evaluation-{digest[:12]}.json"
        public = public_value({**report, "run": {"evaluation": report["run"].get("evaluation")}})
        (folder / name).write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for old in [entry for entry in known if entry["protocol"] == summary["protocol"]]:
            (folder / old["file"]).unlink(missing_ok=True)
            known.remove(old)
        entry = {"file": name, "sha256": sha256_file(folder / name), "report_sha256": digest, **summary}
        known.append(entry)
        added.append(name)
    record["evaluations"] = known
    return added
