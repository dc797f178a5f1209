"""How much the chunked parts of a step take at once: plain arithmetic, shared by what allocates and what plans.

Nothing here needs torch, so that a plan answers at once. Sizes are bytes unless said otherwise.

Letters: N rows (supervised slots), H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LOGIT_BYTES = 4  # of a logit in fp32, the unit of loss.logit_share
FREE_BYTES = 1 << 20  # what the sweep over the logits may always take
SCRATCH_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 2 << 20}  # by bytes of a parameter: products, and the candidates' part
BLOCK_BYTES = 3 << 19  # 1.5 MiB of fp32 logits a block on a CPU: two cores' share of a usual second-level cache
ROWS_MULTIPLE = 32  # of supervised slots, in products with the head and the selector's projection
CHUNK_MULTIPLE = 16  # rows of a chunk; divides the former, so that the last chunk is a multiple as well
TOKENS_MULTIPLE, ANCHORS_MULTIPLE = 64, 16  # of a packed row, see dflash2_train.shapes
TILE_ROWS, TILE_BYTES = 256, 4 << 20  # of a tile of logits on a CPU: enough rows for the products, kept in the cache
LOGIT_GROUP = 64  # logits that share one maximum in the search for the largest
CPU_CHUNK_BYTES = 2 << 20  # scores of an attention chunk: a core's second-level cache
KEPT_WEIGHT_BYTES = 24 << 20  # of attention weights that a layer keeps for the backward pass, else they are made again
DEVICE_CHUNK_BYTES = 256 << 20  # the same on a GPU: enough rows to fill it


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple


def loss_budget(count: int, hidden: int, vocab: int, itemsize: int, *, chunk_bytes: int, logit_share: float) -> int:
    """What a sweep over N states [N, H] may hold.

    The caller's limit, or what else is left of ``logit_share`` of the fp32 logits [N, V] beside the gradient, its
    weighted copy and the scratch of the products.
    """
    share = int(logit_share * LOGIT_BYTES * count * vocab)
    return min(chunk_bytes, max(FREE_BYTES, share - 2 * count * hidden * itemsize - SCRATCH_BYTES[itemsize]))


def chunk_rows(padded_count: int, budget: int, *, fixed_bytes: int, bytes_per_row: int) -> int:
    """Rows of a chunk of logits: what the budget holds, in whole multiples where it can; at least one."""
    chunk = max(1, (budget - fixed_bytes) // bytes_per_row)
    return min(padded_count, max(chunk // CHUNK_MULTIPLE * CHUNK_MULTIPLE, min(chunk, CHUNK_MULTIPLE)))


def block_rows(vocab: int, work_itemsize: int, plane_bytes: int, budget: int) -> int:
    """Rows of logits that the pass of a CPU works on at once; ``plane_bytes`` is what a row takes beside itself."""
    cached = BLOCK_BYTES // (vocab * work_itemsize)
    return max(1, min(cached, budget // 3 // max(1, plane_bytes)))


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """How logits [N, V] are cut where plain PyTorch sweeps them: small tiles on a CPU, whole rows elsewhere."""

    rows: int  # of a chunk
    columns: int  # of a tile
    block_rows: int  # of a chunk that are worked on at once
    num_bytes: int  # of a tile, of what is worked on, and of the gradients that tiles add to

    def tiles(self, vocab: int) -> Iterator[slice]:
        """The tiles' columns."""
        for start in range(0, vocab, self.columns):
            yield slice(start, min(start + self.columns, vocab))


def tile_plan(
    padded_count: int, vocab: int, hidden: int, itemsize: int, *, budget: int, capped: bool, on_cpu: bool
) -> TilePlan:
    """The largest chunk within ``budget`` bytes; ``capped``: with the slope of a soft cap."""
    work = max(LOGIT_BYTES, itemsize)
    columns = min(vocab, TILE_BYTES // (TILE_ROWS * itemsize)) if on_cpu else vocab
    plane = (capped + (itemsize < work)) * columns * work  # of a row that is worked on
    row = columns * itemsize + hidden * (work + itemsize)
    if not on_cpu:
        rows = chunk_rows(padded_count, budget, fixed_bytes=0, bytes_per_row=row + plane)
        return TilePlan(rows=rows, columns=columns, block_rows=rows, num_bytes=rows * (row + plane))
    block = block_rows(columns, work, plane, budget)
    rows = min(TILE_ROWS, chunk_rows(padded_count, budget, fixed_bytes=block * plane, bytes_per_row=row))
    block = min(block, rows)
    return TilePlan(rows=rows, columns=columns, block_rows=block, num_bytes=rows * row + block * plane)


def triton_row_bytes(vocab: int, top_k: int, *, planes: int = 1) -> int:
    """What the pass of a GPU takes for each row beside the logits: group maxima and the searched groups."""
    groups = -(-vocab // LOGIT_GROUP)
    return 4 * groups * planes + top_k * LOGIT_GROUP * 2 * 8
