"""The card's section about what was measured: acceptance with its raw counts, by position, with what limits it.

It shows what ``run.json`` lists under ``evaluations`` (:mod:`dflash2_train.export.evaluations`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_train.export.evaluations import thinking_notes

NOT_MEASURED = "not measured"
KINDS = {
    "runner": "built-in runner",
    "vllm": "served by vLLM",
    "sglang": "served by SGLang",
    "llama.cpp": "served by llama.cpp",
}
FEW_PROMPTS = 100
Entry = Mapping[str, Any]


def _length(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3f}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _kind(entry: Entry) -> str:
    name = str(entry["measured_with"])
    return KINDS.get(name, f"served by {name}")


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
        texts = [f"{_length(part['acceptance_length_pooled'])} ({_where(part)})" for part in entry["passes"]]
        found.setdefault(_kind(entry), []).extend(texts)
    return [
        "| measured with | acceptance length (pooled) |",
        "|---|---|",
        *(f"| {name} | {', '.join(texts) or NOT_MEASURED} |" for name, texts in found.items()),
        "",
        "Acceptance length: committed tokens a verify round, accepted drafts plus the target's own token; the token of "
        "the prefill is not counted. Pooled: over all rounds.",
        "",
    ]


def _where(part: Entry) -> str:
    return f"{part['name']}, {part['concurrency']} in flight"


def _details(entry: Entry, record: Entry, published: Entry) -> list[str]:
    protocol = entry["protocol"]
    setting = ", ".join(str(protocol[key]) for key in ("engine", "hardware") if protocol.get(key))
    return [
        f"### {_kind(entry)[0].upper()}{_kind(entry)[1:]}" + (f": {setting}" if setting else ""),
        "",
        *_pass_table(entry["passes"]),
        *_position_tables(entry["passes"]),
        *(f"- {note}" for note in notes(entry, record, published)),
        f"- Raw counts: `{entry['file']}`",
        "",
    ]


def _pass_table(passes: Sequence[Entry]) -> list[str]:
    rows = []
    for part in passes:
        speed, temperature = part["tokens_per_second"], part["temperature"]
        cells = (
            part["name"],
            NOT_MEASURED if temperature is None else f"{temperature:g}",
            part["concurrency"],
            f"{part['prompts']:,}",
            f"{_length(part['acceptance_length_pooled'])} ({part['committed']:,} / {part['rounds']:,} rounds)",
            _length(part["acceptance_length_per_request"]),
            f"{_percent(part['accepted'], part['proposed'])} ({part['accepted']:,} of {part['proposed']:,})",
            NOT_MEASURED if speed is None else f"{speed:,.1f}",
        )
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    header = "pooled acceptance length | mean over prompts | drafts accepted | tokens/s |"
    return [f"| | temperature | in flight | prompts | {header}", "|" + "---|" * 8, *rows, ""]


def _position_tables(passes: Sequence[Entry]) -> list[str]:
    """Accepted drafts by position, of all rounds and of those that had accepted everything before."""
    width = max(len(part["accepted_per_position"]) for part in passes)
    lines = []
    for title, whole in (("of all rounds", "proposed_per_position"), ("given all before it", "reached_per_position")):
        lines += [f"| accepted at position, {title} | " + " | ".join(str(k + 1) for k in range(width)) + " |"]
        lines += ["|" + "---|" * (width + 1)]
        for part in passes:
            pairs = list(zip(part["accepted_per_position"], part[whole], strict=True))
            shares = [_percent(accepted, rounds) for accepted, rounds in pairs] + ["-"] * (width - len(pairs))
            lines.append(f"| {_where(part)} | " + " | ".join(shares) + " |")
        lines.append("")
    return lines if width else []


def notes(entry: Entry, record: Entry, published: Entry) -> list[str]:
    """What a reader must know to take the numbers for no more than they are."""
    protocol = entry["protocol"]
    limit = protocol["max_new_tokens"]
    found = [
        *_method_notes(entry),
        f"At most {'an unrecorded number of' if limit is None else limit} new tokens a prompt.",
    ]
    trained = published["dflash_config"]["block_size"] - 1
    if protocol["num_drafted"] != trained:
        found.append(f"{protocol['num_drafted']} tokens were drafted a round; the drafter was trained for {trained}.")
    prompts = min(part["prompts"] for part in entry["passes"])
    if prompts < FEW_PROMPTS:
        found.append(f"Only {prompts} prompts: the digits after the point are uncertain.")
    failed = sum(part["failed_requests"] for part in entry["passes"])
    if failed:
        found.append(f"**{failed:,} requests failed** and are in none of these figures.")
    found += thinking_notes(record, protocol.get("enable_thinking"))
    return list(dict.fromkeys([*found, *_outcome_notes(entry), *entry["labels"]]))


def _method_notes(entry: Entry) -> list[str]:
    protocol = entry["protocol"]
    if entry["measured_with"] == "runner":
        return [
            f"Decoded in {protocol.get('dtype')} on {protocol.get('device')}, {protocol.get('concurrency')} prompt at "
            "a time, held-out prompts: acceptance is what it says, tokens/s is no server's."
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
            f"prompts; rule: {equality['rule']}; {verdict}."
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
