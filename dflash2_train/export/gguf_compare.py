"""What a storage type costs: the drafter of a GGUF file against the published bf16 one, on the same blocks.

Both run in fp32, so that only the stored values differ. Compared are the states after the final norm, the best token of
the unary logits, and the path that the selector walks; on captured data also how much of that path the data confirms,
which is what acceptance rests on. Anchor and mask are embedded as llama.cpp would: from the file's own table, or from
the target's, mask token included, where the file has none.

Letters: n blocks of a row, S context tokens, W block size, K = W - 1, H hidden, T taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from data_gen.cache.reader import CaptureReader
from dflash2_train.blocks import draw_anchors
from dflash2_train.export.gguf_read import GgufDrafter
from dflash2_train.export.gguf_source import DrafterFolder
from dflash2_train.export.gguf_types import GgufError
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.target import FrozenHead

BLOCKS_A_ROW = 8
CONTEXT_LIMIT = 1024  # tokens of a row that are used
RANDOM_CONTEXT = 64
SEED = 0

Embed = Callable[[Tensor], Tensor]  # ids [m] -> rows [m, H]


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One context and the blocks drafted from it."""

    input_ids: Tensor  # [S] int64
    tap_hidden: Tensor  # [S, T * H] float32
    anchors: Tensor  # [n] int64, ascending
    labels: Tensor | None  # [n, K] int64, -1 where the text ends; None for random inputs


@dataclass(frozen=True, kw_only=True)
class DraftedRow:
    """What a drafter makes of a row."""

    hidden: Tensor  # [n, K, H]
    top_ids: Tensor  # [n, K] best of the unary logits
    path_ids: Tensor  # [n, K]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One file against the published drafter, over all blocks."""

    hidden_error: float  # norm of the difference / norm of the reference
    top_changed: float  # share of slots with another best token
    path_changed: float  # share of slots with another token on the path
    blocks_changed: float  # share of blocks with another path
    matched: float | None  # tokens a block before path and data part; None for random inputs
    matched_reference: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def captured_rows(root: Path, shape: DrafterShape, *, num_blocks: int) -> list[ProbeRow]:
    """Rows of a capture cache with ``num_blocks`` blocks in all, or fewer where it holds fewer.

    Args:
        root: the ``capture`` folder.
        shape: of the drafter.
        num_blocks: to collect, from the first samples on.

    Raises:
        CacheIntegrityError: no usable cache.
        GgufError: no sample has a place where a block could start.
    """
    reader, rows, found = CaptureReader(root, verify_checksums=False), [], 0
    for index in range(len(reader)):
        if found >= num_blocks:
            break
        sample = reader.read(index)
        mask = sample.loss_mask[:CONTEXT_LIMIT]
        limit = min(BLOCKS_A_ROW, num_blocks - found)
        anchors = draw_anchors(mask, limit=limit, seed=SEED, epoch=0, sample_id=sample.sample_id)
        anchors = anchors[anchors > 0]  # a block needs a context
        if len(anchors) == 0:
            continue
        found += len(anchors)
        last = int(anchors[-1])
        ids = sample.input_ids.long()
        following = torch.cat([ids, ids.new_full((shape.block_size,), -1)])
        rows.append(
            ProbeRow(
                input_ids=ids[: last + 1],
                tap_hidden=sample.tap_hidden[:last].float(),
                anchors=anchors,
                labels=torch.stack([following[a + 1 : a + shape.block_size] for a in anchors.tolist()]),
            )
        )
    if not rows:
        raise GgufError(f"{root}: no sample has two supervised tokens after a first one. Use export.gguf.compare_on=random.")
    return rows


def random_rows(shape: DrafterShape, *, num_blocks: int) -> list[ProbeRow]:
    """Rows of noise, the same in every call; they say how far values move, not what a text would draft."""
    generator = torch.Generator().manual_seed(SEED)
    rows = []
    for start in range(0, num_blocks, BLOCKS_A_ROW):
        count = min(BLOCKS_A_ROW, num_blocks - start)
        anchors = torch.randperm(RANDOM_CONTEXT - 1, generator=generator)[:count].sort().values + 1
        last = int(anchors[-1])
        ids = torch.randint(0, shape.vocab_size, (last + 1,), generator=generator)
        taps = torch.randn(last, shape.num_taps * shape.hidden_size, generator=generator)
        rows.append(ProbeRow(input_ids=ids, tap_hidden=taps, anchors=anchors, labels=None))
    return rows


@torch.inference_mode()
def draft_row(drafter: Drafter, row: ProbeRow, embed: Embed, head_weight: Tensor) -> DraftedRow:
    """Draft every block of a row greedily.

    Args:
        drafter: float32, on the CPU.
        row: contexts and anchors.
        embed: input rows of tokens, the mask token included.
        head_weight: the target's output head [V, H].
    """
    shape = drafter.shape
    slots = torch.arange(shape.block_size)
    anchor_ids = row.input_ids[row.anchors]  # [n]
    rows = embed(torch.cat([anchor_ids, torch.tensor([shape.mask_token_id])]))  # [n + 1, H]
    masks = rows[-1].expand(len(anchor_ids), shape.num_drafted, -1)  # [n, K, H]
    embeddings = torch.cat([rows[:-1, None], masks], 1).unsqueeze(0)  # [1, n, W, H]
    positions = torch.arange(len(row.tap_hidden)).unsqueeze(0)  # [1, S]
    anchors = row.anchors.unsqueeze(0)  # [1, n]
    visible = context_masks(
        shape.layer_types,
        shape.sliding_window,
        anchor_positions_local=anchors,
        block_document_ids=torch.zeros_like(anchors),
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        block_size=shape.block_size,
    )
    context = drafter.encode_context(row.tap_hidden.unsqueeze(0))  # [1, S, H]
    hidden = drafter(embeddings, context, anchors.unsqueeze(-1) + slots, positions, visible)[0, :, 1:]  # [n, K, H]
    unary, candidate_ids = functional.linear(hidden, head_weight).topk(shape.selector_top_k, dim=-1)  # [n, K, C]
    unary = unary * shape.output_multiplier
    if shape.final_logit_softcapping is not None:
        unary = torch.tanh(unary / shape.final_logit_softcapping) * shape.final_logit_softcapping
    path_ids, _ = drafter.candidate_selector.walk(hidden, unary, candidate_ids, anchor_ids)
    return DraftedRow(hidden=hidden, top_ids=candidate_ids[..., 0], path_ids=path_ids)


def compare(
    folder: DrafterFolder, files: Iterable[GgufDrafter], rows: Sequence[ProbeRow], head: FrozenHead
) -> list[Comparison]:
    """Every file against the folder's drafter, one drafter in memory at a time.

    Args:
        folder: the published drafter.
        files: made from it.
        rows: from :func:`captured_rows` or :func:`random_rows`.
        head: the target's embedding and output head, float32.
    """
    drafter = Drafter(folder.shape).float().eval()
    drafter.attention = "dense"
    _load(drafter, lambda name: torch.cat(list(folder.source(name).pieces())))
    reference = [draft_row(drafter, row, _published_embedding(folder, head), head.head) for row in rows]
    results = []
    for file in files:
        _load(drafter, lambda name, file=file: file.file.tensor(file.names[name]))  # type: ignore[misc]
        drafted = [draft_row(drafter, row, _file_embedding(file, head), head.head) for row in rows]
        results.append(_summarise(rows, reference, drafted))
    return results


@torch.no_grad()
def _load(drafter: Drafter, tensor: Callable[[str], Tensor]) -> None:
    """Fill the published tensors one after the other; the mask vector comes in through the embedding."""
    for name, parameter in drafter.named_parameters():
        if name != "mask_embedding":
            parameter.copy_(tensor(name).view(parameter.shape))


def _published_embedding(folder: DrafterFolder, head: FrozenHead) -> Embed:
    def embed(ids: Tensor) -> Tensor:
        rows = head.embedding[ids]
        if folder.mask is not None:
            rows = torch.where((ids == folder.shape.mask_token_id).unsqueeze(-1), folder.mask.float(), rows)
        return rows

    return embed


def _file_embedding(drafter: GgufDrafter, head: FrozenHead) -> Embed:
    if not drafter.has_embedding:
        return lambda ids: head.embedding[ids]
    return lambda ids: torch.stack([drafter.file.row("token_embd.weight", index) for index in ids.tolist()])


def _summarise(rows: Sequence[ProbeRow], reference: Sequence[DraftedRow], drafted: Sequence[DraftedRow]) -> Comparison:
    difference = total = 0.0
    for wanted, found in zip(reference, drafted, strict=True):
        difference += float((found.hidden - wanted.hidden).double().square().sum())
        total += float(wanted.hidden.double().square().sum())
    path = torch.cat([a.path_ids != b.path_ids for a, b in zip(reference, drafted, strict=True)])  # [blocks, K]
    top = torch.cat([a.top_ids != b.top_ids for a, b in zip(reference, drafted, strict=True)])
    return Comparison(
        hidden_error=(difference / total) ** 0.5,
        top_changed=float(top.float().mean()),
        path_changed=float(path.float().mean()),
        blocks_changed=float(path.any(-1).float().mean()),
        matched=_matched(rows, drafted),
        matched_reference=_matched(rows, reference),
    )


def _matched(rows: Sequence[ProbeRow], drafted: Sequence[DraftedRow]) -> float | None:
    """Mean length of the prefix on which path and data agree."""
    lengths = [
        (found.path_ids == row.labels).long().cumprod(-1).sum(-1)
        for row, found in zip(rows, drafted, strict=True)
        if row.labels is not None
    ]
    return float(torch.cat(lengths).float().mean()) if lengths else None
