"""PROVENANCE.txt of an exported drafter: where target, text, weights and numbers come from, for people to read.

A pure function of ``run.json``, which holds the same and more for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash2_train.export.card import (
    dig,
    duration,
    loss_text,
    machine_text,
    prompt_rows,
    run_config,
    sampling_text,
    shown,
)

HASHES = "sha256:"


def _code(git: Mapping[str, Any] | None) -> str:
    if not git or not git.get("commit"):
        return "commit unknown (not run from a checkout)"
    changed = git.get("uncommitted_sha256")
    return f"commit {git['commit']}" + (f", with uncommitted changes (sha256 {changed})" if changed else "")


def _versions(packages: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (packages or {}).items()) or shown(None)


def _target(record: Mapping[str, Any]) -> list[str]:
    target, cache = record["target"], dig(record, "source", "training", "cache")
    return [
        f"target: {target['name']}, revision {target['revision'] or 'none (a local folder)'}",
        f"  licence: {target['license']}",
        f"  hash: {target['hash']}",
        f"  tokenizer hash: {shown(dig(cache, 'tokenizer_hash'))}",
        f"  chat template hash: {shown(dig(cache, 'chat_template_hash'))}",
    ]


def _data(record: Mapping[str, Any]) -> list[str]:
    training = dig(record, "source", "training")
    lines = []
    for title, split in (("training prompts", "train"), ("held-out prompts (removed from training)", "holdout")):
        lines.append(f"{title}:")
        for label, licence, kept, terms in prompt_rows(record, split):
            named = licence or "as its rows say"
            counted = f"; {shown(kept)} prompts" if kept is not None else ""
            lines.append(f"  - {label}; licence: {named}{counted}" + (f"; terms: {terms}" if terms else ""))
    removed = dig(training, "data", "removed_for_overlap")
    capture, cache = dig(training, "data", "capture"), dig(training, "cache")
    size = capture and (
        f"{capture['samples']:,} answers, {capture['tokens']:,} tokens, {capture['supervised_tokens']:,} supervised"
    )
    return [
        *lines,
        f"training prompts removed for an overlap: {shown(removed)}",
        f"answers: written by the target, {sampling_text(record) or shown(None)}",
        f"  written by: {shown(dig(cache, 'generated_by'))}; states captured by: {shown(dig(cache, 'captured_by'))}",
        f"  captured: {shown(size)}",
        f"  conversations hash: {shown(dig(cache, 'conversations'))}",
    ]


def _training(record: Mapping[str, Any]) -> list[str]:
    source, training, config = record.get("source") or {}, dig(record, "source", "training"), run_config(record)
    progress = dig(training, "progress")
    metrics = dig(training, "final_metrics") or {}
    last = ", ".join(f"{name} {metrics[name]:.6g}" for name in sorted(metrics) if name not in ("step", "attempt"))
    return [
        f"run: {record.get('run_id') or shown(None)}",
        f"  code: {_code(dig(training, 'git'))}",
        f"  started: {shown(dig(training, 'time_utc'))}, wall time {shown(duration(dig(progress, 'seconds')))}, "
        f"attempts {shown(dig(progress, 'attempt'))}",
        f"  hardware: {shown(machine_text(dig(training, 'machine')))}, processes {shown(dig(progress, 'world_size'))}",
        f"  versions: Python {shown(dig(training, 'python'))}, {_versions(dig(training, 'packages'))}",
        f"  loss: {shown(loss_text(config))}",
        f"  steps: {shown(source.get('step'))} of {config['train']['steps']:,}, seed {config['train']['seed']}, "
        f"rows seen {shown(dig(progress, 'rows_consumed'))}, windows dropped {shown(dig(progress, 'dropped'))}",
        f"  last logged step: {shown(metrics.get('step'))}: {last or shown(None)}",
        *_warm_start(training),
        f"weights: {shown(source.get('weights'))} of {shown(source.get('checkpoint'))}, "
        f"sha256 {shown(source.get('weights_sha256'))}",
    ]


def _warm_start(training: Any) -> list[str]:
    chain = dig(training, "warm_start")
    if chain is None:
        return [f"  started from: {shown(None)}"]
    if not chain:
        return ["  started from: a fresh drafter"]
    lines = ["  started from, nearest first:"]
    for entry in chain:
        lines.append(f"    - {entry['name']} ({entry['kind']}), run {shown(entry.get('run_id'))}")
        lines += [f"        {digest}  {name}" for name, digest in sorted(entry["files"].items())]
    return lines


def evaluation_text(record: Mapping[str, Any]) -> list[str]:
    """What was measured with these files, a line for each report and its hash."""
    entries = record.get("evaluations") or []
    if not entries:
        return ["evaluations: none recorded"]
    lines = ["evaluations:"]
    for entry in entries:
        passes = ", ".join(_pass(part) for part in entry["passes"])
        lines.append(f"  - {entry['file']} ({entry['measured_with']}): acceptance length {passes}")
        lines.append(f"    report as measured: sha256 {entry['report_sha256']}")
        prompts = {str(part.get("task", part["name"])): part.get("prompts_sha256") for part in entry["passes"]}
        lines += [f"    prompts of {task}: sha256 {digest}" for task, digest in prompts.items() if digest]
    return lines


def _pass(part: Mapping[str, Any]) -> str:
    """A pass and its figure; K where it is recorded."""
    drafted, temperature = part.get("num_drafted"), part["temperature"]
    how = f" (temperature {shown(temperature)}" + (f", K={drafted})" if drafted is not None else ")")
    return f"{part['name']}{how} {part['acceptance_length_pooled']}"


def provenance_text(record: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """The whole text.

    Args:
        record: content of ``run.json``, but for its hashes.
        hashes: name -> sha256 of the files to list; ``verify-provenance`` reads them back.
    """
    lines = [
        f"drafter: {run_config(record)['name']}, made with dflash2-train (Apache-2.0)",
        f"written: {record.get('time_utc') or 'unknown'}, code: {_code(record.get('git'))}",
        "",
        *_target(record),
        "",
        *_data(record),
        "",
        *_training(record),
        "",
        *evaluation_text(record),
        "",
        "Everything else that is needed to repeat it, every setting included: run.json.",
        "",
        HASHES,
        *(f"  {digest}  {name}" for name, digest in sorted(hashes.items())),
    ]
    return "\n".join(lines) + "\n"


def listed_hashes(text: str) -> dict[str, str]:
    """Name -> sha256 as :func:`provenance_text` listed them; empty for a text without the list."""
    _, found, tail = text.rpartition(f"\n{HASHES}\n")
    pairs = [line.split(maxsplit=1) for line in tail.splitlines() if line.strip()] if found else []
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
