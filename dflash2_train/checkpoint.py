"""Checkpoints that a kill at any moment cannot spoil, and finding the newest whole one.

A folder ``step000120`` holds, each tensor whole and under its parameter's name,

    masters, exp_avg, exp_avg_sq .safetensors   fp32 weights and AdamW's moments
    average.safetensors                         fp32, when weights are averaged (train.ema_decay)
    drafter.safetensors                         the live module's weights in the training dtype, for export
    random.safetensors                          states of every rank's random generators
    state.json                                  steps, loader position, counters, W&B id
    MANIFEST.json                               fingerprint, drafter shape, and the sha256 of every other file

and no pickle. It is written under a temporary name and renamed, the rename being the commit; weights that are not
finite are never committed. Resume takes the newest folder whose manifest verifies. Nothing in it depends on the number
of ranks or the ZeRO stage. ``best.json`` names the checkpoint that did best on a metric; it is never pruned.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_gen.cache.format import list_differences
from dflash2_train.config import UserError
from dflash2_train.engine import AVERAGE, TrainEngine
from dflash2_train.model.drafter import Drafter
from dflash2_train.provenance import atomic_write_json, publish, sha256_file

logger = logging.getLogger(__name__)
MANIFEST = "MANIFEST.json"
WEIGHTS = "drafter.safetensors"
AVERAGED_WEIGHTS = f"{AVERAGE}.safetensors"
RANDOM = "random.safetensors"
STATE = "state.json"
BEST = "best.json"
TEMPORARY = ".writing-"
SPARE_BYTES = 16 * 2**20  # random states, JSON files and what the file system itself takes
LAYOUT = 2  # of the folder; 1 held DeepSpeed's own files


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the text names the folder and the next step."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder."""

    folder: Path
    step: int
    world_size: int
    layout: int
    fingerprint: dict[str, Any]


def verified_checkpoint(folder: Path, *, hashed: bool = True) -> Checkpoint | None:
    """The checkpoint in ``folder`` if its manifest holds, else None with a warning that says why.

    Args:
        folder: of one checkpoint.
        hashed: compare each file's sha256; False only looks whether the files are there, for who reads a part of them
            and takes the sha256 of that while reading.
    """
    manifest_path = folder / MANIFEST
    if not manifest_path.exists():
        logger.warning("%s has no %s and is passed over", folder, MANIFEST)
        return None
    try:
        manifest = json.loads(manifest_path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is not readable (%s) and its checkpoint is passed over", manifest_path, error)
        return None
    if not isinstance(manifest, dict) or not manifest.keys() >= {"step", "world_size", "fingerprint", "files"}:
        logger.warning("%s is not one of this tool's and its folder is passed over", manifest_path)
        return None
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.exists() or (hashed and sha256_file(path) != digest):
            logger.warning("%s is missing or changed; the checkpoint is passed over", path)
            return None
    return Checkpoint(
        folder=folder,
        step=manifest["step"],
        world_size=manifest["world_size"],
        layout=manifest.get("layout", 1),
        fingerprint=manifest["fingerprint"],
    )


def newest_checkpoint(root: Path, *, hashed: bool = True) -> Checkpoint | None:
    """The newest checkpoint under ``root`` whose files all verify, or None when there is none at all.

    ``hashed`` as in :func:`verified_checkpoint`.
    """
    folders = sorted((path for path in root.glob("step*") if path.is_dir()), key=lambda path: path.name, reverse=True)
    for folder in folders:
        checkpoint = verified_checkpoint(folder, hashed=hashed)
        if checkpoint is not None:
            return checkpoint
    if folders:
        raise CheckpointError(
            f"{root}: none of {len(folders)} checkpoints verifies. Restore one, or move the folder away to start again."
        )
    return None


def check_resumable(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Refuse to continue under other settings, or from files of an earlier layout.

    Raises:
        CheckpointError: with the list of differences.
    """
    if checkpoint.layout != LAYOUT:
        raise CheckpointError(
            f"{checkpoint.folder}: written by an earlier version (layout {checkpoint.layout}), this one continues from "
            f"layout {LAYOUT}. Finish the run with that version, or export it with dflash2-export and start a new run "
            "with train.warm_start set to the exported folder."
        )
    lines = list_differences(checkpoint.fingerprint, fingerprint)
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{checkpoint.folder} was written by a run with other settings (stored -> now):\n  {listed}\n"
            "Set them back to continue it (on another number of ranks, change train.rows or train.accumulation so that "
            "rows_per_window stays), or choose a new train.output_dir (or run_dir) for a new run."
        )


def check_space(engine: TrainEngine, weights: Drafter, root: Path, *, averaged: bool) -> None:
    """Refuse on all ranks, before anything is written, when a checkpoint would not fit the disk.

    Counted are fp32 masters, two moments, the average if there is one, and the live weights. torch turns a full
    disk into a RuntimeError about file positions, so it must not come to that.

    Raises:
        CheckpointError: with the space that is free and the space that is needed.
    """
    whole = 16 if averaged else 12  # bytes a parameter in fp32 files
    needed = sum(p.numel() * (whole + p.element_size()) for p in weights.parameters()) + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if engine.any_rank(engine.rank == 0 and free < needed):
        raise CheckpointError(
            f"{root}: {free / 2**30:.2f} GiB free, a checkpoint needs {needed / 2**30:.2f}. Free space, or choose "
            "another train.output_dir; checkpoints that are there stay good and the same command continues."
        )


def save_checkpoint(
    engine: TrainEngine,
    weights: Drafter,
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
        root: folder of the checkpoints. The first rank alone writes; to continue, all ranks must see it.
        step: windows done.
        state: loader position and counters, given back on resume.
        fingerprint: settings that a resume must share.
        keep: newest checkpoints kept.

    Raises:
        CheckpointError: too little space, or state that is not finite; older checkpoints stay.
    """
    temporary, final = root / f"{TEMPORARY}step{step:06d}", root / f"step{step:06d}"
    if engine.rank == 0:
        for leftover in root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    kinds = engine.state_kinds()
    check_space(engine, weights, root, averaged=AVERAGE in kinds)
    with whole_or_gone(temporary):
        write_tensors(engine, weights, kinds, temporary, step=step)
        if engine.rank == 0:
            counts = {**engine.counts(), "world_size": engine.world_size}
            atomic_write_json(temporary / STATE, {"trainer": state, **counts})
            manifest = {
                "step": step,
                "layout": LAYOUT,
                "world_size": engine.world_size,
                "fingerprint": fingerprint,
                "shape": asdict(weights.shape),
                "files": {path.name: sha256_file(path) for path in sorted(temporary.iterdir())},
            }
            atomic_write_json(temporary / MANIFEST, manifest)
            commit(temporary, final, keep=keep)
    engine.barrier()
    return final


def write_tensors(engine: TrainEngine, weights: Drafter, kinds: Sequence[str], temporary: Path, *, step: int) -> None:
    """Gather all tensors of a checkpoint, which every rank must call, and write them on the first one."""
    metadata = {"step": str(step)}
    for kind in kinds:
        tensors = engine.gather(kind, weights)
        refuse_not_finite(engine, kind, tensors, temporary.parent)
        if engine.rank == 0:
            save_file(tensors, temporary / f"{kind}.safetensors", metadata=metadata)
        del tensors
    random_states = engine.gather_random_states()
    if engine.rank == 0:
        live = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.state_dict().items()}
        save_file(live, temporary / WEIGHTS, metadata=metadata)
        save_file(random_states, temporary / RANDOM)


def commit(temporary: Path, final: Path, *, keep: int) -> None:
    """Make a checkpoint that is written whole the newest one, and remove those that are too many."""
    if final.exists():
        shutil.rmtree(final)
    publish(temporary, final)
    prune(final.parent, keep)


@contextmanager
def whole_or_gone(temporary: Path) -> Iterator[None]:
    """Around the writing of ``temporary``: a disk that takes no more is told as such, and gets its room back.

    Raises:
        CheckpointError: in place of what the writers say.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if temporary.exists():
            shutil.rmtree(temporary)
        raise CheckpointError(
            f"{temporary.parent}: a checkpoint could not be written ({error}). Free space, or mend the file system; "
            "checkpoints that are there stay good and the same command continues."
        ) from error


def refuse_not_finite(engine: TrainEngine, kind: str, tensors: dict[str, Tensor], root: Path) -> None:
    """Raise CheckpointError on all ranks when the first rank's ``tensors`` hold a value that is not finite."""
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if engine.any_rank(bool(bad)):
        raise CheckpointError(
            f"{root}: {kind} of {bad[0] if bad else 'a tensor'} is not finite, so this state is not saved. The newest "
            "checkpoint is good and the same command continues from it. If that ends here again, start a new run with "
            "a lower train.lr and train.warm_start set to that checkpoint."
        )


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    best = best_checkpoint(root)
    for old in sorted(path for path in root.glob("step*") if path.is_dir())[:-keep]:
        if old != best:
            shutil.rmtree(old)


def mark_best(root: Path, folder: Path, *, metric: str, value: float) -> bool:
    """Point ``best.json`` at a checkpoint if it beats the one marked so far. Called by the first rank.

    Args:
        root: folder of the checkpoints.
        folder: a committed checkpoint in it.
        metric: name of a figure of which more is better; a mark made with another one is replaced.
        value: its value there.

    Returns:
        Whether it is the best now.

    Raises:
        ValueError: the value is not finite, or there is no such checkpoint.
    """
    if not math.isfinite(value) or not (folder / MANIFEST).exists() or folder.parent != root:
        raise ValueError(f"{metric}={value} of {folder}: needs a finite value of a checkpoint in {root}.")
    marked = json.loads((root / BEST).read_text()) if best_checkpoint(root) is not None else None
    if marked is not None and marked["metric"] == metric and marked["value"] >= value:
        return False
    atomic_write_json(root / BEST, {"checkpoint": folder.name, "metric": metric, "value": value})
    return True


def best_checkpoint(root: Path) -> Path | None:
    """The folder that ``best.json`` names, or None when nothing was marked or the folder is gone."""
    if not (root / BEST).exists():
        return None
    folder = root / str(json.loads((root / BEST).read_text())["checkpoint"])
    return folder if (folder / MANIFEST).exists() else None


def load_checkpoint(engine: TrainEngine, weights: Drafter, checkpoint: Checkpoint) -> dict[str, Any]:
    """Set engine and weights to where ``checkpoint`` was saved; every rank must call it.

    Returns:
        The ``state`` that was saved with it.
    """
    saved: dict[str, Any] = json.loads((checkpoint.folder / STATE).read_text())
    engine.set_counts(applied_steps=saved["applied_steps"], average_updates=saved["average_updates"])
    for kind in engine.state_kinds():
        engine.scatter(kind, weights, load_file(checkpoint.folder / f"{kind}.safetensors"))
    if saved["world_size"] == engine.world_size:
        engine.set_random_states(load_file(checkpoint.folder / RANDOM))
    else:
        logger.info(
            "%s was saved on %d ranks and continues on %d: same windows and state, sums in another order",
            checkpoint.folder.name,
            saved["world_size"],
            engine.world_size,
        )
    state: dict[str, Any] = saved["trainer"]
    return state
