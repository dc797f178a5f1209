"""What a report measured, pass by pass, every rate computed anew from its raw counts.

A *pass* is one way of decoding all prompts of one task: the hold-out greedily, or a task at one K, temperature and
concurrency. Passes are JSON values, as ``run.json`` keeps them and the card shows them; those of earlier versions lack
some keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError

COUNTS = ("rounds", "proposed", "accepted", "committed")
POSITIONS = ("proposed_per_position", "reached_per_position", "accepted_per_position")
HOLDOUT, PLAIN, DRAFTER = "hold-out", "autoregressive", "drafter"
SERVER = "server"
Report = Mapping[str, Any]
Pass = dict[str, Any]


class EvaluationError(UserError):
    """A report that cannot stand in a card; the text names the file and the reason."""


def passes_of(report: Report, path: Path) -> list[Pass]:
    """All passes of a report, in its order.

    Raises:
        EvaluationError: it measured something else than a drafter, or counts contradict each other or their rates.
        KeyError, TypeError: a field is missing or of another kind.
    """
    if report["protocol"]["mode"] == SERVER or "greedy" not in report:
        return _cells(report, path)
    return _holdout(report, path)


def _holdout(report: Report, path: Path) -> list[Pass]:
    """The greedy pass of the built-in runner over the hold-out, and the sampled one if there was one."""
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
            "task": HOLDOUT,
            "temperature": temperature,
            "num_drafted": protocol["num_drafted"],
            "concurrency": protocol.get("concurrency"),
            "prompts": counts["prompts"],
            "prompts_sha256": protocol.get("prompts_sha256"),
            **{key: counts[key] for key in (*COUNTS, *POSITIONS)},
            "acceptance_length_pooled": _ratio(counts["committed"], counts["rounds"]),
            "acceptance_length_per_request": rates["acceptance_length_per_request"],
            "tokens_per_second": (part.get("speed") or {}).get("decode_tokens_per_second"),
            "speedup": report.get("speedup") if temperature == 0 else None,
            "failed_requests": 0,
            "too_long": report.get("too_long", 0),
        }
        _refuse_contradiction(found, path, stated=rates["acceptance_length_pooled"])
        passes.append(found)
    return passes


def _cells(report: Report, path: Path) -> list[Pass]:
    """Each cell that drafts: a task, or a category of it, at one K, temperature and concurrency.

    The runner measures plain decoding in cells of its own, which give the speed-up; a server's baseline is a run of its
    own.
    """
    served = report["protocol"]["mode"] == SERVER
    plain = {_place(cell): cell for cell in report["cells"] if cell["method"] == PLAIN and not served}
    passes = []
    for cell in report["cells"]:
        acceptance = cell["acceptance"]
        if cell["method"] == PLAIN and not served:
            continue
        if cell["method"] != DRAFTER or acceptance is None:
            raise EvaluationError(f"{path}: measured {cell['method']}, not this drafter. Name a run of the drafter.")
        found = _pass_of_cell(cell, acceptance, report["protocol"].get("num_drafted"))
        baseline = plain.get(_place(cell))
        if baseline is not None and found["tokens_per_second"]:
            found["speedup"] = _ratio(found["tokens_per_second"], _pace(baseline) or 0)
        _refuse_contradiction(found, path, stated=found["acceptance_length_pooled"])
        passes.append(found)
    if not passes:
        raise EvaluationError(f"{path}: holds no measurement of a drafter. Name a run of the drafter.")
    return passes


def _pass_of_cell(cell: Report, acceptance: Report, num_drafted: int | None) -> Pass:
    rounds, accepted = acceptance["rounds"], acceptance["accepted"]
    by_position = list(acceptance["accepted_per_position"])
    name = " / ".join(part for part in (cell["task"], cell.get("category")) if part)
    return {
        "name": name,
        "task": name,
        "temperature": cell["temperature"],
        "num_drafted": num_drafted if cell.get("num_drafted") is None else cell["num_drafted"],
        "concurrency": cell["concurrency"],
        "prompts": cell["requests"]["answered"],
        "prompts_sha256": cell.get("prompts_sha256"),
        "rounds": rounds,
        "proposed": acceptance["proposed"],
        "accepted": accepted,
        "committed": accepted + rounds,
        "proposed_per_position": [rounds] * len(by_position),  # all K in every round; servers: in nearly every one
        "reached_per_position": [rounds, *by_position][: len(by_position)],
        "accepted_per_position": by_position,
        "acceptance_length_pooled": _ratio(accepted + rounds, rounds),
        "acceptance_length_per_request": _mean_length(cell.get("per_request")),
        "tokens_per_second": _pace(cell),
        "speedup": None,
        "failed_requests": sum(cell["requests"]["failed"].values()),
        "too_long": cell["requests"].get("too_long", 0),
    }


def _place(cell: Report) -> tuple[Any, ...]:
    """What a speed-up needs alike: the same prompts, decoded in the same way but for the drafts."""
    return tuple(cell.get(key) for key in ("task", "category", "temperature", "concurrency", "prompts_sha256"))


def _pace(cell: Report) -> float | None:
    """Tokens a second: of decoding, after each first token, where the runner timed the parts; else over the wall."""
    parts = cell.get("seconds_by_part")
    if not parts:
        return _ratio(cell["output_tokens"], cell["seconds"])
    after_first = cell["output_tokens"] - cell["requests"]["answered"]
    return _ratio(after_first, sum(parts.values()) - parts.get("prefill", 0.0))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean_length(rows: list[list[int]] | None) -> float | None:
    """Mean over requests of 1 + accepted / rounds; rows hold prompt, rounds, accepted, prompt tokens."""
    lengths = [1 + row[2] / row[1] for row in rows or [] if row[1]]
    return sum(lengths) / len(lengths) if lengths else None


def _refuse_contradiction(found: Report, path: Path, *, stated: float | None) -> None:
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
