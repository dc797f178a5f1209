"""Where exported weights come from, each read by name and dropped again: a module, checkpoints, the target's tables.

A source knows the drafter's shape and gives every published tensor and the mask vector. Checkpoints are read from
their files, so that no module is built; several of them give their mean, in fp32 and rounded once by the writer. The
sha256 of a checkpoint's file is taken of the bytes that the export read, so a file that is damaged, or that changes
while it is read, is noticed without reading it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dflash2_train.checkpoint import AVERAGED_WEIGHTS, MANIFEST, WEIGHTS, verified_checkpoint
from dflash2_train.config import ConfigError, RunConfig, UserError
from dflash2_train.engine import MASTERS
from dflash2_train.export.payload import read_json, tensor_faults
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.export.weight_files import EMBEDDING
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import sha256_file

MASK_PARAMETER = "mask_embedding"
FREE_KEYS = ("max_position_embeddings", "initializer_range", "selector_top_k")  # no weight depends on them
MASTER_WEIGHTS = f"{MASTERS}.safetensors"


class WeightSource(Protocol):
    """What an export reads from."""

    @property
    def shape(self) -> DrafterShape:
        """Of the drafter."""

    def read(self, name: str) -> Tensor:
        """A published tensor or ``mask_embedding``, floating point, any device."""

    def check_read(self) -> None:
        """To be called when everything is read; raises UserError where it was not what it was to be."""


@dataclass(frozen=True)
class ModuleWeights:
    """A drafter in memory."""

    drafter: Drafter

    @property
    def shape(self) -> DrafterShape:
        """Of the drafter."""
        return self.drafter.shape

    def check(self) -> None:
        """Refuse a module whose parameters are not exactly the published ones and the mask vector.

        Raises:
            ValueError: lists the differences.
        """
        _refuse_faults({name: ("F32", tuple(t.shape)) for name, t in self.drafter.state_dict().items()}, self.shape)

    def read(self, name: str) -> Tensor:
        """A parameter, sharing its storage."""
        tensor: Tensor = self.drafter.state_dict()[name]
        return tensor

    def check_read(self) -> None:
        """Nothing: memory has no manifest."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """One file of a checkpoint, or the mean of one file of each of several."""

    shape: DrafterShape
    paths: Sequence[Path]  # at least one

    @cached_property
    def hashes(self) -> dict[Path, str]:
        """File -> the sha256 that its checkpoint's manifest gives; of a file that it does not list, the present one."""
        listed = {path: read_json(path.parent / MANIFEST)["files"].get(path.name) for path in self.paths}
        return {path: str(digest) if digest else sha256_file(path) for path, digest in listed.items()}

    @cached_property
    def files(self) -> list[TensorFile]:
        """The files, opened.

        Raises:
            UserError: one is missing, cut or damaged.
        """
        try:
            return [TensorFile(path) for path in self.paths]
        except ValueError as error:
            raise UserError(f"{error} Or name another checkpoint with export.checkpoint.") from error

    def check(self) -> None:
        """Refuse files that do not hold a drafter of ``shape``.

        Raises:
            ValueError: names the file and the tensors.
            UserError: a file cannot be read.
        """
        for file in self.files:
            try:
                _refuse_faults(file.header, self.shape)
            except ValueError as error:
                raise ValueError(f"{file.path}: {error}") from error

    def read(self, name: str) -> Tensor:
        """The tensor as stored, or the fp32 mean."""
        first, *rest = self.files
        tensor = first.read(name)
        if not rest:
            return tensor
        first.settle()  # fp32 values are summed up where they lie
        total = tensor.float()
        for file in rest:
            total += file.read(name)
        return total.div_(len(self.paths))

    def check_read(self) -> None:
        """Refuse files whose bytes, as they were read, are not those of the manifest.

        Raises:
            UserError: names the file.
        """
        for file in self.files:
            found, recorded = file.sha256(), self.hashes[file.path]
            if found != recorded:
                raise UserError(
                    f"{file.path}: has sha256 {found[:12]}…, {MANIFEST} says {recorded[:12]}…: it is damaged or was "
                    "written to while it was read. Nothing is exported. Restore it, or name another checkpoint with "
                    "export.checkpoint."
                )


@dataclass(frozen=True, kw_only=True)
class TableWeights:
    """The target's tables beside a drafter's own tensors; with ``fold`` the embedding's mask row is the trained one."""

    drafter: WeightSource
    tables: dict[str, Tensor]  # name -> [V, H]
    fold: bool

    @property
    def shape(self) -> DrafterShape:
        """Of the drafter."""
        return self.drafter.shape

    def read(self, name: str) -> Tensor:
        """A table, or the drafter's tensor of that name."""
        if name not in self.tables:
            return self.drafter.read(name)
        if name != EMBEDDING or not self.fold:
            return self.tables[name]
        folded = self.tables[name].clone()  # a tied target's head is this very tensor
        folded[self.shape.mask_token_id] = self.drafter.read(MASK_PARAMETER).to(folded)
        return folded

    def check_read(self) -> None:
        """As the drafter's source does; the tables were read before."""
        self.drafter.check_read()


def _refuse_faults(header: dict[str, tuple[str, tuple[int, ...]]], shape: DrafterShape) -> None:
    expected = {**Drafter.expected_tensors(shape), MASK_PARAMETER: (shape.hidden_size,)}
    faults = tensor_faults(header, expected)
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"not the tensors of the drafter that is configured:\n  {listed}")


def checkpoint_source(config: RunConfig, newest: Path) -> CheckpointWeights:
    """The weights that ``export.weights`` names, of the checkpoint ``newest`` and as many before it as are asked for.

    Raises:
        UserError: too few or damaged checkpoints, no moving average in it, or weights of another drafter.
    """
    shape = DrafterShape.from_config(config)
    folders = _averaged_folders(config, newest) if config.export.weights == "mean" else [newest]
    for folder in folders:
        _refuse_other_shape(folder, shape)
    source = CheckpointWeights(shape=shape, paths=[_weights_file(folder, config.export.weights) for folder in folders])
    try:
        source.check()
    except ValueError as error:
        raise UserError(
            f"{newest}: its weights are of another drafter than this configuration describes. "
            f"Use the experiment it was trained with. {error}"
        ) from error
    return source


def _averaged_folders(config: RunConfig, newest: Path) -> list[Path]:
    """``newest`` and the ``export.average_last`` - 1 checkpoints before it, all of one run."""
    wanted = config.export.average_last
    older = sorted(
        path for path in newest.parent.glob("step*") if (path / MANIFEST).exists() and path.name <= newest.name
    )
    if len(older) < wanted:
        raise UserError(
            f"export.average_last={wanted}: {newest.parent} has {len(older)} checkpoints up to {newest.name}. "
            "Ask for fewer, or train with train.keep_checkpoints of at least as many."
        )
    fingerprints = []
    for folder in older[-wanted:]:
        checkpoint = verified_checkpoint(folder, hashed=False)
        if checkpoint is None:
            raise UserError(f"{folder}: missing files, see the log. Lower export.average_last.")
        fingerprints.append(checkpoint.fingerprint)
    if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
        raise UserError(f"{newest.parent}: its checkpoints are of runs with different settings and have no mean.")
    return older[-wanted:]


def _weights_file(folder: Path, weights: str) -> Path:
    """The file of a checkpoint that ``export.weights`` takes; a mean is made of fp32 masters, where there are any."""
    if weights == "mean" and (folder / MASTER_WEIGHTS).exists():
        return folder / MASTER_WEIGHTS
    if weights != "ema":
        return folder / WEIGHTS
    path = folder / AVERAGED_WEIGHTS
    if not path.exists():
        raise ConfigError(
            f"export.weights=ema: {folder} holds no averaged weights. Train with train.ema_decay=0.999, or use "
            "export.weights=last."
        )
    return path


def _refuse_other_shape(folder: Path, shape: DrafterShape) -> None:
    """Raise UserError where the checkpoint was trained as another drafter, though every tensor might fit.

    Other taps in the same number, another window or rotary base load without a sign and draft badly.
    """
    stored: dict[str, Any] | None = read_json(folder / MANIFEST).get("shape")
    if stored is None:  # of an early layout, which did not tell
        return
    configured = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(shape).items()}
    differing = [key for key in stored if key not in FREE_KEYS and stored[key] != configured.get(key)]
    if differing:
        listed = "\n  ".join(f"{key}: {stored[key]} -> {configured.get(key)}" for key in differing)
        raise UserError(
            f"{folder}: trained as another drafter than this configuration describes (checkpoint -> config):\n  "
            f"{listed}\nUse the experiment it was trained with."
        )
