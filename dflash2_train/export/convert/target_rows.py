"""The target beside a conversion: its sizes, its tables, and the row that stands for the mask token.

Drafters without a mask vector embed the target's row of ``mask_token_id`` in their mask slots, and some bring a copy
of the target's embedding. Whether a copy *is* the target's decides whether leaving it out changes the drafts.

Letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash2_train.config import ConfigError
from dflash2_train.export.convert.source import Source
from dflash2_train.export.convert.style import ConvertError, Loss
from dflash2_train.export.doctor.target_facts import open_target
from dflash2_train.export.payload import CONFIG, PLAIN_DTYPES, read_json
from dflash2_train.export.weight_files import EMBEDDING, HEAD
from dflash2_train.target import TargetInfo, TargetTensors, metadata_folder, open_target_config

ROWS = 4096  # compared at a time


@dataclass(frozen=True, kw_only=True)
class Table:
    """A [V, H] tensor in a file."""

    path: Path
    name: str

    def row(self, index: int) -> Tensor:
        """One row [H], a copy."""
        with safe_open(self.path, framework="pt") as file:
            row: Tensor = file.get_slice(self.name)[index : index + 1][0].clone()
        return row

    def whole(self) -> Tensor:
        """All of it."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name).clone()
        return tensor

    def rows_unlike(self, other: Table) -> list[int]:
        """Indices of the rows that differ from ``other``'s, compared in this table's type."""
        with safe_open(self.path, framework="pt") as mine, safe_open(other.path, framework="pt") as theirs:
            left, right = mine.get_slice(self.name), theirs.get_slice(other.name)
            count = left.get_shape()[0]
            if list(left.get_shape()) != list(right.get_shape()):
                return list(range(count))
            unlike: list[int] = []
            for start in range(0, count, ROWS):
                piece = left[start : start + ROWS]
                differs = (piece != right[start : start + ROWS].to(piece.dtype)).any(dim=-1)
                unlike += (differs.nonzero().flatten() + start).tolist()
        return unlike


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is known of the target."""

    name: str  # as the user named it
    info: TargetInfo
    architectures: tuple[str, ...]
    embedding: Table | None  # None: its weights are not in a local folder
    head: Table | None


@dataclass(frozen=True, kw_only=True)
class Mask:
    """What stands in mask slots."""

    vector: Tensor | None  # [H]; None: the target's row, which is not at hand
    origin: str
    is_targets: bool | None  # equal to the target's row; None: not known


def open_named_target(name: str, revision: str | None) -> Target:
    """A target by folder or Hub id; of the latter no weights are fetched.

    Raises:
        UserError: no such model.
    """
    facts = open_target(name, revision)
    assert facts.config is not None, "opened from a name a moment ago"
    info = open_target_config(facts.config)
    stated = read_json(metadata_folder(facts.config) / CONFIG).get("architectures") or []
    embedding, head = _tables(facts.tensors) if facts.tensors else (None, None)
    return Target(
        name=name,
        info=info,
        architectures=tuple(map(str, stated)),
        embedding=embedding,
        head=head,
    )


def _tables(tensors: TargetTensors) -> tuple[Table, Table]:
    """Embedding and output head; one and the same where no head is stored."""
    try:
        name = f"{tensors.decoder_prefix()}embed_tokens.weight"
    except ConfigError as error:
        raise ConvertError(str(error).replace("target.name", "--target", 1)) from error
    embedding, head = _plain(Table(path=tensors.path_of(name), name=name)), tensors.head_name()
    return embedding, embedding if head is None else Table(path=tensors.path_of(head), name=head)


def _plain(table: Table) -> Table:
    """The table, once its values are stored as they are: a row of a quantised one is no vector."""
    with safe_open(table.path, framework="pt") as file:
        dtype = file.get_slice(table.name).get_dtype()
    if dtype not in PLAIN_DTYPES:
        raise ConvertError(
            f"--target: {table.name} is {dtype}, expected one of {', '.join(PLAIN_DTYPES)}. Name a folder of the "
            "target that is not quantised, or leave --target out and give --num-target-layers."
        )
    return table


def refuse_other_target(source: Source, target: Target) -> None:
    """Raise ConvertError where sizes of the drafter are not the target's."""
    info, shape = target.info, source.drafter.shape
    pairs = {
        "hidden_size": (shape.hidden_size, info.hidden_size),
        "vocab_size": (shape.vocab_size, info.vocab_size),
        "num_target_layers": (shape.num_target_layers, info.num_layers),
    }
    wrong = [f"{key} {ours} -> {theirs}" for key, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise ConvertError(
            f"--target {target.name}: not the model that this drafter is for (drafter -> target): {', '.join(wrong)}."
        )


def compare_tables(source: Source, target: Target | None) -> tuple[list[Loss], bool]:
    """What becomes of tables that the drafter brings: none is carried over.

    Returns:
        Losses, and whether the row of the mask token is the drafter's own.
    """
    drafter, own_row = source.drafter, False
    losses: list[Loss] = []
    theirs = {} if target is None else {EMBEDDING: target.embedding, HEAD: target.head}
    for name, stored in sorted(drafter.tables.items()):
        own, other = Table(path=drafter.files.path_of(stored), name=stored), theirs.get(name)
        if other is None:
            text = f"{stored} is left out, not compared with the target's: name the target's folder with --target"
            losses.append(Loss(what="own table", text=text, drafts=True))
            continue
        unlike, token = own.rows_unlike(other), drafter.shape.mask_token_id
        own_row |= name == EMBEDDING and token in unlike
        if not unlike:
            losses.append(Loss(what="own table", text=f"{stored} is left out: it equals the target's"))
        elif name == EMBEDDING and unlike == [token]:
            losses.append(Loss(what="own table", text=f"{stored} is left out: only the mask token's row is its own"))
        else:
            text = f"{stored} is left out, and {len(unlike)} of its rows are not the target's"
            losses.append(Loss(what="own table", text=text, drafts=True))
    return losses, own_row


def find_mask(source: Source, target: Target | None, *, own_row: bool) -> Mask:
    """The vector in mask slots: the trained one, else a row of the drafter's own embedding, else the target's row.

    Args:
        source: the drafter.
        target: its target, or None.
        own_row: as :func:`compare_tables` found.
    """
    drafter, token = source.drafter, source.drafter.shape.mask_token_id
    row = target.embedding.row(token) if target is not None and target.embedding is not None else None
    if drafter.mask is not None:
        same = None if row is None else bool(torch.equal(row.to(drafter.mask.dtype), drafter.mask))
        return Mask(vector=drafter.mask, origin="the source's mask_embedding.pt", is_targets=same)
    if EMBEDDING in drafter.tables and (own_row or row is None):
        stored = drafter.tables[EMBEDDING]
        own = Table(path=drafter.files.path_of(stored), name=stored).row(token)
        return Mask(
            vector=own, origin=f"row {token} of the source's own embedding", is_targets=False if own_row else None
        )
    return Mask(vector=row, origin=f"row {token} of the target's embedding", is_targets=True)
