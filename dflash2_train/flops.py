"""Floating-point operations of training steps, from shapes.

Counted are matrix products, a multiply-add being two operations; norms, rotations, softmaxes and the sums of the
convolutions are not. The backward pass of a product costs one more product for each operand that needs a gradient:

| part        | multiply-adds forward                           | backward |                                           |
|-------------|-------------------------------------------------|----------|-------------------------------------------|
| encode      | tokens * T * H * H                              | x 1      | ``fc``; taps need no gradient             |
| context     | L * tokens * H * 2 M D                          | x 2      | keys and values of the context            |
| projections | L * slots * H * (2 N D + 2 M D)                 | x 2      | queries, keys, values, output of a block  |
| attention   | pairs * 2 N D                                   | x 2      | pairs of slot and key that is *visible*   |
| mlp         | L * slots * 3 * H * I                           | x 2      |                                           |
| conv        | L * slots * H * 4 Kc G                          | x 2      | kernel projections, two pairs a layer     |
| head        | labels * H * V                                  | x 1      | the frozen head needs no gradient         |
| candidates  | labels * C * H, but known from the head         | x 1, 0   | 0 with ``loss.detach_unary``              |
| selector    | labels * H * R                                  | x 2      | projection of the state                   |
| scores      | labels * C * R                                  | x 1      | codebook rows: scaled and summed, no more |

This is the work that the step is for (*model* operations). Padding, keys that a chunk of the attention computes
although no slot sees them, scores computed again inside the attention's backward pass, and the paths that are walked
for the record are not in it. With ``train.gradient_checkpointing`` the layers run forward once more, which is added in
``hardware`` alone.

Letters: T taps, H hidden, L layers, N query heads, M key heads, D head size, I intermediate, Kc kernel size, G groups,
V vocabulary, C candidates, R selector rank; B rows, A blocks a row, W block size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash2_train.model.drafter_config import DrafterShape

if TYPE_CHECKING:  # torch is loaded by what counts tensors: a plan needs the table's formulas alone
    from torch import Tensor

    from dflash2_train.blocks import BlockBatch


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one or more windows hold. All figures add up over micro-batches, windows and ranks."""

    tokens: float  # context tokens, padding left out
    blocks: float
    slots: float  # blocks times their size W
    labels: float  # supervised slots
    pairs: float  # (slot, visible key of context or own block), summed over the layers

    @classmethod
    def from_counts(cls, counts: Sequence[float]) -> StepWork:
        """The inverse of :func:`count_work`, after any summing."""
        return cls(**dict(zip(WORK_NAMES, counts, strict=True)))


WORK_NAMES = ("tokens", "blocks", "slots", "labels", "pairs")


def count_work(document_ids: Tensor, blocks: BlockBatch, shape: DrafterShape) -> Tensor:
    """The figures of :class:`StepWork` for one micro-batch, fp64 [5] on its device; never waits for a GPU.

    Args:
        document_ids: [B, S] of the packed rows, padding -1.
        blocks: cut from them.
        shape: of the drafter, for the layers' windows.
    """
    import torch

    count = blocks.block_valid.sum()
    figures = (
        (document_ids >= 0).sum(),
        count,
        count * blocks.block_ids.shape[-1],
        blocks.supervised.sum(),
        visible_pairs(blocks, shape),
    )
    return torch.stack([figure.to(torch.float64) for figure in figures])


def visible_pairs(blocks: BlockBatch, shape: DrafterShape) -> Tensor:
    """Pairs of a slot and a key that it sees, over all layers, int64 [].

    The rule of ``masks``: in its own document slot i of a block at position a sees the a positions before the anchor,
    or those of them that are less than a window before a + i, and the W slots of its block.
    """
    import torch

    width = blocks.block_ids.shape[-1]
    anchors = blocks.block_position_ids[..., :1].expand(-1, -1, width)  # [B, A, W]
    slots = torch.arange(width, device=anchors.device)
    total = torch.zeros((), dtype=torch.int64, device=anchors.device)
    for kind, layers in Counter(shape.layer_types).items():
        seen = anchors
        if kind == "sliding_attention":
            assert shape.sliding_window is not None
            seen = torch.minimum(anchors, (shape.sliding_window - 1 - slots).clamp_min(0))
        total = total + layers * ((seen + width) * blocks.block_valid.unsqueeze(-1)).sum()
    return total


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Operations by part of the table above."""

    forward: dict[str, float]
    backward: dict[str, float]
    recomputed: float  # forward operations that run a second time for the backward pass

    @property
    def model(self) -> float:
        """Forward and backward, nothing twice."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def hardware(self) -> float:
        """With what is computed again on purpose."""
        return self.model + self.recomputed


def step_flops(
    shape: DrafterShape, work: StepWork, *, detach_unary: bool = False, gradient_checkpointing: bool = False
) -> StepFlops:
    """Operations of windows with so much work.

    Args:
        shape: of the drafter.
        work: of the windows.
        detach_unary: ``loss.detach_unary``.
        gradient_checkpointing: ``train.gradient_checkpointing``.
    """
    hidden, layers = shape.hidden_size, shape.num_layers
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    in_layers = {
        "projections": layers * work.slots * hidden * (2 * query + 2 * key),
        "attention": work.pairs * 2 * query,
        "mlp": layers * work.slots * 3 * hidden * shape.intermediate_size,
        "conv": layers * work.slots * hidden * 4 * shape.conv_kernel_size * shape.num_conv_groups,
    }
    around = {
        "encode": work.tokens * shape.num_taps * hidden * hidden,
        "context": layers * work.tokens * hidden * 2 * key,
        "head": work.labels * hidden * shape.vocab_size,
        "candidates": work.labels * shape.selector_top_k * hidden,
        "selector": work.labels * shape.selector_rank * hidden,
        "scores": work.labels * shape.selector_rank * shape.selector_top_k,
    }
    # Elsewhere both operands of a product get a gradient that is a product again.
    once = {"encode": 1, "head": 1, "candidates": 0 if detach_unary else 1, "scores": 1}
    forward = {part: 2.0 * count for part, count in {**around, **in_layers}.items()}
    backward = {part: once.get(part, 2) * count for part, count in forward.items()}
    return StepFlops(
        forward={**forward, "candidates": 0.0},
        backward=backward,
        recomputed=sum(forward[part] for part in in_layers) if gradient_checkpointing else 0.0,
    )
