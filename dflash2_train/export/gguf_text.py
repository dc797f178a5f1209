"""What readers get to see of GGUF files: a table of sizes and errors, and a README beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig
from dflash2_train.export.serving import serving_commands
from dflash2_train.model.drafter_config import DrafterShape

LEGEND = (
    "- states: relative error of the states after the final norm",
    "- best token: share of slots whose best token by the unary logits is another one",
    "- path token, path: share of slots, and of whole blocks, in which the selector takes another way",
    "- confirmed: tokens of a path that the captured text has too before the two part; beside it the same of bf16",
)


def table_lines(files: dict[str, dict[str, Any]], comparison: dict[str, Any] | None) -> list[str]:
    """A Markdown table, one line a file; what its columns say stands in ``LEGEND``.

    Args:
        files: name -> entry of the record.
        comparison: of the record; None leaves the errors out.
    """
    errors = {} if comparison is None else comparison["files"]
    head = ["type", "MB", "bits a value"]
    head += ["states", "best token", "path token", "path"] if errors else []
    confirmed = bool(errors) and all(one["matched"] is not None for one in errors.values())
    head += ["confirmed"] if confirmed else []
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, entry in files.items():
        cells = [entry["type"], f"{entry['bytes'] / 1e6:.1f}", f"{entry['bits_per_value']:.2f}"]
        if errors:
            one = errors[name]
            shares = (one[key] for key in ("top_changed", "path_changed", "blocks_changed"))
            cells += [f"{one['hidden_error']:.2e}", *(f"{100 * share:.1f}%" for share in shares)]
        if confirmed:
            cells.append(f"{errors[name]['matched']:.3f} / {errors[name]['matched_reference']:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def readme_text(config: RunConfig, shape: DrafterShape, record: dict[str, Any]) -> str:
    """README of the folder, from its record alone.

    Args:
        config: the experiment.
        shape: of the drafter.
        record: content of ``gguf.json``.
    """
    files, comparison = record["files"], record["comparison"]
    target = Path(config.target.name).name if Path(config.target.name).exists() else config.target.name
    proposals = config.export.num_proposals
    block_size = shape.block_size if proposals is None else proposals + 1
    command = serving_commands(target, "THIS_FILE", block_size)["llama.cpp"]
    lines = [
        *("---", f"license: {config.target.license}", "tags:", "- gguf", "- speculative-decoding", "- dflash2", "---"),
        "",
        f"# {config.name}: a DFlash 2 drafter for {target}, as GGUF",
        "",
        "A drafter is no language model by itself: llama.cpp loads it beside the target's own GGUF. It needs a build "
        "that knows DFlash 2; an older one stops with a wrong number of tensors.",
        "",
        *("```sh", command.replace("drafter.gguf", next(iter(files))), "```"),
        "",
        f"In mask slots it embeds {record['mask_slots']}.",
        "",
        *("## Types", "", *table_lines(files, comparison), ""),
        *_how_measured(comparison),
        *("## sha256", "", *(f"- `{entry['sha256']}` {name}" for name, entry in files.items()), ""),
    ]
    return "\n".join(lines)


def _how_measured(comparison: dict[str, Any] | None) -> list[str]:
    if comparison is None:
        return ["Errors were not measured.", ""]
    captured = comparison["inputs"] == "captured data"
    return [
        f"Measured on {comparison['blocks']} blocks of {comparison['inputs']}, against the published weights; both "
        "in fp32 arithmetic, so only the stored values differ.",
        "",
        *(line for line in LEGEND if captured or "confirmed" not in line),
        "",
    ]
