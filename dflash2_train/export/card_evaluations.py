"""The card's section about what was measured: acceptance with its raw counts, by position, with what limits it.

It shows what ``run.json`` lists under ``evaluations`` (:mod:`dflash2_train.export.evaluations`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_train.export.card_tables import (
    KINDS,
    NOT_MEASURED,
    drafted_by,
    kind_name,
    length_text,
    main_passes,
    pass_table,
    position_tables,
    task_table,
    where,
)
from dflash2_train.export.evaluations import thinking_notes

FEW_PROMPTS = 100
Entry = Mapping[str, Any]


def evaluation_lines(record: Entry, published: Entry) -> list[str]:
    """The section: a line for each way of measuring, and the details of what was measured."""
    entries: Sequence[Entry] = record.get("evaluations") or []
    lines = ["## Evaluation", ""]
    if not entries:
        lines += ["Nothing has been measured with these files yet: `dflash2-eval` does.", ""]
    lines += _overview(entries)
    for entry in entries:
        lines += _details(entry, record, published)
    return lines


def _overview(entries: Sequence[Entry]) -> list[str]:
    found: dict[str, list[str]] = {name: [] for name in KINDS.values()}
    for entry in entries:
        texts = [
            f"{length_text(part['acceptance_length_pooled'])} ({where(part, entry)})" for part in main_passes(entry)
        ]
        found.setdefault(kind_name(entry), []).extend(texts)
    return [
        "| measured with | acceptance length (pooled) |",
        "|---|---|",
        *(f"| {name} | {', '.join(texts) or NOT_MEASURED} |" for name, texts in found.items()),
        "",
        "Acceptance length: committed tokens a verify round, accepted drafts plus the target's own token; the token of "
        "the prefill is not counted. Pooled: over all rounds.",
        "",
    ]


def _details(entry: Entry, record: Entry, published: Entry) -> list[str]:
    protocol = entry["protocol"]
    told = ("hardware",) if entry["measured_with"] == "runner" else ("engine", "hardware")
    setting = ", ".join(str(protocol[key]) for key in told if protocol.get(key))
    return [
        f"### {kind_name(entry)[0].upper()}{kind_name(entry)[1:]}" + (f": {setting}" if setting else ""),
        "",
        *task_table(entry),
        *pass_table(entry),
        *position_tables(entry),
        *(f"- {note}" for note in notes(entry, record, published)),
        f"- Raw counts: `{entry['file']}`",
        "",
    ]


def notes(entry: Entry, record: Entry, published: Entry) -> list[str]:
    """What a reader must know to take the numbers for no more than they are."""
    protocol = entry["protocol"]
    limit = protocol["max_new_tokens"]
    found = [
        *_method_notes(entry),
        f"At most {'an unrecorded number of' if limit is None else limit} new tokens a prompt.",
    ]
    trained = published["dflash_config"]["block_size"] - 1
    drafted = list(dict.fromkeys(drafted_by(part, entry) for part in entry["passes"]))
    if drafted != [trained]:
        numbers = ", ".join(str(number) for number in drafted)
        found.append(f"{numbers} tokens were drafted a round; the drafter was trained for {trained}.")
    if len(drafted) > 1:
        found.append("Acceptance by position is shown for the largest K.")
    prompts = min(part["prompts"] for part in entry["passes"])
    if prompts < FEW_PROMPTS:
        found.append(f"Only {prompts} prompts: the digits after the point are uncertain.")
    failed = sum(part["failed_requests"] for part in entry["passes"])
    if failed:
        found.append(f"**{failed:,} requests failed** and are in none of these figures.")
    too_long = max(part.get("too_long", 0) for part in entry["passes"])
    if too_long:
        found.append(f"Up to {too_long:,} prompts of a pass do not fit the context and are in none of these figures.")
    found += thinking_notes(record, protocol.get("enable_thinking"))
    # What tables and notes above say already is not said again in the report's own words.
    told = [label for label in entry["labels"] if not label.startswith("greedy equality") and "do not fit" not in label]
    return list(dict.fromkeys([*found, *_outcome_notes(entry), *told]))


def _method_notes(entry: Entry) -> list[str]:
    protocol = entry["protocol"]
    if entry["measured_with"] == "runner":
        return [
            f"Decoded in {protocol.get('dtype')} on {protocol.get('device')}, {protocol.get('concurrency')} prompt at "
            "a time: acceptance is what it says, tokens/s is no server's."
        ]
    return [
        "The server does not tell which drafter it loaded; the hash in the report is that of the export it was "
        f"started with, as far as the run knows. Chat template: {protocol.get('template')}; prefix cache: "
        f"{protocol.get('prefix_caching')}."
    ]


def _outcome_notes(entry: Entry) -> list[str]:
    equality, found = entry["equality"], []
    if equality is None:
        found.append("Whether the output equals the target's own was not checked in this measurement.")
    else:
        verdict = f"**{equality['failures']} failed**" if equality["failures"] else "none failed"
        found.append(
            f"Greedy output equal to plain decoding on {equality['prompts_equal']} of {equality['prompts_checked']} "
            f"answers; rule: {equality['rule']}; {verdict}."
        )
    if entry["speedup"] is not None:
        slower = " Slower than plain decoding on this machine." if entry["speedup"] < 1 else ""
        found.append(f"Speed-up over plain decoding there: {entry['speedup']:.2f}x.{slower}")
    if entry["time_utc"]:
        found.append(
            f"Measured {entry['time_utc']}" + (f" from {_machine(entry['machine'])}." if entry["machine"] else ".")
        )
    return found


def _machine(machine: Entry) -> str:
    gpus = machine.get("gpus") or []
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.get('cores')} cores of {machine.get('cpu')}"
