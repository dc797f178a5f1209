"""What the built-in runner measures: the exported drafter, its K, and the protocol that a fingerprint covers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError, RunConfig, absolute
from dflash2_train.provenance import sha256_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dflash2_train.evaluate.holdout import HoldoutPrompt
    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.drafter_config import DrafterShape
    from dflash2_train.runner import DecodeSettings

logger = logging.getLogger(__name__)


def drafter_folder(config: RunConfig) -> Path:
    """The exported folder to measure.

    Raises:
        ConfigError: it lacks a file of an export.
    """
    key = "export.output_dir" if config.eval.drafter is None else "eval.drafter"
    folder = absolute(config.export.output_dir if config.eval.drafter is None else config.eval.drafter)
    for name in drafter_files(folder):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{key}={str(folder)!r}: not an exported drafter, {name} is missing. Run dflash2-export with the same "
                "experiment, take another tool's drafter over with dflash2-export convert SOURCE FOLDER --target "
                "TARGET_FOLDER, or name a folder with eval.drafter."
            )
    return folder


def drafter_files(folder: Path) -> list[str]:
    """Names of the files that a drafter is read from: configuration, weights in one file or in shards, mask vector."""
    from dflash2_train.export.payload import CONFIG, MASK
    from dflash2_train.export.weight_files import INDEX, FoundWeights

    index = [INDEX] if (folder / INDEX).is_file() else []
    return [CONFIG, *index, *(path.name for path in FoundWeights(folder).files), MASK]


def published_shape(folder: Path) -> DrafterShape:
    """The shape in an export's config.json."""
    return _described(folder)[0]


def _described(folder: Path) -> tuple[DrafterShape, int]:
    """Shape and generation of the drafter in a folder.

    Raises:
        ConfigError: it is not the configuration of a drafter that can be run here.
    """
    from dflash2_train.export.published import shape_of

    try:
        return shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error} Export the drafter again.") from error


def num_drafted(config: RunConfig, block_size: int) -> int:
    """K of this measurement, at most what the drafter was trained for."""
    trained = block_size - 1
    chosen = trained if config.eval.num_drafted is None else config.eval.num_drafted
    if chosen > trained:
        raise ConfigError(
            f"eval.num_drafted={chosen}: the drafter's block_size {block_size} allows {trained} at most. Lower it."
        )
    if chosen < trained:
        logger.info("drafting %d tokens a round; the drafter was trained for %d", chosen, trained)
    return chosen


def describe_models(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Target, drafter and device of a measurement, as JSON values.

    Raises:
        ConfigError: the drafter is for another vocabulary or hidden size than the target's, or lacks a selector that
            is asked for.
    """
    import torch

    from dflash2_train.target import open_target_config

    target = open_target_config(config.target)
    shape, generation = _described(folder)
    if generation == 1 and config.eval.draft_sampling == "selector":
        raise ConfigError(
            f"eval.draft_sampling=selector: the drafter in {folder} is a DFlash 1 and has no selector. Use argmax."
        )
    for key in ("vocab_size", "hidden_size"):
        of_drafter, of_target = vars(shape)[key], vars(target)[key]
        if of_drafter != of_target:
            raise ConfigError(
                f"{folder / 'config.json'}: {key}={of_drafter}, but target.name={config.target.name!r} has "
                f"{of_target}: the drafter was made for another target. Name its own target, or another folder with "
                "eval.drafter."
            )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "experiment": config.name,
        "mode": config.eval.mode,
        "target": config.target.name,
        "target_hash": target.target_hash,
        "drafter_sha256": {name: sha256_file(folder / name) for name in drafter_files(folder)},
        "dtype": config.eval.dtype,
        "device": device,
        "packed_weights": config.eval.pack_weights and device == "cpu" and torch.backends.mkldnn.is_available(),
        "spread_target": config.eval.spread_target,
        "block_size": shape.block_size,
        "stop_ids": sorted(target.eos_token_ids),
    }


def describe_protocol(config: RunConfig, folder: Path, prompts: Sequence[HoldoutPrompt]) -> dict[str, Any]:
    """All that shapes the measured numbers, as JSON values. It is what the results' fingerprint covers."""
    from dflash2_train.evaluate.holdout import prompts_hash

    models = describe_models(config, folder)
    sampled = config.eval.temperature > 0
    return {
        **models,
        "num_drafted": num_drafted(config, models["block_size"]),
        "concurrency": 1,
        "max_new_tokens": config.eval.max_new_tokens,
        "prompts": len(prompts),
        "prompts_sha256": prompts_hash(prompts),
        "enable_thinking": config.data.enable_thinking,
        "baseline": config.eval.baseline,
        "temperature": config.eval.temperature,
        **sampling_facts(config, sampled=sampled),
    }


def sampling_facts(config: RunConfig, *, sampled: bool) -> dict[str, Any]:
    """What shapes sampled answers, for a protocol; all None where nothing is sampled and it changes nothing."""
    names = ("top_p", "top_k", "min_p", "draft_sampling", "seed")
    values = (config.eval.top_p, config.eval.top_k, config.eval.min_p, config.eval.draft_sampling, config.eval.seed)
    return dict(zip(names, values, strict=True)) if sampled else dict.fromkeys(names)


def open_drafter(folder: Path, dtype: str) -> Drafter:
    """The exported drafter, ready to run.

    Raises:
        ConfigError: the folder's files are not what an export writes.
    """
    from dflash2_train.export.hf import load_drafter

    try:
        return load_drafter(folder, dtype).eval()
    except ValueError as error:
        raise ConfigError(f"{error} Export the drafter again.") from error


def open_models(config: RunConfig, folder: Path, device: torch.device) -> tuple[PreTrainedModel, Drafter]:
    """Target and drafter, on ``device`` or with the target spread over all GPUs."""
    from dflash2_train.target import load_target_model

    target_model = load_target_model(
        config.target, config.eval.dtype, device="auto" if config.eval.spread_target else device
    )
    head = target_model.get_output_embeddings()
    return target_model, open_drafter(folder, config.eval.dtype).to(next(head.parameters()).device)


def decode_settings(config: RunConfig, protocol: dict[str, Any], *, drafted: int, temperature: float) -> DecodeSettings:
    """How one decoder runs: greedy at temperature 0, else with the target's top_p, top_k and min_p of ``eval``."""
    from dflash2_train.runner import DecodeSettings

    settings = DecodeSettings(
        max_new_tokens=config.eval.max_new_tokens,
        num_drafted=drafted,
        stop_ids=frozenset(protocol["stop_ids"]),
    )
    if temperature == 0:
        return settings
    return replace(
        settings,
        temperature=temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
        min_p=config.eval.min_p,
        draft_sampling=config.eval.draft_sampling,
    )


def drafter_record(folder: Path) -> Any:
    """The run record that the export carries, or None."""
    path = folder / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
