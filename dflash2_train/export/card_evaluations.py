"""The card's section about what was measured: acceptance with its raw counts, by position, with what limits it.

It shows what ``run.json`` lists under ``evaluations`` (:mod:`dflash2_train.export.evaluations`) and nothing else.
"""

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
FEW_PROMPTS = 100


def _length(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3f}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def evaluation_lines(record: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    """The section, with one overview row for each way of measuring, and the details of what was measured."""
    entries: Sequence[Mapping[str, Any]] = record.get("evaluations") or []
    lines = ["## Evaluation", ""]
    if not entries:
        lines += ["Nothing has been measured with these files yet: `dflash2-eval` does.", ""]
    lines += _overview(entries)
    for entry in entries:
        lines += _details(entry, record, published)
    return lines


def _overview(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for kind, name in KINDS.items():
        passes = [(entry, part) for entry in entries if entry["protocol"]["mode"] == kind for part in entry["passes"]]
        rows += [
            f"| {name}, {part['name']} | {entry['protocol']['num_drafted']} | "
            f"{entry['protocol'].get('concurrency')} | {part['prompts']:,} | {_length(part['acceptance_length_pooled'])} |"
            for entry, part in passes
        ] or [f"| {name} | | | | {NOT_MEASURED} |"]
    header = "| measured with | drafted tokens | concurrency | prompts | acceptance length (pooled) |"
    return [
        header,
        "|" + "---|" * 5,
        *rows,
        "",
        "Acceptance length: committed tokens a verify round, accepted drafts plus the target's own token; the token of "
        "the prefill is not counted. Pooled: over all rounds.",
        "",
    ]


def _details(entry: Mapping[str, Any], record: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    lines = []
    for part in entry["passes"]:
        lines += [f"### {KINDS.get(entry['protocol']['mode'], entry['protocol']['mode'])}, {part['name']}", ""]
        lines += [*_pass_table(part), *_position_table(part)]
    lines += [f"- {note}" for note in notes(entry, record, published)]
    return [*lines, f"- Raw counts: `{entry['file']}`", ""]


def _pass_table(part: Mapping[str, Any]) -> list[str]:
    rounds, accepted, proposed = part["rounds"], part["accepted"], part["proposed"]
    speed = part.get("tokens_per_second")
    rows = [
        ("acceptance length (pooled)", f"{_length(part['acceptance_length_pooled'])} "
         f"({part['committed']:,} committed / {rounds:,} rounds)"),
        ("acceptance length (per request)", f"{_length(part['acceptance_length_per_request'])} "
         f"(mean over {part['prompts']:,} prompts)"),
        ("acceptance rate", f"{_percent(accepted, proposed)} ({accepted:,} accepted / {proposed:,} proposed)"),
        ("decode tokens/s", NOT_MEASURED if speed is None else f"{speed:.1f}"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _position_table(part: Mapping[str, Any]) -> list[str]:
    """Accepted drafts by position, of the rounds that proposed one there and of those that reached it."""
    columns = zip(
        part["accepted_per_position"], part["reached_per_position"], part["proposed_per_position"], strict=True
    )
    return [
        "| drafted position | accepted | of all rounds | given all before it |",
        "|---|---|---|---|",
        *(
            f"| {place} | {accepted:,} | {_percent(accepted, proposed)} | {_percent(accepted, reached)} |"
            for place, (accepted, reached, proposed) in enumerate(columns, start=1)
        ),
        "",
    ]


def notes(entry: Mapping[str, Any], record: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    """What a reader must know to take the numbers for no more than they are."""
    protocol, found = entry["protocol"], []
    if protocol["mode"] == "runner":
        found.append(
            f"Decoded by the built-in runner in {protocol.get('dtype')} on {protocol.get('device')}, "
            f"{protocol.get('concurrency')} prompt at a time: acceptance is what it says, tokens/s is no server's."
        )
    found.append(f"Held-out prompts, at most {protocol.get('max_new_tokens')} new tokens each.")
    trained = published["dflash_config"]["block_size"] - 1
    if protocol["num_drafted"] != trained:
        found.append(f"{protocol['num_drafted']} tokens were drafted a round; the drafter was trained for {trained}.")
    prompts = min(part["prompts"] for part in entry["passes"])
    if prompts < FEW_PROMPTS:
        found.append(f"Only {prompts} prompts: the digits after the point are uncertain.")
    cache = (record.get("source") or {}).get("training") or {}
    mode = (cache.get("cache") or {}).get("enable_thinking")
    if cache and mode != protocol.get("enable_thinking"):
        found.append(
            f"Measured with enable_thinking={protocol.get('enable_thinking')}, but trained on text with {mode}."
        )
    return [*found, *_outcome_notes(entry)]


def _outcome_notes(entry: Mapping[str, Any]) -> list[str]:
    equality, found = entry.get("equality"), []
    if equality is None:
        found.append("Whether the output equals the target's own was not checked in this measurement.")
    else:
        verdict = f"**{equality['failures']} failed**" if equality["failures"] else "none failed"
        found.append(
            f"Greedy output equal to plain decoding on {equality['prompts_equal']} of {equality['prompts_checked']} "
            f"prompts; rule: {equality['rule']}; {verdict}."
        )
    if entry.get("speedup") is not None:
        slower = " Slower than plain decoding on this machine." if entry["speedup"] < 1 else ""
        found.append(f"Speed-up over plain decoding there: {entry['speedup']:.2f}x.{slower}")
    if entry.get("time_utc"):
        found.append(f"Measured {entry['time_utc']} on {_machine(entry.get('machine'))}.")
    return found


def _machine(machine: Mapping[str, Any] | None) -> str:
    if not machine:
        return "a machine that was not recorded"
    gpus = machine.get("gpus") or []
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.get('cores')} cores of {machine.get('cpu')}"
