"""What readers get to see of GGUF files: a table of sizes and errors, and a README beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig
from dflash2_train.export.card import serving_commands
from dflash2_train.model.drafter_config import DrafterShape


def table_lines(files: dict[str, dict[str, Any]], comparison: dict[str, Any] | None) -> list[str]:
    """A Markdown table, one line a file.

    Args:
        files: name -> entry of the record.
        comparison: of the record; None leaves the errors out.
    """
    head = ["type", "MB", "bits a value"]
    if comparison is not None:
        head += ["states, relative error", "best token changed", "path token changed", "paths changed"]
    confirmed = comparison is not None and all(one["matched"] is not None for one in comparison["files"].values())
    if confirmed:
        head.append("tokens of a path that the data confirms")
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, entry in files.items():
        cells = [entry["type"], f"{entry['bytes'] / 1e6:.1f}", f"{entry['bits_per_value']:.2f}"]
        if comparison is not None:
            one = comparison["files"][name]
            shares = (one[key] for key in ("top_changed", "path_changed", "blocks_changed"))
            cells += [f"{one['hidden_error']:.2e}", *(f"{100 * share:.1f}%" for share in shares)]
            if confirmed:
                cells.append(f"{one['matched']:.3f} (bf16: {one['matched_reference']:.3f})")
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
    command = serving_commands(target, "THIS_FILE", shape.block_size)["llama.cpp"]
    own_table = any(entry["tensors"] > 6 + 15 * shape.num_layers for entry in files.values())
    lines = [
        "---",
        f"license: {config.target.license}",
        "tags:",
        "- gguf",
        "- speculative-decoding",
        "- dflash2",
        "---",
        "",
        f"# {config.name}: a DFlash 2 drafter for {target}, as GGUF",
        "",
        "A drafter is no language model by itself: llama.cpp loads it beside the target's own GGUF. It needs a build "
        "that knows DFlash 2 (architecture `dflash` with a selector); an older one stops with a wrong number of "
        "tensors.",
        "",
        "```sh",
        command.replace("drafter.gguf", next(iter(files))),
        "```",
        "",
        "The files carry a token table of their own, in which the mask token's row is the learned mask vector."
        if own_table
        else "The files carry no token table: llama.cpp takes the target's, mask token included.",
        "",
        "## Types",
        "",
        *table_lines(files, comparison),
        "",
    ]
    if comparison is not None:
        lines += [
            f"Measured on {comparison['blocks']} blocks of {comparison['inputs']}, against the published bf16 weights; "
            "both in fp32 arithmetic, so only the stored values differ.",
            "",
        ]
    lines += ["## sha256", "", *(f"- `{entry['sha256']}` {name}" for name, entry in files.items()), ""]
    return "\n".join(lines)
