"""From a training checkpoint to an exported folder: the one function that the trainer and the command share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dflash2_train.checkpoint import (
    AVERAGED_WEIGHTS,
    MANIFEST,
    WEIGHTS,
    best_checkpoint,
    load_drafter_weights,
    newest_checkpoint,
)
from dflash2_train.config import ConfigError, RunConfig, UserError, absolute, to_plain
from dflash2_train.export import payload
from dflash2_train.export.doctor import ERROR, check_config, check_folder
from dflash2_train.export.hf import ExportError, export_hf
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import run_record, sha256_file
from dflash2_train.target import open_target_config

logger = logging.getLogger(__name__)


def chosen_checkpoint(config: RunConfig) -> Path:
    """``export.checkpoint``, where ``best`` is the one marked so, or the newest whole checkpoint of the training run.

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
    found = newest_checkpoint(root)
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
    target = open_target_config(config.target)
    published = DrafterShape.from_config(config).to_published(
        config.export.dtype,
        bos_token_id=target.bos_token_id,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=target.pad_token_id,
    )
    errors = [finding for finding in check_config(published, target=target) if finding.severity == ERROR]
    if errors:
        listed = "\n  ".join(map(str, errors))
        raise ExportError(f"a drafter of this configuration could not be exported; change drafter.*:\n  {listed}")


def weights_source(checkpoint: Path, weights: str) -> dict[str, Any]:
    """What identifies the exported weights: the checkpoint's name, step and hash, and what its run recorded."""
    path = checkpoint / (AVERAGED_WEIGHTS if weights == "ema" else WEIGHTS)
    manifest = payload.read_json(checkpoint / MANIFEST)
    source: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "step": manifest["step"],
        "weights": weights,
        "weights_sha256": sha256_file(path) if path.exists() else None,
    }
    record = checkpoint.parent / "run.json"
    if record.exists():
        trained = payload.read_json(record)
        source["training"] = {key: trained.get(key) for key in ("git", "packages", "machine", "cache", "attestation")}
    return source


def already_exported(out_dir: Path, config: RunConfig, source: dict[str, Any]) -> bool:
    """Whether ``out_dir`` holds, whole and unchanged, an export of these weights under these settings."""
    if not (out_dir / payload.RECORD).exists():
        return False
    stored = payload.read_json(out_dir / payload.RECORD)
    plain = to_plain(config)
    same = (
        stored.get("tool") == payload.TOOL
        and stored.get("source", {}).get("weights_sha256") == source["weights_sha256"]
        and stored.get("export", {}).get("dtype") == config.export.dtype
        and all(stored.get("config", {}).get(key) == plain[key] for key in ("target", "drafter"))
    )
    return same and not any(finding.severity == ERROR for finding in check_folder(out_dir))


def export_checkpoint(config: RunConfig) -> Path:
    """Export the chosen checkpoint of ``config`` to ``export.output_dir``, unless exactly that stands there already.

    Returns:
        The exported folder.

    Raises:
        UserError: no checkpoint, a checkpoint of another drafter, a folder that must not be replaced, or an export
            that breaks a rule of the published layout.
    """
    checkpoint = chosen_checkpoint(config)
    source = weights_source(checkpoint, config.export.weights)
    out_dir = absolute(config.export.output_dir)
    if already_exported(out_dir, config, source):
        logger.info("%s is exported already (%s)", checkpoint.name, out_dir)
        return out_dir
    drafter = Drafter(DrafterShape.from_config(config))
    try:
        drafter.load_state_dict(load_drafter_weights(checkpoint, averaged=config.export.weights == "ema"), strict=True)
    except RuntimeError as error:
        raise ExportError(
            f"{checkpoint}: its weights are of another drafter than this configuration describes. "
            f"Use the experiment it was trained with. {error}"
        ) from error
    record = {**run_record(to_plain(config)), "source": source}
    return export_hf(
        drafter, config, open_target_config(config.target), out_dir, run_record=record, dtype=config.export.dtype
    )
