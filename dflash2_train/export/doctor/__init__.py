"""The check-up of an exported folder: what servers get wrong silently is an error here.

Two of the three common servers load a drafter with missing tensors, with taps in another order or with the attention
direction left out, and just draft badly. So every rule is looked at before a folder is called done. What the layout
means is decided in one place, ``DrafterShape.from_published``; here stand the rules about where and how it is written,
about the tensors and the mask vector, about the target, and about files that changed after the export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash2_train.export.payload import (
    CONFIG,
    MASK,
    RECORD,
    read_json,
    read_mask_embedding,
    tensor_faults,
)
from dflash2_train.export.weight_files import WeightFiles, table_shapes
from dflash2_train.model.drafter_config import ARCHITECTURE, DrafterShape
from dflash2_train.provenance import sha256_file

if TYPE_CHECKING:
    from dflash2_train.target import TargetInfo

ERROR = "error"
WARNING = "warning"
NESTED_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
TOP_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
)
# Read from the nested dict alone by some servers, so a top-level copy would be honoured by a part of them only.
NESTED_ONLY = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
)
# Keys that one server reads and others do not, each of which changes the drafts.
FORBIDDEN = (
    "eagle_aux_hidden_state_layer_ids",
    "layer_ids",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
    "has_own_lm_head",
    "has_embed_tokens",
    "is_neox_style",
    "rope_is_neox_style",
    "causal",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken rule: ``severity`` is "error" or "warning"."""

    severity: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.rule}] {self.message}"


def _error(rule: str, message: str) -> Finding:
    return Finding(severity=ERROR, rule=rule, message=message)


def _warning(rule: str, message: str) -> Finding:
    return Finding(severity=WARNING, rule=rule, message=message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _placement_rules(config: dict[str, Any], nested: dict[str, Any]) -> Iterator[Finding]:
    if config.get("architectures") != [ARCHITECTURE]:
        yield _error("architecture", f"architectures={config.get('architectures')}, must be ['{ARCHITECTURE}'] alone")
    if "block_size" not in config:
        yield _warning("block-size", "block_size stands in dflash_config alone; older GGUF converters take 16 then")
    for key in FORBIDDEN:
        if key in config or key in nested:
            yield _error("forbidden-key", f"{key} is read by some servers only; leave it out")
    for key in NESTED_ONLY:
        if key in config:
            yield _error("nesting", f"{key} stands at the top level, where vLLM and SGLang do not look; nest it")
    if config.get("tie_word_embeddings") is not False:
        yield _error("tie-word-embeddings", "tie_word_embeddings must be false: there is no embedding in the file")
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        yield _error("rope", f"rope_parameters={rope} must hold rope_theta: servers take 10000 without a word")
    if "sliding_attention" not in config.get("layer_types", []) and config.get("sliding_window") is not None:
        yield _error("sliding-window", f"sliding_window={config['sliding_window']} is set, but no layer slides")


def _mask_id_rules(config: dict[str, Any], nested: dict[str, Any]) -> Iterator[Finding]:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        stored = config.get(key)
        if nested["mask_token_id"] in (stored if isinstance(stored, list) else [stored]):
            yield _error("mask-id", f"mask_token_id={nested['mask_token_id']} is also {key}, so it occurs in real text")


def _selector_rules(config: dict[str, Any], nested: dict[str, Any]) -> Iterator[Finding]:
    width = nested["selector_top_k"]
    if config["hidden_size"] < width * (width + 1):
        yield _warning(
            "selector", f"llama.cpp needs hidden_size >= C * (C + 1) = {width * (width + 1)}, C = selector_top_k"
        )


def _target_rules(config: dict[str, Any], nested: dict[str, Any], target: TargetInfo) -> Iterator[Finding]:
    pairs = (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    )
    for key, wanted in pairs:
        if config[key] != wanted:
            yield _error("target", f"{key}={config[key]}, but the target has {wanted}")
    if nested["mask_token_id"] in target.eos_token_ids:
        yield _error(
            "mask-id", f"mask_token_id={nested['mask_token_id']} ends the target's replies; choose a reserved token"
        )
    limit = target.max_position_embeddings
    if config["max_position_embeddings"] < limit:
        yield _error(
            "positions",
            f"max_position_embeddings={config['max_position_embeddings']} is below the target's {limit}: servers clamp "
            "positions beyond it silently. Raise drafter.max_position_embeddings; no training is needed",
        )


CONFIG_RULES: tuple[Callable[[dict[str, Any], dict[str, Any]], Iterator[Finding]], ...] = (
    _placement_rules,
    _mask_id_rules,
    _selector_rules,
)


def check_config(config: dict[str, Any], *, target: TargetInfo | None = None) -> list[Finding]:
    """Findings about a published configuration alone; before training it tells what export would refuse.

    Args:
        config: content of ``config.json``.
        target: what is known of the target; None leaves the comparison with it out.
    """
    nested = config.get("dflash_config")
    if not isinstance(nested, dict):
        return [_error("required", f"dflash_config={nested!r} must be an object")]
    integers = [(config, key) for key in TOP_KEYS]
    integers += [(nested, key) for key in NESTED_KEYS if key != "target_layer_ids"]
    wrong = [key for where, key in integers if not _is_int(where.get(key)) or where[key] < 0]
    if "target_layer_ids" not in nested:
        wrong.append("target_layer_ids")
    if wrong:  # the rules below read these
        return [_error("required", f"{key} is missing or no whole number of at least 0") for key in wrong]
    findings = [finding for rules in CONFIG_RULES for finding in rules(config, nested)]
    try:
        DrafterShape.from_published(config)
    except ValueError as error:
        findings.append(_error("layout", str(error)))
    if target is not None:
        findings += _target_rules(config, nested, target)
    return findings


def _check_tensors(folder: Path, config: dict[str, Any]) -> Iterator[Finding]:
    """Names, shapes, dtypes and finiteness of the weights, one tensor in memory at a time."""
    from dflash2_train.model.drafter import Drafter

    try:
        weights = WeightFiles(folder)
        shape = DrafterShape.from_published(config)
    except ValueError as error:
        yield _error("weights", str(error))
        return
    header, expected = weights.header, Drafter.expected_tensors(shape)
    expected |= {name: size for name, size in table_shapes(shape).items() if name in header}
    faults = tensor_faults(header, expected)
    yield from (_error("tensors", fault) for fault in faults)
    dtypes = sorted({dtype for dtype, _ in header.values()})
    if len(dtypes) > 1:
        yield _error("dtype", f"weights mix {', '.join(dtypes)}; write one dtype")
    elif dtypes == ["F32"]:
        yield _warning("dtype", "weights are float32: twice the size, and servers cast them to bfloat16")
    if faults:
        return
    for name in sorted(header):
        if not bool(torch.isfinite(weights[name]).all()):
            yield _error("finite", f"{name} holds values that are not finite; export from an earlier checkpoint")
    own = {path.name for path in weights.paths}
    others = [p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") and p.name not in own]
    yield from (_error("files", f"{name}: a second weights file; loaders may prefer it") for name in others)


def _check_mask(folder: Path, config: dict[str, Any]) -> Iterator[Finding]:
    try:
        vector = read_mask_embedding(
            folder / MASK,
            hidden_size=config["hidden_size"],
            mask_token_id=config["dflash_config"]["mask_token_id"],
        )
    except ValueError as error:
        yield _error("mask-embedding", str(error))
        return
    values = vector.float()
    if float(values.std(unbiased=False)) < 1e-3 * float(values.abs().max()):
        yield _error("mask-embedding", f"{MASK}: all elements are equal, so it was never trained")


def _check_record(folder: Path) -> Iterator[Finding]:
    """Every file as it was written: hashes against ``run.json``."""
    if not (folder / RECORD).exists():
        yield _warning("record", f"no {RECORD}: nothing says where this drafter comes from or whether files changed")
        return
    try:
        listed = read_json(folder / RECORD).get("files")
    except ValueError as error:
        yield _error("record", str(error))
        return
    if not isinstance(listed, dict):
        yield _error("record", f"{RECORD} lists no files")
        return
    present = {path.name for path in folder.iterdir() if path.is_file()} - {RECORD}
    for name in sorted(listed.keys() | present):
        if name not in present:
            yield _error("record", f"{name} is listed in {RECORD} but missing")
        elif name not in listed:
            yield _warning("record", f"{name} is not listed in {RECORD}")
        elif sha256_file(folder / name) != listed[name]:
            yield _error("record", f"{name} changed after it was exported (sha256 differs from {RECORD})")


def check_folder(folder: Path, *, target_info: TargetInfo | None = None) -> list[Finding]:
    """All findings about an exported folder, errors first. An empty list means: serve it.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and ``mask_embedding.pt``.
        target_info: the target to compare with, or None.
    """
    try:
        config = read_json(folder / CONFIG)
    except ValueError as error:
        return [_error("config", str(error))]
    findings = check_config(config, target=target_info)
    if not any(finding.rule == "required" for finding in findings):
        findings += [*_check_tensors(folder, config), *_check_mask(folder, config)]
    findings += _check_record(folder)
    return sorted(findings, key=lambda finding: finding.severity != ERROR)
