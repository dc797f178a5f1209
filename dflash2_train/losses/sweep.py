"""One sweep over whole rows: a chunk of logits in, its results and its hidden gradient out, the memory used again.

On CUDA all losses are computed so; in plain PyTorch only the divergence over the full vocabulary, whose overlap
min(p, q) needs both normalisers. All else takes the cheaper way of :mod:`~dflash2_train.losses.tiles`.

A chunk is one product with the head, a *pass* over the logits that leaves their gradient in the same place, and one
product back. The two products are left to the vendor's library (they are nearly all of the arithmetic, and a kernel
that fuses them with the softmax has to make the first one twice); passes differ by device, see ``pass_torch`` and
``pass_triton``.

Memory: the raw product in the parameters' dtype, [M, V], twice for ``full_vocabulary``, and what the pass needs. M is
chosen so that it stays within ``chunk_bytes``, and that all the loss holds stays within a share of fp32 logits [N, V],
a tenth by default. Every chunk reads the head again: few rows with a small share are slow on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dflash2_train import budgets
from dflash2_train.budgets import TilePlan, chunk_rows, loss_budget
from dflash2_train.losses.shaping import Shaping
from dflash2_train.shapes import padded_rows


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What is computed of each row."""

    ce_weight: float
    kl_weight: float
    kl_kind: str
    top_k: int
    shaping: Shaping


class Rows(NamedTuple):
    """The rows of a batch, or a chunk of them."""

    hidden: Tensor  # [M, H]
    target_ids: Tensor  # [M]
    teacher_ids: Tensor  # [M, T]
    teacher_logprobs: Tensor  # [M, T] fp32
    teacher_hidden: Tensor | None  # [M, H]; only for full_vocabulary

    def piece(self, span: slice) -> Rows:
        """Some of the rows, views."""
        return Rows(*(None if tensor is None else tensor[span] for tensor in self))  # type: ignore[arg-type]


class RowResults(NamedTuple):
    """Per-row results of a sweep."""

    ce: Tensor  # [M] fp32
    kl: Tensor  # [M] fp32
    candidate_ids: Tensor  # [M, C] int64
    candidate_logits: Tensor  # [M, C] fp32
    log_normaliser: Tensor  # [M] fp32
    top1_correct: Tensor  # [M] bool
    sum_min_pq: Tensor  # [M] fp32


class Workspace:
    """Flat buffers that outlive a call: on a CPU, fresh pages cost more than the arithmetic done on them.

    A buffer grows when a call needs more and is otherwise handed out again as it is, contents undefined. Other
    devices get fresh memory from their caching allocator, which may lend it to the rest of the step meanwhile.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on the device of ``like``, valid until the next ``take`` of this name."""
        dtype = dtype or like.dtype
        if like.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=like.device)
        size = math.prod(shape)
        held = self._buffers.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)

    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class LogitPass(Protocol):
    """What is done to a chunk of logits."""

    bytes_per_row: int  # beside the raw product
    fixed_bytes: int

    def run(self, raw: Tensor, teacher_raw: Tensor | None, rows: Rows, with_gradient: bool) -> RowResults:
        """Results of M rows.

        Args:
            raw: [M, V] the product of states and head; overwritten, with the gradient of the rows' losses by it if
                ``with_gradient``.
            teacher_raw: [M, V] the teacher's, for ``full_vocabulary``; overwritten.
            rows: M of them.
            with_gradient: whether to leave a gradient.
        """


def sweep_budget(hidden: Tensor, head_weight: Tensor, chunk_bytes: int, logit_share: float) -> int:
    """Bytes that a sweep over the states [N, H] may hold, see :func:`~dflash2_train.budgets.loss_budget`."""
    sizes = (*hidden.shape, len(head_weight), hidden.element_size())
    return loss_budget(*sizes, chunk_bytes=chunk_bytes, logit_share=logit_share)


def tile_plan(head_weight: Tensor, padded_count: int, budget: int, *, capped: bool) -> TilePlan:
    """How plain PyTorch sweeps so many rows, see :func:`~dflash2_train.budgets.tile_plan`."""
    sizes = (padded_count, *head_weight.shape, head_weight.element_size())
    return budgets.tile_plan(*sizes, budget=budget, capped=capped, on_cpu=head_weight.device.type == "cpu")


@torch.no_grad()
def sweep(
    rows: Rows,
    head_weight: Tensor,
    logit_pass: LogitPass,
    *,
    budget: int,
    with_gradient: bool,
    workspace: Workspace,
) -> tuple[RowResults, Tensor | None]:
    """Results of all N > 0 rows, and the gradient [N, H] of each row's loss by its state; ``budget`` in bytes."""
    count, vocab = len(rows.hidden), head_weight.shape[0]
    products = 1 if rows.teacher_hidden is None else 2
    bytes_per_row = products * vocab * head_weight.element_size() + logit_pass.bytes_per_row
    hidden = padded_rows(rows.hidden)  # the padding goes through the products alone
    chunk = chunk_rows(len(hidden), budget, fixed_bytes=logit_pass.fixed_bytes, bytes_per_row=bytes_per_row)
    raw = workspace.take("raw", (chunk, vocab), head_weight)
    teacher_raw = None if products == 1 else workspace.take("teacher_raw", (chunk, vocab), head_weight)
    teacher_hidden = None if rows.teacher_hidden is None else padded_rows(rows.teacher_hidden)
    gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if with_gradient else None
    parts = []
    for start in range(0, count, chunk):
        span = slice(start, min(start + chunk, len(hidden)))
        size = min(span.stop, count) - start
        logits = torch.mm(hidden[span], head_weight.t(), out=raw[: span.stop - start])
        teacher_logits = None
        if teacher_raw is not None and teacher_hidden is not None:
            teacher_logits = torch.mm(teacher_hidden[span], head_weight.t(), out=teacher_raw[: len(logits)])[:size]
        parts.append(logit_pass.run(logits[:size], teacher_logits, rows.piece(span), with_gradient))
        if gradient is not None:
            torch.mm(logits, head_weight, out=gradient[span])
    return concatenated(parts), None if gradient is None else gradient[:count]


def concatenated(parts: list[RowResults]) -> RowResults:
    """Results of consecutive pieces as one."""
    return parts[0] if len(parts) == 1 else RowResults(*(torch.cat(field) for field in zip(*parts, strict=True)))
