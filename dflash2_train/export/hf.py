"""Writing a drafter as a folder that servers load, and loading such a folder strictly.

A folder is written under a temporary name, checked there (:mod:`dflash2_train.export.doctor`), read back and
compared bit for bit, and only then renamed: a bad export never takes the place of a good one.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash2_train.config import RunConfig, UserError
from dflash2_train.export.doctor import ERROR, check_folder
from dflash2_train.export.payload import (
    CONFIG,
    MASK,
    RECORD,
    TOOL,
    WEIGHTS,
    read_header,
    read_json,
    read_mask_embedding,
    tensor_faults,
)
from dflash2_train.export.record import write_papers
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import atomic_write_json, fsync_path, publish
from dflash2_train.target import TargetInfo, torch_dtype

logger = logging.getLogger(__name__)
MASK_PARAMETER = "mask_embedding"


class ExportError(UserError):
    """A drafter that cannot be exported, or a folder that must not be replaced; the text says what to do."""


def load_drafter(folder: Path, dtype: torch.dtype | str) -> Drafter:
    """The drafter in an exported folder, nothing guessed and nothing filled in.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and ``mask_embedding.pt``.
        dtype: of the returned module's parameters, as torch's type or by its name in a configuration.

    Raises:
        ValueError: a missing, unexpected, wrongly shaped or quantised tensor, a missing or foreign mask vector, an
            unusable configuration; the text names it.
    """
    folder = Path(folder)
    shape = DrafterShape.from_published(read_json(folder / CONFIG))
    faults = tensor_faults(read_header(folder / WEIGHTS), Drafter.expected_tensors(shape))
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{folder / WEIGHTS} is not a DFlash 2 drafter of its config.json:\n  {listed}")
    mask = read_mask_embedding(folder / MASK, hidden_size=shape.hidden_size, mask_token_id=shape.mask_token_id)
    kind = torch_dtype(dtype)
    drafter = Drafter(shape).to(kind)
    tensors = {name: tensor.to(kind) for name, tensor in load_file(folder / WEIGHTS).items()}
    drafter.load_state_dict({**tensors, MASK_PARAMETER: mask.to(kind)}, strict=True)
    return drafter


def export_tensors(drafter: Drafter, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """The published tensors and the mask vector [H], contiguous copies in ``dtype`` on the CPU.

    Raises:
        ExportError: the drafter's parameters are not exactly the published ones plus the mask vector.
    """
    state = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    mask = state.pop(MASK_PARAMETER)
    expected = Drafter.expected_tensors(drafter.shape)
    faults = tensor_faults({name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()}, expected)
    if faults:
        listed = "\n  ".join(faults)
        raise ExportError(f"the drafter does not have the published tensors, so nothing is written:\n  {listed}")
    # A copy even where dtype and device already fit: tied or sliced storage must not reach the file.
    tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in state.items()}
    return tensors, mask.to("cpu", dtype, copy=True).contiguous()


def published_config(drafter: Drafter, target_info: TargetInfo, dtype: str) -> dict[str, Any]:
    """Content of ``config.json``: the drafter's shape and the target's special tokens."""
    return drafter.shape.to_published(
        dtype,
        bos_token_id=target_info.bos_token_id,
        eos_token_id=list(target_info.eos_token_ids),
        pad_token_id=target_info.pad_token_id,
    )


def export_hf(
    drafter: Drafter,
    config: RunConfig,
    target_info: TargetInfo,
    out_dir: Path,
    *,
    run_record: dict[str, Any],
    dtype: str = "bfloat16",
) -> Path:
    """Write, check and publish a serve-ready folder.

    Args:
        drafter: trained; any device and floating-point type.
        config: the experiment, for card and record.
        target_info: the target that it was trained for.
        out_dir: folder to make. One that this function wrote before is replaced, any other is refused.
        run_record: where the weights come from (``provenance.run_record`` and what the caller adds).
        dtype: ``bfloat16`` or ``float32``, of the weights and the mask vector.

    Returns:
        ``out_dir``.

    Raises:
        ExportError: the folder is somebody else's, or the written one breaks a rule. An earlier export stays.
    """
    final = Path(out_dir)
    check_replaceable(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        tensors, mask = export_tensors(drafter, torch_dtype(dtype))
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        torch.save(mask, temporary / MASK)
        atomic_write_json(temporary / CONFIG, published_config(drafter, target_info, dtype))
        # safetensors writes for the owner alone; a server often runs as somebody else
        (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode)
        write_papers(temporary, config, target_info, mask, run_record=run_record, dtype=dtype)
        refuse_faults(temporary, target_info)
        refuse_difference(temporary, tensors, mask, torch_dtype(dtype))
        replace_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("exported %d tensors and the mask vector to %s", len(tensors), final)
    return final


def refuse_faults(folder: Path, target_info: TargetInfo) -> None:
    """Raise ExportError for the doctor's errors about ``folder``; log its warnings."""
    findings = check_folder(folder, target_info=target_info)
    errors = [finding for finding in findings if finding.severity == ERROR]
    for finding in findings:
        if finding.severity != ERROR:
            logger.warning("export: %s", finding)
    if errors:
        listed = "\n  ".join(map(str, errors))
        raise ExportError(f"the exported drafter would not serve as trained, so it is not published:\n  {listed}")


def refuse_difference(folder: Path, tensors: dict[str, Tensor], mask: Tensor, dtype: torch.dtype) -> None:
    """Raise ExportError unless the folder reads back bit for bit."""
    loaded = load_drafter(folder, dtype).state_dict()
    wanted = {**tensors, MASK_PARAMETER: mask}
    different = [name for name in sorted(wanted) if not torch.equal(loaded[name], wanted[name])]
    if different:
        raise ExportError(
            f"read back, these tensors differ from what was written: {', '.join(different)}. Check the disk."
        )


def _replaced_name(final: Path) -> Path:
    """Where the previous export waits while its successor is renamed."""
    return final.with_name(f".{final.name}.replaced")


def check_replaceable(final: Path) -> None:
    """Refuse to touch a folder that no export wrote; bring back one that a crash left aside.

    Raises:
        ExportError: ``final`` is a file, or a folder with content but without this tool's record.
    """
    aside = _replaced_name(final)
    if aside.exists() and not final.exists():
        os.replace(aside, final)
    if not final.exists():
        return
    if not final.is_dir():
        raise ExportError(f"export.output_dir={final}: is a file. Choose another folder.")
    if not any(final.iterdir()):
        return
    ours = (final / RECORD).exists() and read_json(final / RECORD).get("tool") == TOOL
    if not ours:
        raise ExportError(
            f"export.output_dir={final}: has files that no export wrote (no {RECORD} of {TOOL}) and is left as it is. "
            "Choose another folder or move that one away."
        )


def replace_folder(temporary: Path, final: Path) -> None:
    """Publish ``temporary`` as ``final``; a previous export is set aside first and removed last."""
    aside = _replaced_name(final)
    if aside.exists():
        shutil.rmtree(aside)
    if final.exists():
        os.replace(final, aside)
        fsync_path(final.parent)
    try:
        publish(temporary, final)
    except OSError:
        if aside.exists():
            os.replace(aside, final)
        raise
    if aside.exists():
        shutil.rmtree(aside)
