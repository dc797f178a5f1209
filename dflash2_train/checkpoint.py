"""Checkpoints that a kill at any moment cannot spoil, and finding the newest whole one.

A folder ``step000120`` holds DeepSpeed's state (masters, moments, schedule, loader position), ``drafter.safetensors``
(the live module's weights, for export without pickles) and ``MANIFEST.json`` with the sha256 of every file. It is
written under a temporary name and renamed, the rename being the commit. Resume takes the newest folder whose
manifest verifies: DeepSpeed's own ``latest`` file is neither atomic nor written last, and flipped
bytes in a shard load silently.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_gen.cache.format import list_differences
from dflash2_train.config import ConfigError, UserError
from dflash2_train.engine import TrainEngine
from dflash2_train.provenance import atomic_write_json, publish, sha256_file

logger = logging.getLogger(__name__)
MANIFEST = "MANIFEST.json"
WEIGHTS = "drafter.safetensors"
TEMPORARY = ".writing-"
SPARE_BYTES = 16 * 2**20  # schedule, state, manifest and what the file system itself takes


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the text names the folder and the next step."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder."""

    folder: Path
    step: int
    world_size: int
    fingerprint: dict[str, Any]


def _verify(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder`` if its manifest holds, else None with a warning that says why."""
    manifest_path = folder / MANIFEST
    if not manifest_path.exists():
        logger.warning("%s has no %s and is passed over", folder, MANIFEST)
        return None
    manifest = json.loads(manifest_path.read_text())
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.exists() or sha256_file(path) != digest:
            logger.warning("%s is missing or changed; the checkpoint is passed over", path)
            return None
    return Checkpoint(
        folder=folder,
        step=manifest["step"],
        world_size=manifest["world_size"],
        fingerprint=manifest["fingerprint"],
    )


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint under ``root`` whose files all verify, or None when there is none at all."""
    folders = sorted((path for path in root.glob("step*") if path.is_dir()), key=lambda path: path.name, reverse=True)
    for folder in folders:
        checkpoint = _verify(folder)
        if checkpoint is not None:
            return checkpoint
    if folders:
        raise CheckpointError(
            f"{root}: none of {len(folders)} checkpoints verifies. Restore one, or move the folder away to start again."
        )
    return None


def check_resumable(checkpoint: Checkpoint, fingerprint: dict[str, Any], world_size: int) -> None:
    """Refuse to continue under other settings or on another number of ranks.

    Raises:
        CheckpointError: with the list of differences.
    """
    lines = list_differences(checkpoint.fingerprint, fingerprint)
    if checkpoint.world_size != world_size:
        lines.append(f"ranks: {checkpoint.world_size} -> {world_size}")
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{checkpoint.folder} was written by a run with other settings (stored -> now):\n  {listed}\n"
            "Set them back to continue it, or choose a new train.output_dir (or run_dir) for a new run."
        )


def check_space(engine: TrainEngine, weights: nn.Module, root: Path) -> None:
    """Refuse on all ranks, before anything is written, when a checkpoint would not fit the disk.

    Counted are fp32 masters and two moments, and the weights twice (DeepSpeed's copy and ours). torch turns a full
    disk into a RuntimeError about file positions, so it must not come to that.

    Raises:
        CheckpointError: with the space that is free and the space that is needed.
    """
    parameters = list(weights.parameters())
    needed = sum(p.numel() * (12 + 2 * p.element_size()) for p in parameters) + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if engine.any_rank(engine.rank == 0 and free < needed):
        raise CheckpointError(
            f"{root}: {free / 2**30:.2f} GiB free, a checkpoint needs {needed / 2**30:.2f}. Free space, or choose "
            "another train.output_dir; checkpoints that are there stay good and the same command continues."
        )


def save_checkpoint(
    engine: TrainEngine,
    weights: nn.Module,
    root: Path,
    *,
    step: int,
    state: dict[str, Any],
    fingerprint: dict[str, Any],
    keep: int,
) -> Path:
    """Write, commit and prune; every rank must call it.

    Args:
        engine: whose optimizer state is saved.
        weights: the drafter inside the engine's module.
        root: folder of the checkpoints.
        step: windows done.
        state: loader position and counters, given back on resume.
        fingerprint: settings that a resume must share.
        keep: newest checkpoints kept.
    """
    temporary, final = root / f"{TEMPORARY}step{step:06d}", root / f"step{step:06d}"
    if engine.rank == 0:
        for leftover in root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
    engine.barrier()
    check_space(engine, weights, root)
    engine.save_state(str(root), temporary.name, state)
    if engine.rank == 0:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.state_dict().items()}
        save_file(tensors, temporary / WEIGHTS, metadata={"step": str(step)})
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        atomic_write_json(
            temporary / MANIFEST,
            {"step": step, "world_size": engine.world_size, "fingerprint": fingerprint, "files": files},
        )
        if final.exists():
            shutil.rmtree(final)
        publish(temporary, final)
        for old in sorted(path for path in root.glob("step*") if path.is_dir())[:-keep]:
            shutil.rmtree(old)
    engine.barrier()
    return final


def load_drafter_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a verified checkpoint, ``mask_embedding`` included, in the training dtype.

    Raises:
        ConfigError: ``folder`` is no checkpoint or its weights cannot be read.
    """
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise ConfigError(
            f"export.checkpoint={folder}: {path.name} cannot be read ({error}). "
            "Name a stepNNNNNN folder of train.output_dir."
        ) from error
