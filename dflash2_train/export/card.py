"""The model card of an exported drafter: a pure function of its ``config.json`` and ``run.json``.

So it can be rendered again when an evaluation is added, and can claim nothing that the records do not hold: a fact
that was not recorded is shown as such, a number that was not measured too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_train.export.card_evaluations import evaluation_lines
from dflash2_train.export.payload import CARD, MASK, RECORD
from dflash2_train.export.serving import THIS_FOLDER, serving_lines

NOT_RECORDED = "not recorded"
Facts = Sequence[tuple[str, object]]
TAGS = ("speculative-decoding", "dflash", "dflash2", "draft-model", "block-diffusion")
# Licence names that the Hub knows; any other goes in as "other" with its name.
HUB_LICENSES = frozenset(
    "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 "
    "cc-by-nc-nd-4.0 gpl-3.0 lgpl-3.0 openrail bigscience-openrail-m llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 "
    "gemma other unknown".split()
)
_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def dig(value: Any, *keys: str) -> Any:
    """The value under nested keys, or None where a level is missing: records of other versions lack some."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def shown(value: object) -> str:
    """A recorded value as text; None is not recorded."""
    if value is None:
        return NOT_RECORDED
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(header: Sequence[str], rows: Facts | Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows), ""]


def run_config(record: Mapping[str, Any]) -> Any:
    """The configuration that the weights were trained with, or that of the export where training left no record."""
    return dig(record, "source", "training", "config") or record["config"]


def _scalar(value: str) -> str:
    return value if _PLAIN_YAML.fullmatch(value) and value.lower() not in _YAML_WORDS else json.dumps(value)


def front_matter(record: Mapping[str, Any], *, licence: str | None = None, tags: Sequence[str] = TAGS) -> list[str]:
    """The metadata header that the Hub reads: licence (None = the target's), base model, data sets, tags."""
    licence = licence or str(record["target"]["license"])
    lines = ["---"]
    if licence.lower() in HUB_LICENSES:
        lines.append(f"license: {_scalar(licence.lower())}")
    else:
        lines += ["license: other", f"license_name: {_scalar(re.sub(r'[^a-z0-9.]+', '-', licence.lower()))}"]
    base = record["target"]["hub_id"]
    if base:
        # Of the Hub's four relations (adapter, finetune, merge, quantized) the one for weights that need their base.
        lines += [f"base_model: {_scalar(base)}", "base_model_relation: adapter"]
    datasets = sorted({source["path"] for source in _hub_sources(record)})
    if datasets:
        lines += ["datasets:", *(f"- {_scalar(name)}" for name in datasets)]
    lines += ["pipeline_tag: text-generation", "library_name: vllm", "tags:", *(f"- {tag}" for tag in tags), "---"]
    return lines


def _hub_sources(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Training prompt sources that are data sets of the Hub: these alone name a commit, or allow the newest."""
    sources = dig(run_config(record), "data", "train_prompts") or []
    return [
        source
        for source in sources
        if source["kind"] == "datasets" and (source.get("revision") or source.get("allow_unpinned"))
    ]


def architecture_facts(published: Mapping[str, Any], record: Mapping[str, Any]) -> Facts:
    """The table of the architecture; a DFlash 1 has neither convolution nor selector."""
    nested = published["dflash_config"]
    layers = published["layer_types"]
    sliding = layers.count("sliding_attention")
    attention = f"{len(layers) - sliding} full"
    if sliding:
        attention += f", {sliding} sliding with a window of {published['sliding_window']}"
    size = nested["block_size"]
    heads = f"{published['num_attention_heads']} query and {published['num_key_value_heads']} key heads"
    kernel = selector = "none"
    if "conv_kernel_size" in nested:
        kernel = f"{nested['conv_kernel_size']} tokens, groups of {nested['conv_group_size']} channels"
        selector = f"top {nested['selector_top_k']}, rank {nested['selector_rank']}"
    rope = published.get("rope_parameters") or {}
    target = f"{published['num_target_layers']} layers, hidden size {published['hidden_size']:,}"
    return (
        ("target", f"{shown(record['target']['name'])} ({target}, vocabulary {published['vocab_size']:,})"),
        ("drafter layers", f"{published['num_hidden_layers']} ({attention})"),
        ("parameters", dig(record, "export", "parameters")),
        ("weights", dig(record, "export", "dtype")),
        ("heads", f"{heads} of {published['head_dim']}"),
        ("feed-forward size", published["intermediate_size"]),
        ("taps (0-based target layers)", nested["target_layer_ids"]),
        ("block size", f"{size}: the anchor and {size - 1} drafted tokens"),
        ("mask token id", f"{nested['mask_token_id']}, {_mask_slots(record)}"),
        ("convolution", kernel),
        ("selector", selector),
        ("positions", f"up to {published['max_position_embeddings']:,}, rope theta {rope.get('rope_theta')}"),
        ("embedding and head", _tables(record)),
    )


def _mask_slots(record: Mapping[str, Any]) -> str:
    origin = dig(record, "conversion", "mask_slots")
    return f"with a learned vector in `{MASK}`" if origin is None else f"its slots take {origin}"


def _tables(record: Mapping[str, Any]) -> str:
    """Whose embedding and head the drafter works with."""
    tables = dig(record, "export", "tables")
    if not tables:
        return "the target's; not in this folder"
    folded = ", the trained vector in the mask token's row" if dig(record, "export", "mask_folded") else ""
    return f"the target's; copies in this folder: {', '.join(tables)}{folded}"


def loss_text(config: Mapping[str, Any]) -> str | None:
    """The recorded objective in words."""
    loss = dig(config, "loss")
    if not loss:
        return None
    if loss["position_weights"] == "dpace":
        weights = f"D-PACE slot weights with alpha {loss['dpace_alpha']:g}"
    else:
        end = "" if loss.get("gamma_end") is None else f" to {loss['gamma_end']:g}"
        weights = f"position decay gamma {loss['gamma']:g}{end}"
    top_k = dig(config, "data", "teacher_top_k")
    return (
        f"{loss['ce_weight']:g} x cross entropy + {loss['kl_weight']:g} x top-{top_k} KL ({loss['kl_kind']}), "
        f"{weights}, selector weight {loss['selector_weight']:g}"
    )


def sampling_text(record: Mapping[str, Any]) -> str | None:
    """How the target wrote the training text."""
    sampling = dig(record, "source", "training", "cache", "sampling") or dig(run_config(record), "data", "sampling")
    if not sampling:
        return None
    recorded = dig(record, "source", "training", "cache") or dig(run_config(record), "data")
    thinking = dig(recorded, "enable_thinking")
    mode = {True: "on", False: "off"}.get(thinking, "the template's default")  # type: ignore[call-overload]
    return (
        f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, top-k {sampling['top_k'] or 'off'}, "
        f"at most {sampling['max_tokens']:,} tokens, seed {sampling['seed']}, thinking: {mode}"
    )


def machine_text(machine: Mapping[str, Any] | None) -> str | None:
    """Hardware in one phrase."""
    if not machine:
        return None
    gpus = list(machine.get("gpus") or [])
    named = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    processor = f"{machine.get('cores')} cores of {machine.get('cpu')}, {machine.get('memory_gib')} GiB"
    return f"{named}; {processor}" if named else processor


def duration(seconds: float | None) -> str | None:
    """Hours, minutes, seconds."""
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min {rest} s" if minutes >= 60 else f"{minutes} min {rest} s"


def warm_start_text(record: Mapping[str, Any]) -> str | None:
    """What the drafter was started from, nearest first."""
    chain = dig(record, "source", "training", "warm_start")
    if chain is None:
        return None
    return " <- ".join(entry["name"] for entry in chain) or "none: trained from a fresh drafter"


def _training(record: Mapping[str, Any]) -> Facts:
    config, training = run_config(record), dig(record, "source", "training")
    train, progress = config["train"], dig(training, "progress")
    capture, git = dig(training, "data", "capture"), dig(training, "git")
    rate = f"{train['lr']:g} to {train['lr'] * train['final_lr_ratio']:g}, {train.get('schedule', 'cosine')}"
    rows = dig(progress, "rows_consumed")
    step, metrics = dig(record, "source", "step"), dig(training, "final_metrics") or {}
    size = capture and f"{capture['samples']:,} answers of the target, {capture['tokens']:,} tokens"
    return (
        ("captured data", size and f"{size}, {capture['supervised_tokens']:,} supervised"),
        ("answers sampled with", sampling_text(record)),
        ("loss", loss_text(config)),
        ("steps", step and f"{step:,} of {train['steps']:,}"),
        ("learning rate", rate),
        ("rows seen", rows and f"{rows:,} of {train['row_tokens']:,} tokens"),
        ("passes over the data", metrics.get("epoch")),
        ("last logged loss", metrics.get("loss") and f"{metrics['loss']:.4f}"),
        ("precision", train["dtype"]),
        ("seed", train["seed"]),
        ("started from", warm_start_text(record)),
        ("wall time", duration(dig(progress, "seconds"))),
        ("hardware", machine_text(dig(training, "machine"))),
        ("processes", dig(progress, "world_size")),
        ("code", dig(git, "commit")),
    )


def prompt_rows(record: Mapping[str, Any], split: str) -> list[tuple[str, object, object, str]]:
    """Source, licence, prompts kept, terms of each source of a split: as counted, else as configured."""
    counted = dig(record, "source", "training", "data", "prompts")
    if counted:
        return [
            (
                source["label"] + (f" @ {source['revision'][:12]}" if source.get("revision") else ""),
                ", ".join(f"{name} ({number:,})" for name, number in (source.get("licenses") or {}).items()) or None,
                source["kept"],
                source.get("terms") or "",
            )
            for source in counted
            if source["split"] == split
        ]
    configured = dig(run_config(record), "data", "train_prompts" if split == "train" else "holdout_prompts") or []
    return [
        (
            source.get("path") or f"{source['kind']} {source.get('split', '')}",
            source.get("license") or None,
            None,
            source.get("terms") or "",
        )
        for source in configured
    ]


def files_lines(hashes: Mapping[str, str]) -> list[str]:
    """The section that lists the files of the folder."""
    rows = [(f"`{name}`", f"`{digest}`") for name, digest in sorted(hashes.items()) if name != CARD]
    return [
        "## Files",
        "",
        *table(("file", "sha256"), rows),
        f"`{RECORD}` lists all of them; `dflash2-export verify-provenance {THIS_FOLDER}` computes them anew.",
        "",
    ]


def card_text(published: Mapping[str, Any], record: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """The model card, Markdown with a metadata header.

    Args:
        published: content of ``config.json``.
        record: content of ``run.json``, but for its hashes.
        hashes: name -> sha256 of the files that the card lists.
    """
    target = record["target"]
    name = run_config(record)["name"]
    sections = [
        front_matter(record),
        [
            "",
            f"# {name}: a DFlash 2 drafter for {target['name']}",
            "",
            "Speculative decoding: this small model proposes a block of tokens in one pass, the target checks them in "
            "one pass, and the output keeps the target's own distribution. It is no language model by itself.",
            "",
        ],
        ["## Architecture", "", *table(("", ""), architecture_facts(published, record))],
        serving_lines(
            published,
            target["hub_id"] or target["name"],
            record.get("repo_id") or THIS_FOLDER,
            num_proposals=dig(record, "export", "num_proposals"),
            mask_folded=bool(dig(record, "export", "mask_folded")),
        ),
        evaluation_lines(record, published),
        ["## Training", "", *table(("", ""), _training(record))],
        ["### Prompts", "", *table(("source", "licence", "prompts", "terms"), prompt_rows(record, "train"))],
        [f"All that is needed to repeat the run stands in `{RECORD}`: configuration, code, versions, data hashes.", ""],
        files_lines(hashes),
        [
            "## Licence",
            "",
            f"The target's licence is {target['license']}; the drafter was trained on the target's output and states. "
            "See `PROVENANCE.txt` for target, prompts and code.",
            "",
        ],
    ]
    return "\n".join(line for section in sections for line in section)
