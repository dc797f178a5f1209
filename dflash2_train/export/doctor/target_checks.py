"""What only the target can tell: sizes, positions, the tokenizer, the embedding's rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash2_train.config import UserError
from dflash2_train.export.doctor.findings import LLAMA_CPP, READERS, REFERENCE, SERVERS, SGLANG, VLLM, WARNING
from dflash2_train.export.doctor.mask_checks import usable_vector
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter, whole
from dflash2_train.export.payload import MASK, PLAIN_DTYPES
from dflash2_train.export.weight_files import TABLES

check = DRAFTER_CHECKS.check
DEAD_ROW = 1e-3  # of the median norm of the table's rows
FAR = 10.0  # times the largest row
ROWS = 8192  # of the embedding in float32 at a time


@check(
    "target-sizes",
    group="target",
    rule="hidden_size, vocab_size and num_target_layers are the target's",
    servers=READERS,
    next_step="Serve the drafter with the target that it was trained for",
)
def _sizes(drafter: OpenedDrafter) -> Iterator[str]:
    target = drafter.target
    if target is None:
        return
    pairs = (
        ("hidden_size", drafter.top("hidden_size"), target.hidden_size),
        ("vocab_size", drafter.top("vocab_size"), target.vocab_size),
        ("num_target_layers", whole(drafter.either("num_target_layers")), target.num_layers),
    )
    for key, stated, wanted in pairs:
        if stated is not None and stated != wanted:
            yield f"{key}={stated}, {target.name} has {wanted}"


@check(
    "target-taps",
    group="target",
    rule="target_layer_ids are layers of the target",
    servers=READERS,
    next_step="State 0-based layers of this target: servers add the 1",
)
def _taps(drafter: OpenedDrafter) -> Iterator[str]:
    target, stated = drafter.target, whole(drafter.either("num_target_layers"))
    if target is not None and drafter.taps:
        outside = [tap for tap in drafter.taps if tap >= target.num_layers and (stated is None or tap < stated)]
        if outside:
            yield f"target_layer_ids has {outside}, {target.name} has {target.num_layers} layers"


@check(
    "positions",
    group="target",
    rule="max_position_embeddings reaches as far as the target's",
    servers=READERS,
    next_step="Raise drafter.max_position_embeddings; no training is needed. Servers clamp positions beyond silently",
)
def _positions(drafter: OpenedDrafter) -> Iterator[str]:
    stated, target = drafter.top("max_position_embeddings"), drafter.target
    if target is not None and stated is not None and stated < target.max_position_embeddings:
        yield f"max_position_embeddings={stated}, {target.name} reaches {target.max_position_embeddings}"


@check(
    "mask-id-ends",
    group="target",
    rule="the mask token ends no reply",
    servers=READERS,
    next_step="Train with a reserved token of the target",
)
def _mask_id_ends(drafter: OpenedDrafter) -> Iterator[str]:
    target = drafter.target
    if target is not None and drafter.mask_token_id in target.eos_token_ids:
        yield f"mask_token_id={drafter.mask_token_id} ends replies of {target.name}"


@check(
    "mask-id-text",
    group="target",
    rule="the tokenizer never writes the mask token",
    servers=READERS,
    next_step="Train with a reserved token: wherever this one stands, the mask vector would take its place",
)
def _mask_id_text(drafter: OpenedDrafter) -> Iterator[str]:
    tokenizer, token = drafter.target.tokenizer if drafter.target else None, drafter.mask_token_id
    if tokenizer is None or token is None:
        return
    if token in tokenizer.ordinary:
        yield f"mask_token_id={token} is an ordinary token of the tokenizer"
    elif token in tokenizer.special and tokenizer.special[token] in tokenizer.template:
        yield f"mask_token_id={token} is {tokenizer.special[token]!r}, which the chat template writes"


@check(
    "mask-token-clash",
    group="target",
    rule="where the tokenizer has a mask token of its own, it is mask_token_id",
    servers=(SGLANG,),
    next_step="Train with the tokenizer's mask token; SGLang refuses to start with another",
)
def _mask_token_clash(drafter: OpenedDrafter) -> Iterator[str]:
    tokenizer, token = drafter.target.tokenizer if drafter.target else None, drafter.mask_token_id
    if tokenizer is None or tokenizer.mask_token is None or token is None:
        return
    own = next((id for id, text in tokenizer.special.items() if text == tokenizer.mask_token), None)
    if own is not None and own != token:
        yield f"mask_token_id={token}, the tokenizer's {tokenizer.mask_token!r} is {own}"


def _row_norms(drafter: OpenedDrafter) -> tuple[Tensor, Tensor] | None:
    """Norms of the embedding's rows [V] and the row of the mask token [H], where the target's weights are here."""
    target, token = drafter.target, drafter.mask_token_id
    if target is None or target.tensors is None or token is None:
        return None
    try:
        name = f"{target.tensors.decoder_prefix()}embed_tokens.weight"
    except UserError:  # named in a way that this project does not know: nothing can be said of its rows
        return None
    table = target.tensors[name]
    if not table.is_floating_point() or table.ndim != 2 or not 0 <= token < table.shape[0]:
        return None
    starts = range(0, table.shape[0], ROWS)
    return torch.cat([table[start : start + ROWS].float().norm(dim=-1) for start in starts]), table[token].float()


@check(
    "mask-norm",
    group="target",
    severity=WARNING,
    rule="the mask vector's norm is of the order of the embedding's rows",
    servers=(VLLM,),
    next_step="Look at the training run: a vector this long or short drowns the anchor or is drowned by it",
)
def _mask_norm(drafter: OpenedDrafter) -> Iterator[str]:
    vector = usable_vector(drafter)
    rows = _row_norms(drafter) if vector is not None else None
    if vector is None or rows is None:
        return
    norm, middle, largest = float(vector.norm()), float(rows[0].median()), float(rows[0].max())
    if norm > FAR * largest or norm < DEAD_ROW * middle:
        yield f"{MASK} has norm {norm:.3g}; the embedding's rows have {middle:.3g} in the middle, {largest:.3g} at most"


@check(
    "mask-row",
    group="target",
    rule="without a mask vector, the target's own row of mask_token_id is a real one",
    servers=SERVERS,
    next_step="Find the drafter's mask_embedding.pt, or a drafter trained without one: an untouched row says nothing",
)
def _mask_row(drafter: OpenedDrafter) -> Iterator[str]:
    rows = _row_norms(drafter) if drafter.mask is None and drafter.folder is not None else None
    if rows is not None:
        norm, middle = float(rows[1].norm()), float(rows[0].median())
        if norm < DEAD_ROW * middle:
            yield f"row {drafter.mask_token_id} of the target has norm {norm:.2e}, the middle row {middle:.2e}"


@check(
    "own-tables-same",
    group="target",
    severity=WARNING,
    rule="a table of the drafter's own differs from the target's",
    servers=(VLLM, LLAMA_CPP, SGLANG, REFERENCE),
    next_step="Leave it out: every reader takes the target's, and the file gets smaller",
)
def _own_tables_same(drafter: OpenedDrafter) -> Iterator[str]:
    tensors = drafter.target.tensors if drafter.target else None
    for name in TABLES:
        stored = drafter.weights.tensors.get(name)
        theirs = next((full for full in (tensors.names if tensors else []) if full.endswith(name)), None)
        if tensors is None or theirs is None or stored is None or stored.dtype not in PLAIN_DTYPES:
            continue
        table = tensors[theirs]
        if tuple(table.shape) == stored.shape and _equal(drafter, name, table):
            yield f"{name} equals the target's"


def _equal(drafter: OpenedDrafter, name: str, table: Tensor) -> bool:
    """Whether the stored table has the values of ``table``; a piece at a time."""
    start = 0
    for piece in drafter.weights.pieces(name):
        if not torch.equal(piece, table[start : start + piece.shape[0]].float()):
            return False
        start += piece.shape[0]
    return True
