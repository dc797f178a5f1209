"""The texts of an export, made from its own records: the model card and where everything comes from.

Nothing is claimed that is not in the records: measurements appear only when the caller hands them over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import LossConfig, PromptSourceConfig, RunConfig

if TYPE_CHECKING:
    from dflash2_train.target import TargetInfo

SOURCE_NAMES = {"starter": "the project's own starter prompts"}


def _front_matter(config: RunConfig) -> list[str]:
    lines = ["---", f"license: {config.target.license}"]
    if not Path(config.target.name).exists():  # a local folder is no name that a reader could look up
        lines.append(f"base_model: {config.target.name}")
    return [*lines, "pipeline_tag: text-generation", "tags:", "- speculative-decoding", "- dflash2", "---"]


def _target_label(config: RunConfig) -> str:
    """The target's public name: a Hub id as it is, of a local folder the last part alone."""
    name = config.target.name
    return Path(name).name if Path(name).exists() else name


def _facts(config: RunConfig, published: dict[str, Any]) -> list[str]:
    nested = published["dflash_config"]
    sliding = published["layer_types"].count("sliding_attention")
    attention = f"{len(published['layer_types']) - sliding} full"
    if sliding:
        attention += f", {sliding} sliding with a window of {published['sliding_window']}"
    rows = [
        (
            "target",
            f"{_target_label(config)} ({published['num_target_layers']} layers, hidden {published['hidden_size']})",
        ),
        ("drafter layers", f"{published['num_hidden_layers']} ({attention})"),
        (
            "heads",
            f"{published['num_attention_heads']} query and {published['num_key_value_heads']} key heads "
            f"of {published['head_dim']}",
        ),
        ("taps (0-based target layers)", str(nested["target_layer_ids"])),
        ("block size", f"{nested['block_size']}: the anchor and {nested['block_size'] - 1} drafted tokens"),
        ("mask token id", f"{nested['mask_token_id']}, with a learned vector in `mask_embedding.pt`"),
        ("selector", f"top {nested['selector_top_k']}, rank {nested['selector_rank']}"),
        ("positions", f"up to {published['max_position_embeddings']}"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def serving_commands(target: str, drafter: str, block_size: int) -> dict[str, str]:
    """Server -> its launch command with the right number: K for vLLM and llama.cpp, W for SGLang.

    Args:
        target: Hub id or folder of the target.
        drafter: Hub id or folder of the exported drafter.
        block_size: W, the anchor included.
    """
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return {
        "vLLM": f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {block_size}"
        ),
        "llama.cpp": (
            "llama-server -m target.gguf --spec-type draft-dflash --spec-draft-model drafter.gguf "
            f"--spec-draft-n-max {block_size - 1}"
        ),
    }


def _serving(config: RunConfig, published: dict[str, Any]) -> list[str]:
    size = published["dflash_config"]["block_size"]
    lines = ["## Serving", ""]
    for server, command in serving_commands(_target_label(config), "THIS_FOLDER", size).items():
        lines += [f"{server}:", "", "```sh", command, "```", ""]
    return [
        *lines,
        f"vLLM counts drafted tokens ({size - 1}), SGLang the whole block ({size}). More than that was never trained.",
        "",
        "Only vLLM and dflash2-train's own runner read `mask_embedding.pt`; vLLM logs `Loaded DFlash mask embedding` "
        "at start. SGLang and llama.cpp's own converter embed the target's row of the mask token instead, so expect "
        "fewer accepted tokens there. For llama.cpp `dflash2-export` with `export.format=gguf` writes files that carry "
        "the vector.",
        "",
    ]


def _slot_weights(loss: LossConfig) -> str:
    if loss.position_weights == "dpace":
        return f"D-PACE slot weights with alpha {loss.dpace_alpha:g}"
    end = "" if loss.gamma_end is None else f" to {loss.gamma_end:g}"
    return f"position decay gamma {loss.gamma:g}{end}"


def _recipe(config: RunConfig) -> list[str]:
    train, loss, sampling = config.train, config.loss, config.data.sampling
    return [
        "## Training",
        "",
        f"- data: prompts answered by the target itself (temperature {sampling.temperature}, top-p {sampling.top_p}, "
        f"at most {sampling.max_tokens} tokens); sources and licences in `PROVENANCE.txt`",
        f"- loss: {loss.ce_weight:g} x cross entropy + {loss.kl_weight:g} x top-{config.data.teacher_top_k} KL "
        f"({loss.kl_kind}), {_slot_weights(loss)}, selector weight {loss.selector_weight:g}",
        f"- {train.steps} steps, learning rate {train.lr:g} to {train.lr * train.final_lr_ratio:g}, {train.dtype}",
        "",
        "What is needed to repeat it stands in `run.json`: configuration, code state, package versions, file hashes.",
        "",
    ]


def _measured(measured: dict[str, Any] | None) -> list[str]:
    if not measured:
        return ["## Measured", "", "Nothing has been measured with this folder yet: `dflash2-eval` does.", ""]
    rows = [f"| {name} | {value} |" for name, value in measured.items()]
    return ["## Measured", "", "| | |", "|---|---|", *rows, ""]


def card_text(
    config: RunConfig,
    target_info: TargetInfo,
    published: dict[str, Any],
    *,
    measured: dict[str, Any] | None = None,
) -> str:
    """The model card, Markdown with a metadata header.

    Args:
        config: the experiment.
        target_info: the opened target.
        published: content of ``config.json``.
        measured: name -> value, shown as they are; None when nothing was measured.
    """
    sections = [
        _front_matter(config),
        [
            "",
            f"# {config.name}: a DFlash 2 drafter for {_target_label(config)}",
            "",
            "Speculative decoding: this small model proposes a block of tokens in one pass, the target checks them in "
            "one pass, and the output keeps the target's own distribution. It is no language model by itself.",
            "",
        ],
        _facts(config, published),
        [""],
        _serving(config, published),
        _measured(measured),
        _recipe(config),
        [
            "## Licence",
            "",
            f"The target's licence is {target_info.license}; the drafter was trained on the "
            "target's output and states. See `PROVENANCE.txt` for the prompts.",
            "",
        ],
    ]
    return "\n".join(line for section in sections for line in section)


def _source_lines(title: str, sources: Iterable[PromptSourceConfig]) -> list[str]:
    lines = [f"{title}:"]
    for source in sources:
        name = SOURCE_NAMES.get(source.kind) or (source.path if source.kind == "datasets" else Path(source.path).name)
        parts = [name, source.subset or "", source.split, source.revision or ""]
        licence = source.license or "as its rows say"
        terms = f"; terms: {source.terms}" if source.terms else ""
        lines.append(f"  - {' / '.join(part for part in parts if part)}; licence: {licence}{terms}")
    return lines


def provenance_text(
    config: RunConfig, target_info: TargetInfo, run_record: dict[str, Any], hashes: dict[str, str]
) -> str:
    """Plain text: target, prompts with licences, code and file hashes.

    Args:
        config: the experiment.
        target_info: the opened target.
        run_record: of the export, see ``provenance.run_record``.
        hashes: file name -> sha256 of the files that matter to a server.
    """
    sampling = config.data.sampling
    git = run_record.get("git") or {}
    lines = [
        f"drafter: {config.name}, made with dflash2-train (Apache-2.0)",
        f"code: commit {git.get('commit') or 'unknown'}"
        + (f", with uncommitted changes (sha256 {git['uncommitted_sha256']})" if git.get("uncommitted_sha256") else ""),
        f"written: {run_record.get('time_utc', 'unknown')}",
        "",
        f"target: {_target_label(config)}, revision {target_info.revision or 'none (a local folder)'}",
        f"target licence: {target_info.license}",
        f"target hash: {target_info.target_hash}",
        "",
        *_source_lines("training prompts", config.data.train_prompts),
        *_source_lines("held-out prompts (removed from training)", config.data.holdout_prompts),
        "answers: written by the target, "
        f"temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k or 'off'}, "
        f"at most {sampling.max_tokens} tokens, seed {sampling.seed}",
        "",
        "sha256:",
        *(f"  {digest}  {name}" for name, digest in hashes.items()),
    ]
    return "\n".join(lines) + "\n"
