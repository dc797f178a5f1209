"""Results in every form there is, read into :class:`EvalRun`: reports of this program, and published results.

A published result is the flat JSON that the evaluation kit of canada-quant/vllm-glm53-flash-sm121 writes: pooled counts
of one pass, rates by position. Its sums are checked before it is believed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.evaluate.report import SCHEMA_VERSION, EvalReport
from dflash2_train.evaluate.runs import (
    AUTOREGRESSIVE,
    HOLDOUT_TASK,
    PUBLISHED,
    Acceptance,
    Cell,
    EvalRun,
    RequestCounts,
    run_of_report,
)

PUBLISHED_KEYS = frozenset(
    {"label", "prompts", "ok", "fail", "concurrency", "max_tokens", "wall_s", "output_tokens", "drafts"}
)
ROUNDING = 0.002  # published means have three decimals, rates four, summed over up to 15 positions


class UnreadableRunError(UserError, ValueError):
    """A file that is no result, or one that contradicts itself."""


def read_run(path: Path) -> EvalRun:
    """The run in ``path``.

    Raises:
        UnreadableRunError: no such file, not a result of a known form, another schema version, or sums that disagree.
    """
    if path.is_dir():
        path = path / "report.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnreadableRunError(f"{path}: no such file. Name a report.json of dflash2-eval.") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UnreadableRunError(f"{path}: not JSON ({error}). Name a report.json of dflash2-eval.") from error
    try:
        return _parse(value)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UnreadableRunError(
            f"{path}: not a result that can be read ({reason}). Name a report.json of dflash2-eval."
        ) from error


def _parse(value: Any) -> EvalRun:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if PUBLISHED_KEYS <= value.keys():
        return run_of_published(value)
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version={version!r}, this program reads {SCHEMA_VERSION}")
    if "cells" in value:
        return EvalRun.from_json(value)
    return run_of_report(EvalReport.from_json(value))  # of the runner, written before reports had cells


def run_of_published(value: dict[str, Any]) -> EvalRun:
    """A published result.

    Raises:
        ValueError: its figures contradict each other.
    """
    acceptance = _published_acceptance(value)
    cell = Cell(
        task=HOLDOUT_TASK,
        method=AUTOREGRESSIVE if acceptance is None else "speculative",
        concurrency=int(value["concurrency"]),
        temperature=None,
        acceptance=acceptance,
        requests=RequestCounts(
            asked=int(value["prompts"]),
            answered=int(value["ok"]),
            failed={"not told": int(value["fail"])} if value["fail"] else {},
        ),
        output_tokens=int(value["output_tokens"]),
        seconds=float(value["wall_s"]),
        labels=["counts by position are worked out from rates of four digits"] if acceptance is not None else [],
    )
    return EvalRun(
        kind=PUBLISHED,
        label=str(value["label"]),
        protocol={
            "max_new_tokens": int(value["max_tokens"]),
            "num_drafted": len(acceptance.accepted_per_position) if acceptance is not None else None,
            "prompts": int(value["prompts"]),
        },
        cells=[cell],
        labels=["published elsewhere: hardware, prompts and sampling are not recorded in the file"],
    )


def _published_acceptance(value: dict[str, Any]) -> Acceptance | None:
    rounds, proposed = int(value["drafts"]), int(value["draft_tokens"])
    accepted = int(value["accepted_tokens"])
    if rounds == 0:
        if proposed or accepted:
            raise ValueError(f"drafts=0 with draft_tokens={proposed} and accepted_tokens={accepted}")
        return None
    stated = value["per_position_acceptance_rate"]
    rates = [float(stated[str(k)]) for k in range(len(stated))]
    rising = any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False))
    if rising or not 0 < proposed <= rounds * len(rates):
        raise ValueError(f"draft_tokens={proposed} in {rounds} drafts with rates by position of {rates}")
    _agree("mean_acceptance_length", value["mean_acceptance_length"], 1 + accepted / rounds)
    _agree("draft_token_acceptance_rate", value["draft_token_acceptance_rate"], accepted / proposed)
    _agree("1 + sum of per_position_acceptance_rate", 1 + sum(rates), 1 + accepted / rounds)
    return Acceptance(
        rounds=rounds,
        proposed=proposed,
        accepted=accepted,
        accepted_per_position=[round(rate * rounds) for rate in rates],
    )


def _agree(name: str, stated: float, derived: float) -> None:
    if not math.isclose(float(stated), derived, abs_tol=ROUNDING):
        raise ValueError(f"{name} is {stated}, the counts give {derived:.4f}")
