"""One style to another: what would be lost first, then a folder that appears whole or not at all.

Tensors pass one by one, so memory is that of the largest few. The written folder is opened again as its own style
before it takes its name: what it says must be what the source says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2_train.config import DTYPES
from dflash2_train.export.convert.papers import write_papers
from dflash2_train.export.convert.source import STYLES, Source, is_idle, open_source, source_record
from dflash2_train.export.convert.style import ConvertError, Described, Hints, Loss, Style
from dflash2_train.export.convert.target_rows import (
    Mask,
    Target,
    compare_tables,
    find_mask,
    refuse_other_target,
)
from dflash2_train.export.doctor import examine
from dflash2_train.export.doctor.findings import Examination, refuse_errors
from dflash2_train.export.doctor.known_keys import TOP
from dflash2_train.export.doctor.opened import OpenedDrafter
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.doctor.weights import Weights
from dflash2_train.export.payload import CONFIG, MASK, MIN_MASK_NORM
from dflash2_train.export.published import FIRST_ARCHITECTURE, SECOND_KEYS, expected_tensors
from dflash2_train.export.weight_files import EMBEDDING
from dflash2_train.export.weight_writer import shard_bytes, write_weights
from dflash2_train.export.workspace import real_path, workspace
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import atomic_write_json, publish
from dflash2_train.target import torch_dtype

NO_FUNCTION = ("initializer_range",)  # fields of a shape that change no draft and that a style may not hold


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to make of a source."""

    to: Style
    hints: Hints
    target: Target | None = None
    dtype: str | None = None  # None: as the source has it
    accept_losses: bool = False  # also those that change the drafts
    max_shard_gib: float | None = None  # of a weights file; None: one file


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion that may be done."""

    source: Source
    request: Request
    described: Described
    mask: Mask
    losses: list[Loss]

    @property
    def keeps_function(self) -> bool:
        """Whether the result drafts as the source does."""
        return not any(loss.drafts for loss in self.losses)

    @property
    def written_mask(self) -> Tensor | None:
        """The vector [H] for ``mask_embedding.pt`` in the type of the weights, where the file is written."""
        vector = self.mask.vector
        if not self.request.to.keeps_mask or vector is None or float(vector.float().norm()) < MIN_MASK_NORM:
            return None
        return vector.to(torch_dtype(self.described.dtype))


def plan_conversion(folder: Path, request: Request) -> Plan:
    """Open the source and find out what a conversion would lose.

    Raises:
        ConvertError: as :func:`open_source`; of another target; without a common type of its tensors; or with losses
            that change the drafts, which were not accepted.
    """
    source = open_source(folder, _with_target(request))
    if request.target is not None:
        refuse_other_target(source, request.target)
    dtype = _chosen_dtype(source, request.dtype)
    described, second = _described(source, request, dtype)
    tables, own_row = compare_tables(source, request.target)
    mask = find_mask(source, request.target, own_row=own_row)
    losses = [
        *source.losses,
        *_unknown_keys(source),
        *tables,
        *second,
        *request.to.loses(described),
        *_mask_losses(mask, request),
        *_rounding(source, dtype),
    ]
    plan = Plan(source=source, request=request, described=described, mask=mask, losses=losses)
    if not plan.keeps_function and not request.accept_losses:
        listed = "\n  ".join(f"{loss.what}: {loss.text}" for loss in losses if loss.drafts)
        raise ConvertError(
            f"{folder}: as {request.to.title} it would draft otherwise than it does:\n  {listed}\n"
            "Mend what can be mended, or take it with --accept-losses."
        )
    return plan


def convert(plan: Plan, output: Path, *, name: str, commit: str | None) -> Path:
    """Write what was planned.

    Args:
        plan: from :func:`plan_conversion`.
        output: folder to make; must not exist or be empty.
        name: of the source, as the user gave it.
        commit: of a source on the Hub.

    Returns:
        ``output``.

    Raises:
        ConvertError: the folder is taken, or the result breaks a rule.
        ExportError: another process makes the folder, or it cannot be written.
    """
    final = real_path(output)
    with workspace(final) as space:
        refuse_taken(final)
        temporary = space / final.name
        temporary.mkdir()
        hashes = _write(temporary, plan)
        origin = source_record(plan.source, name, commit)
        write_papers(temporary, plan, origin, output_name=final.name, hashes=hashes)
        _refuse_difference(temporary, plan, hashes)
        publish(temporary, final)
    return output


def refuse_taken(output: Path) -> None:
    """Raise ConvertError where something stands under the name of the result."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConvertError(f"{output}: exists and is left as it is. Name another folder, or remove that one.")


def _with_target(request: Request) -> Hints:
    """What the user says; the target's number of layers where they named a target."""
    if request.target is None or request.hints.num_target_layers is not None:
        return request.hints
    return replace(request.hints, num_target_layers=request.target.info.num_layers)


def _chosen_dtype(source: Source, wanted: str | None) -> str:
    found = sorted(source.dtypes)
    if wanted is None and (len(found) > 1 or found[0] not in DTYPES):
        raise ConvertError(
            f"{source.folder}: its tensors are {' and '.join(found)}, and a drafter is stored in one of "
            f"{', '.join(DTYPES)}. Choose with --dtype; float32 keeps every value."
        )
    return wanted or found[0]


def _described(source: Source, request: Request, dtype: str) -> tuple[Described, list[Loss]]:
    """The drafter as the target style takes it, without convolution and selector where that has no place for them."""
    generation, lost = source.drafter.generation, []
    if generation == 2 and not request.to.has_second:
        idle, generation = is_idle(source), 1
        text = "they change nothing" if idle else "the other weights were trained with them"
        lost.append(Loss(what="convolution and selector", text=f"left out; {text}", drafts=not idle))
    published = published_config(source.drafter.shape, generation, dtype, _tokens(source, request.target))
    return Described(shape=source.drafter.shape, generation=generation, published=published, dtype=dtype), lost


def published_config(shape: DrafterShape, generation: int, dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a DFlash 2, or of a DFlash 1: the same without what shapes convolution and selector."""
    published = shape.to_published(dtype, **tokens)
    if generation == 1:
        nested = {key: value for key, value in published["dflash_config"].items() if key not in SECOND_KEYS}
        published |= {"architectures": [FIRST_ARCHITECTURE], "dflash_config": nested}
    return published


def _tokens(source: Source, target: Target | None) -> dict[str, Any]:
    if target is None:
        return source.tokens
    info = target.info
    return {
        "bos_token_id": info.bos_token_id,
        "eos_token_id": list(info.eos_token_ids),
        "pad_token_id": info.pad_token_id,
    }


def _unknown_keys(source: Source) -> list[Loss]:
    stated = {**source.published, **source.config}
    unknown = sorted(key for key in stated.keys() - TOP - source.style.keys if not key.startswith("_"))
    text = ", ".join(f"{key}={stated[key]!r}" for key in unknown)
    return [Loss(what="unknown keys", text=f"{text}: not carried over")] if unknown else []


def _mask_losses(mask: Mask, request: Request) -> list[Loss]:
    """What becomes of the mask vector; a style with an embedding takes it as that table's row."""
    style = request.to
    if style.keeps_mask:
        if mask.vector is not None and float(mask.vector.float().norm()) >= MIN_MASK_NORM:
            return []
        why = "is next to zero" if mask.vector is not None else "is not at hand: name the target's folder with --target"
        text = f"{MASK} is not written, servers use {mask.origin}; it {why}. This project's runner needs the file"
        return [Loss(what="mask vector", text=text)]
    if style.keeps_embedding:
        if request.target is not None and request.target.embedding is not None:
            return []
        text = "no embedding is written, so its trainer takes the target's; name the target's folder with --target"
        return [Loss(what="embedding", text=text, drafts=mask.is_targets is not True)]
    if mask.is_targets:
        return []
    known = "it is not the target's row" if mask.is_targets is False else "name the target's folder with --target"
    text = f"readers of {style.title} embed the target's row in mask slots, not {mask.origin}; {known}"
    return [Loss(what="mask vector", text=text, drafts=True)]


def _rounding(source: Source, dtype: str) -> list[Loss]:
    rounded = sorted(source.dtypes - {dtype}) if dtype != "float32" else []
    return [Loss(what="precision", text=f"{' and '.join(rounded)} values are rounded to {dtype}")] if rounded else []


def _write(folder: Path, plan: Plan) -> dict[str, str]:
    """Configuration, weights and mask vector; weights file -> sha256 of what was written."""
    style, described, source = plan.request.to, plan.described, plan.source
    hints = replace(plan.request.hints, **_verifier(plan.request))
    atomic_write_json(folder / CONFIG, style.configure(described, hints))
    shapes: dict[str, tuple[int, ...]] = {}
    reads: dict[str, Callable[[], Tensor]] = {}
    for name, size in expected_tensors(described.shape, described.generation).items():
        shapes[style.stored_name(name)], reads[style.stored_name(name)] = size, partial(source.drafter.read, name)
    target = plan.request.target
    if style.keeps_embedding and target is not None and target.embedding is not None:
        shapes[EMBEDDING] = (described.shape.vocab_size, described.shape.hidden_size)
        reads[EMBEDDING] = partial(_folded, target, plan.mask, described.shape.mask_token_id)
    mask = plan.written_mask
    if mask is not None:
        torch.save(mask.contiguous(), folder / MASK)
    return write_weights(
        folder,
        shapes,
        lambda name: reads[name](),
        dtype=torch_dtype(described.dtype),
        max_bytes=shard_bytes(plan.request.max_shard_gib),
    )


def _folded(target: Target, mask: Mask, token: int) -> Tensor:
    """The target's embedding [V, H] with the drafter's vector as the mask token's row."""
    assert target.embedding is not None, "asked for only where it is at hand"
    table = target.embedding.whole()
    if mask.vector is not None:
        table = table.to(torch.promote_types(table.dtype, mask.vector.dtype))
        table[token] = mask.vector.to(table.dtype)
    return table


def _verifier(request: Request) -> dict[str, Any]:
    """Name and classes of the target. A local folder is not named: it is of this machine."""
    target, named = request.target, request.hints.verifier
    if target is None:
        return {}
    public = named or (target.name if target.info.revision is not None else None)
    return {"verifier": public, "verifier_architectures": target.architectures}


def _refuse_difference(folder: Path, plan: Plan, hashes: Mapping[str, str]) -> None:
    """Raise ConvertError unless the folder on disk is what was written and says what the source says."""
    style, source, shape = plan.request.to, plan.source, plan.source.drafter.shape
    examined = _examine(folder, plan) if style.is_layout else None
    weights = Weights(folder) if examined is None or examined.subject is None else examined.subject.weights
    different = [name for name, digest in hashes.items() if weights.sha256(folder / name) != digest]
    if different:
        raise ConvertError(f"{', '.join(different)}: read back, differs from what was written. Check the disk.")
    hints = Hints(block_size=shape.block_size, num_target_layers=shape.num_target_layers)
    written = open_source(folder, hints).drafter
    if plan.keeps_function and _function(written.shape, written.generation) != _function(
        shape, plan.described.generation
    ):
        raise ConvertError(f"as {style.title} it would describe another drafter: {shape} became {written.shape}.")
    if examined is not None:
        refusal = f"{source.folder}: the result would not serve, so it is not written"
        refuse_errors(examined.findings, refusal, ConvertError)


def _examine(folder: Path, plan: Plan) -> Examination[OpenedDrafter]:
    target = plan.request.target
    return examine(folder, target=None if target is None else TargetFacts.of(target.info))


def _function(shape: DrafterShape, generation: int) -> dict[str, Any]:
    """What of a shape decides the drafts."""
    left_out = NO_FUNCTION if generation == 2 else (*NO_FUNCTION, *SECOND_KEYS)
    return {key: value for key, value in asdict(shape).items() if key not in left_out} | {"generation": generation}


__all__ = ["STYLES", "Plan", "Request", "convert", "plan_conversion", "published_config", "refuse_taken"]
