"""Writing a drafter as a folder that servers load, and loading such a folder strictly.

A folder is written under a temporary name tensor by tensor, checked there (:mod:`dflash2_train.export.doctor`), its
bytes compared with those that were written, and only then renamed: a bad export never takes the place of a good one,
and memory is that of the largest tensor.

Weights are read once, with the sha256 of their checkpoint's file; written once, with the sha256 of what is handed to
the system; and what was written is read back once, by the doctor, which takes values and sha256 from the same bytes.
Reading back is the one proof that a reader finds what was meant: a write may be cut or land in a wrong place, and
header and offsets are seen by a reader alone. It goes on while the system still carries the files to the disk.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2_train.config import RunConfig
from dflash2_train.export.doctor.examine import examine
from dflash2_train.export.doctor.findings import refuse_errors
from dflash2_train.export.doctor.opened import OpenedDrafter
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.payload import (
    CONFIG,
    MASK,
    read_json,
    read_mask_embedding,
    tensor_faults,
)
from dflash2_train.export.published import expected_tensors, shape_of
from dflash2_train.export.record import write_papers
from dflash2_train.export.weight_files import TABLES, WeightFiles, table_shapes
from dflash2_train.export.weight_sources import MASK_PARAMETER, ModuleWeights, TableWeights, WeightSource
from dflash2_train.export.weight_writer import shard_bytes, write_weights
from dflash2_train.export.workspace import ExportError, check_replaceable, real_path, replace_folder, workspace
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import atomic_write_json, fsync_path
from dflash2_train.target import FrozenHead, TargetInfo, torch_dtype

logger = logging.getLogger(__name__)


def load_drafter(folder: Path, dtype: torch.dtype | str) -> Drafter:
    """The drafter in an exported folder, nothing guessed and nothing filled in.

    Tables of its own (see :mod:`dflash2_train.export.weight_files`) are checked for shape and not taken: who runs this
    drafter embeds with the target's. A DFlash 1 comes with convolutions and a selector that add nothing
    (:func:`dflash2_train.export.published.shape_of`).

    Args:
        folder: with ``config.json``, the weights in one file or in shards, and ``mask_embedding.pt``.
        dtype: of the returned module's parameters, as torch's type or by its name in a configuration.

    Raises:
        ValueError: a missing, unexpected, wrongly shaped or quantised tensor, a missing or foreign mask vector, an
            unusable configuration; the text names it.
    """
    folder = Path(folder)
    weights = WeightFiles(folder)
    shape, generation = shape_of(read_json(folder / CONFIG), weights.header)
    expected = expected_tensors(shape, generation)
    tables = {name: size for name, size in table_shapes(shape).items() if name in weights.header}
    faults = tensor_faults(weights.header, {**expected, **tables})
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{weights.paths[0]} is not the drafter of its config.json:\n  {listed}")
    if tables:
        logger.warning(
            "%s: its own %s are not used, the target's are; where they differ, vLLM drafts otherwise",
            folder,
            " and ".join(tables),
        )
    mask = read_mask_embedding(folder / MASK, hidden_size=shape.hidden_size, mask_token_id=shape.mask_token_id)
    drafter = Drafter(shape).to(torch_dtype(dtype))
    own = drafter.state_dict()  # shares storage with the parameters
    with torch.no_grad():
        own[MASK_PARAMETER].copy_(mask)
        for name in expected:
            own[name].copy_(weights[name])
    return drafter


def published_config(shape: DrafterShape, target_info: TargetInfo, dtype: str) -> dict[str, Any]:
    """Content of ``config.json``: the drafter's shape and the target's special tokens."""
    return shape.to_published(
        dtype,
        bos_token_id=target_info.bos_token_id,
        eos_token_id=list(target_info.eos_token_ids),
        pad_token_id=target_info.pad_token_id,
    )


def with_tables(source: WeightSource, config: RunConfig) -> WeightSource:
    """``source`` with the target's tables beside it where ``export.tables`` asks for any.

    Raises:
        ConfigError: the target's tables cannot be read.
    """
    if not config.export.tables:
        return source
    frozen = FrozenHead.load(config.target, dtype=config.export.dtype)
    tables = dict(zip(TABLES, (frozen.embedding, frozen.head), strict=True))
    wanted = {name: tables[name] for name in TABLES if name.removesuffix(".weight") in config.export.tables}
    return TableWeights(drafter=source, tables=wanted, fold=config.export.fold_mask)


def export_hf(
    drafter: Drafter | WeightSource,
    config: RunConfig,
    target_info: TargetInfo,
    out_dir: Path,
    *,
    run_record: dict[str, Any],
    dtype: str = "bfloat16",
) -> Path:
    """Write, check and publish a serve-ready folder.

    Args:
        drafter: trained; a module on any device, or any other source of its tensors; floating point.
        config: the experiment, for card and record; its ``export`` says which tables and shards to write.
        target_info: the target that it was trained for.
        out_dir: folder to make. One that this function wrote before is replaced, any other is refused.
        run_record: where the weights come from (``provenance.run_record`` and what the caller adds).
        dtype: ``bfloat16`` or ``float32``, of the weights and the mask vector.

    Returns:
        ``out_dir``.

    Raises:
        ExportError: the folder is somebody else's, is being written, cannot be written, or breaks a rule. An earlier
            export stays.
    """
    source = _module_weights(drafter) if isinstance(drafter, Drafter) else drafter
    source = with_tables(source, config)
    final = real_path(out_dir)
    with workspace(final) as space:
        check_replaceable(final)
        temporary = space / final.name
        temporary.mkdir()
        _write_folder(temporary, source, config, target_info, run_record=run_record, dtype=dtype)
        replace_folder(temporary, final)
    logger.info("exported the drafter and its mask vector to %s", out_dir)
    return Path(out_dir)


def _write_folder(
    folder: Path,
    source: WeightSource,
    config: RunConfig,
    target_info: TargetInfo,
    *,
    run_record: dict[str, Any],
    dtype: str,
) -> None:
    """Every file of an export, then the checks; arguments as :func:`export_hf`."""
    atomic_write_json(folder / CONFIG, published_config(source.shape, target_info, dtype))
    hashes = write_tensors(folder, source, torch_dtype(dtype), config.export.max_shard_gib)
    mask = source.read(MASK_PARAMETER).detach().to("cpu", torch_dtype(dtype), copy=True).contiguous()
    torch.save(mask, folder / MASK)
    source.check_read()
    with ThreadPoolExecutor(1) as flushing:
        flushed = [flushing.submit(fsync_path, folder / name) for name in hashes]
        write_papers(folder, config, target_info, mask, run_record=run_record, dtype=dtype, hashes=hashes)
        examined = examine(folder, target=TargetFacts.of(target_info))
        if examined.subject is not None:
            refuse_difference(examined.subject, source.shape, mask, hashes)
        refusal = "the exported drafter would not serve as trained, so it is not published"
        refuse_errors(examined.findings, refusal, ExportError)
        for done in flushed:
            done.result()


def _module_weights(drafter: Drafter) -> ModuleWeights:
    source = ModuleWeights(drafter)
    try:
        source.check()
    except ValueError as error:
        raise ExportError(f"nothing is written: {error}") from error
    return source


def write_tensors(
    folder: Path, source: WeightSource, dtype: torch.dtype, max_shard_gib: float | None
) -> dict[str, str]:
    """The weights of ``source`` under ``folder``; file name -> sha256 of what was written."""
    shapes = Drafter.expected_tensors(source.shape)
    if isinstance(source, TableWeights):
        shapes |= {name: tuple(table.shape) for name, table in source.tables.items()}
    return write_weights(folder, shapes, source.read, dtype=dtype, max_bytes=shard_bytes(max_shard_gib))


def refuse_difference(drafter: OpenedDrafter, shape: DrafterShape, mask: Tensor, hashes: dict[str, str]) -> None:
    """Raise ExportError unless the folder reads back as what was written.

    Args:
        drafter: the folder as the doctor read it.
        shape: of the drafter.
        mask: the vector [H] that was written.
        hashes: weights file -> sha256 of the bytes that were handed to the disk.
    """
    folder = drafter.folder
    if folder is None:
        raise ValueError("a configuration alone was never written")
    different = [name for name, digest in hashes.items() if drafter.weights.sha256(folder / name) != digest]
    different += [] if torch.equal(torch.load(folder / MASK, weights_only=True), mask) else [MASK]
    different += [] if DrafterShape.from_published(drafter.config) == shape else [CONFIG]
    if different:
        listed = ", ".join(different)
        raise ExportError(f"read back, these files differ from what was written: {listed}. Check the disk.")
