"""From a training checkpoint to an exported folder: the one function that the trainer and the command share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dflash2_train.checkpoint import MANIFEST, best_checkpoint, newest_checkpoint
from dflash2_train.config import ConfigError, RunConfig, UserError, absolute, to_plain
from dflash2_train.export import payload
from dflash2_train.export.doctor import ERROR, check_config, check_folder
from dflash2_train.export.gguf_layout import shape_faults
from dflash2_train.export.gguf_types import gguf_package
from dflash2_train.export.hf import export_hf, published_config
from dflash2_train.export.history import training_facts
from dflash2_train.export.weight_sources import CheckpointWeights, checkpoint_source
from dflash2_train.export.workspace import ExportError
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import public_value, run_record, sha256_json
from dflash2_train.target import open_target_config

logger = logging.getLogger(__name__)
NOT_CONTENT = ("output_dir", "format", "checkpoint")  # keys of export.* that do not change what is written


def chosen_checkpoint(config: RunConfig) -> Path:
    """``export.checkpoint``, where ``best`` is the one marked so, or the newest checkpoint of the training run.

    Its files are looked for and not read: their sha256 is taken while they are exported.

    Raises:
        UserError: there is none.
    """
    if config.export.checkpoint == "best":
        best = best_checkpoint(absolute(config.train.output_dir))
        if best is None:
            raise UserError(
                f"export.checkpoint=best: no checkpoint of {absolute(config.train.output_dir)} is marked as the best. "
                "Leave export.checkpoint out for the newest."
            )
        return best
    if config.export.checkpoint is not None:
        folder = absolute(config.export.checkpoint)
        if not (folder / MANIFEST).exists():
            raise UserError(
                f"export.checkpoint={folder}: no checkpoint (no {MANIFEST}). "
                "Name a stepNNNNNN folder of train.output_dir."
            )
        return folder
    root = absolute(config.train.output_dir)
    found = newest_checkpoint(root, hashed=False)
    if found is None:
        raise UserError(f"{root}: no checkpoint to export. Train first: dflash2-train +experiment={config.name}")
    return found.folder


def check_exportable(config: RunConfig) -> None:
    """Refuse before the first training step what the export would refuse after the last.

    Raises:
        ExportError: the configured drafter breaks a rule of the published layout; lists the broken ones.
        ConfigError: weights are wanted that the training would not leave.
    """
    if config.export.checkpoint == "best" and config.train.validate_every == 0:
        raise ConfigError(
            "export.checkpoint=best: without validation no checkpoint is marked as the best. Set train.validate_every, "
            "or leave export.checkpoint out for the last."
        )
    if config.export.weights == "ema" and config.train.ema_decay is None:
        raise ConfigError(
            "export.weights=ema: no average is kept. Set train.ema_decay=0.999, or use export.weights=last."
        )
    target, shape = open_target_config(config.target), DrafterShape.from_config(config)
    published = published_config(shape, target, config.export.dtype)
    errors = [str(finding) for finding in check_config(published, target=target) if finding.severity == ERROR]
    if config.export.format == "gguf":
        gguf_package()
        errors += shape_faults(shape)
    if errors:
        listed = "\n  ".join(errors)
        raise ExportError(f"a drafter of this configuration could not be exported; change drafter.*:\n  {listed}")


def weights_record(config: RunConfig, checkpoint: Path, source: CheckpointWeights) -> dict[str, Any]:
    """What identifies the exported weights: the checkpoint's name, step and hash, and what its run recorded."""
    hashes = {f"{path.parent.name}/{path.name}": digest for path, digest in source.hashes.items()}
    averaged = len(hashes) > 1
    return {
        "checkpoint": checkpoint.name,
        "step": payload.read_json(checkpoint / MANIFEST)["step"],
        "weights": config.export.weights,
        "weights_sha256": sha256_json(hashes) if averaged else next(iter(hashes.values())),
        **({"mean_of": hashes} if averaged else {}),
        **training_facts(config, checkpoint),
    }


def already_exported(out_dir: Path, config: RunConfig, source: dict[str, Any]) -> bool:
    """Whether ``out_dir`` holds, whole and unchanged, an export of these weights under these settings."""
    if not (out_dir / payload.RECORD).exists():
        return False
    stored = payload.read_json(out_dir / payload.RECORD)
    now = _content_settings(public_value(to_plain(config)))
    same = (
        stored.get("tool") == payload.TOOL
        and stored.get("source", {}).get("weights_sha256") == source["weights_sha256"]
        and _content_settings(stored.get("config", {})) == now
    )
    return same and not any(finding.severity == ERROR for finding in check_folder(out_dir))


def _content_settings(plain: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides what an export of given weights holds."""
    export = {key: value for key, value in plain.get("export", {}).items() if key not in NOT_CONTENT}
    return {"target": plain.get("target"), "drafter": plain.get("drafter"), "export": export}


def export_checkpoint(config: RunConfig) -> Path:
    """Export the chosen checkpoint of ``config`` to ``export.output_dir``, unless exactly that stands there already.

    Returns:
        The exported folder.

    Raises:
        UserError: no checkpoint, a checkpoint of another drafter, a folder that must not be replaced, or an export
            that breaks a rule of the published layout.
    """
    checkpoint = chosen_checkpoint(config)
    source = checkpoint_source(config, checkpoint)
    record = weights_record(config, checkpoint, source)
    out_dir = absolute(config.export.output_dir)
    if already_exported(out_dir, config, record):
        logger.info("%s is exported already (%s)", checkpoint.name, out_dir)
        return out_dir
    whole = {**run_record(to_plain(config)), "source": record}
    return export_hf(
        source, config, open_target_config(config.target), out_dir, run_record=whole, dtype=config.export.dtype
    )
