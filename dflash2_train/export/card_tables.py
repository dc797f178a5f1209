"""The card's tables of what was measured: by task, pass by pass with counts, and by drafted position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"
KINDS = {
    "runner": "built-in runner",
    "vllm": "served by vLLM",
    "sglang": "served by SGLang",
    "llama.cpp": "served by llama.cpp",
}
Entry = Mapping[str, Any]


def kind_name(entry: Entry) -> str:
    """What an evaluation was measured with, in words."""
    name = str(entry["measured_with"])
    return KINDS.get(name, f"served by {name}")


def drafted_by(part: Entry, entry: Entry) -> Any:
    """K of a pass; None where it is not recorded. Passes of earlier versions have that of their protocol."""
    found = part.get("num_drafted")
    return entry["protocol"].get("num_drafted") if found is None else found


def main_passes(entry: Entry) -> list[Entry]:
    """The passes with the largest K: of a sweep over K the others are in its table alone."""
    passes: list[Entry] = list(entry["passes"])
    largest = max((drafted_by(part, entry) or 0 for part in passes), default=0)
    return [part for part in passes if (drafted_by(part, entry) or 0) == largest]


def where(part: Entry, entry: Entry) -> str:
    """A pass in words; the temperature stands there where the task has several."""
    same = {other["temperature"] for other in entry["passes"] if other["name"] == part["name"]}
    temperature = f", {_temperature(part)}" if len(same) > 1 else ""
    return f"{part['name']}{temperature}, {part['concurrency']} in flight"


def length_text(value: float | None) -> str:
    """An acceptance length."""
    return NOT_MEASURED if value is None else f"{value:.3f}"


def task_table(entry: Entry) -> list[str]:
    """Pooled acceptance length of every task, at every temperature and concurrency; nothing unless there are several.

    Of a sweep over K the largest stands here.
    """
    columns: dict[str, dict[str, float | None]] = {}
    tasks: dict[str, None] = {}
    for part in main_passes(entry):
        task = str(part.get("task"))  # not kept by earlier versions, whose passes have one table alone
        tasks[task] = None
        way = f"{_temperature(part)}, {part['concurrency']} in flight"
        columns.setdefault(way, {})[task] = part["acceptance_length_pooled"]
    if len(tasks) < 2:
        return []
    rows = [(task, *(length_text(column.get(task)) for column in columns.values())) for task in tasks]
    drafted = drafted_by(main_passes(entry)[0], entry)
    return _markdown((f"acceptance length, K={drafted}", *columns), rows)


def pass_table(entry: Entry) -> list[str]:
    """Every pass with its counts."""
    header = ("", "temperature", "K", "in flight", "prompts", "pooled acceptance length", "mean over prompts")
    rows = []
    for part in entry["passes"]:
        speed = part["tokens_per_second"]
        speedup = part.get("speedup", entry.get("speedup") if part["name"] == "greedy" else None)
        rows.append(
            (
                part["name"],
                NOT_MEASURED if part["temperature"] is None else f"{part['temperature']:g}",
                str(drafted_by(part, entry) or NOT_MEASURED),
                str(part["concurrency"]),
                f"{part['prompts']:,}",
                f"{length_text(part['acceptance_length_pooled'])} ({part['committed']:,} / {part['rounds']:,} rounds)",
                length_text(part["acceptance_length_per_request"]),
                f"{_percent(part['accepted'], part['proposed'])} ({part['accepted']:,} of {part['proposed']:,})",
                NOT_MEASURED if speed is None else f"{speed:,.1f}",
                NOT_MEASURED if speedup is None else f"{speedup:.2f}x",
            )
        )
    return _markdown((*header, "drafts accepted", "tokens/s", "against plain decoding"), rows)


def position_tables(entry: Entry) -> list[str]:
    """Accepted drafts by position with the largest K, of all rounds and of those that accepted everything before."""
    passes = main_passes(entry)
    width = max(len(part["accepted_per_position"]) for part in passes)
    if not width:
        return []
    lines = []
    for title, whole in (("of all rounds", "proposed_per_position"), ("given all before it", "reached_per_position")):
        rows = []
        for part in passes:
            pairs = list(zip(part["accepted_per_position"], part[whole], strict=True))
            shares = [_percent(accepted, rounds) for accepted, rounds in pairs] + ["-"] * (width - len(pairs))
            rows.append((where(part, entry), *shares))
        lines += _markdown((f"accepted at position, {title}", *(str(k + 1) for k in range(width))), rows)
    return lines


def _temperature(part: Entry) -> str:
    value = part["temperature"]
    if value is None:
        return "temperature not recorded"
    return "greedy" if value == 0 else f"T={value:g}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]
