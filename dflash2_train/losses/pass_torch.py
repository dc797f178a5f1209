"""The pass over a chunk of logits in plain PyTorch, for the divergence over the full vocabulary.

On a CPU it goes block by block through a few rows whose fp32 copy stays in the core's cache: cast up, softmax, scale,
cast down then cost a fraction of what they cost through memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash2_train.budgets import block_rows
from dflash2_train.losses.candidates import top_candidates
from dflash2_train.losses.sweep import RowResults, Rows, SweepSettings, Workspace, concatenated


class _Block(NamedTuple):
    """Work planes of the rows of a block, [m, V] each."""

    logits: Tensor
    slope: Tensor | None  # only with a soft cap
    teacher: Tensor  # log-probabilities
    teacher_p: Tensor


class FullVocabularyPass:
    """A :class:`~dflash2_train.losses.sweep.LogitPass`.

    Args:
        settings: what is computed.
        head_weight: [V, H], for its dtype, device and V.
        budget: bytes of the whole sweep; blocks take a third of it at most.
        workspace: lends the work planes.
    """

    def __init__(self, settings: SweepSettings, head_weight: Tensor, *, budget: int, workspace: Workspace) -> None:
        self._settings, self._head, self._workspace = settings, head_weight, workspace
        self._dtype = torch.promote_types(head_weight.dtype, torch.float32)
        self._in_place = self._dtype == head_weight.dtype
        planes = 1 + (settings.shaping.cap is not None) + (0 if self._in_place else 2)
        vocab = head_weight.shape[0]
        plane_bytes = planes * vocab * self._dtype.itemsize
        self._block_rows: int | None = None
        self.bytes_per_row, self.fixed_bytes = plane_bytes, 0
        if head_weight.device.type == "cpu":
            self._block_rows = block_rows(vocab, self._dtype.itemsize, plane_bytes, budget)
            self.bytes_per_row, self.fixed_bytes = 0, self._block_rows * plane_bytes

    def run(self, raw: Tensor, teacher_raw: Tensor | None, rows: Rows, with_gradient: bool) -> RowResults:
        """See :class:`~dflash2_train.losses.sweep.LogitPass`."""
        assert teacher_raw is not None
        step = self._block_rows or len(raw)
        parts = []
        for start in range(0, len(raw), step):
            span = slice(start, min(start + step, len(raw)))
            parts.append(self._run_block(raw[span], teacher_raw[span], rows.piece(span), with_gradient))
        return concatenated(parts)

    def _run_block(self, raw: Tensor, teacher_raw: Tensor, rows: Rows, with_gradient: bool) -> RowResults:
        block = self._planes_of(raw, teacher_raw)
        top_logits, candidate_ids = top_candidates(block.logits, self._settings.top_k)
        gold = block.logits.gather(-1, rows.target_ids[:, None]).squeeze(-1)
        cross = _dot(block.teacher_p, block.logits)  # sum_V p z
        softmax = torch.softmax(block.logits, -1, out=block.logits)  # in place: the logits are spent
        largest = softmax.gather(-1, candidate_ids[:, :1]).squeeze(-1)
        log_normaliser = top_logits[:, 0] - largest.log()  # one look-up in place of a pass over V
        kl = _dot(block.teacher_p, block.teacher) - cross + log_normaliser  # sum p log p - sum p z + log Z
        overlap = torch.minimum(softmax, block.teacher_p, out=block.teacher).sum(-1)
        if with_gradient:
            self._write_gradient(softmax, block, rows)
            if not self._in_place:
                raw.copy_(softmax)
        top1_correct = candidate_ids[:, 0] == rows.target_ids
        return RowResults(log_normaliser - gold, kl, candidate_ids, top_logits, log_normaliser, top1_correct, overlap)

    def _planes_of(self, raw: Tensor, teacher_raw: Tensor) -> _Block:
        """Shaped logits, their slope and the teacher's log-probabilities and probabilities."""
        shaping, shape = self._settings.shaping, tuple(raw.shape)
        logits = shaping.apply_(self._work("work", raw))
        slope = None
        if shaping.cap is not None:
            slope = shaping.slope(logits, self._workspace.take("slope", shape, self._head, self._dtype))
        teacher = shaping.apply_(self._work("teacher_work", teacher_raw))
        torch.log_softmax(teacher, -1, out=teacher)
        teacher_p = torch.exp(teacher, out=self._workspace.take("p", shape, self._head, self._dtype))
        return _Block(logits, slope, teacher, teacher_p)

    def _work(self, name: str, raw: Tensor) -> Tensor:
        """``raw`` itself where it has the work dtype, else a copy in it."""
        if self._in_place:
            return raw
        return self._workspace.take(name, tuple(raw.shape), self._head, self._dtype).copy_(raw)

    def _write_gradient(self, softmax: Tensor, block: _Block, rows: Rows) -> None:
        """The rows' softmax becomes the gradient of ce_weight CE + kl_weight KL by the raw product; KL's is q - p."""
        settings = self._settings
        softmax.mul_(settings.ce_weight + settings.kl_weight)
        softmax.add_(block.teacher_p, alpha=-settings.kl_weight)
        gold = torch.full((len(softmax), 1), -settings.ce_weight, dtype=self._dtype, device=softmax.device)
        softmax.scatter_add_(-1, rows.target_ids[:, None], gold)
        if block.slope is not None:
            softmax.mul_(block.slope)
        elif settings.shaping.multiplier != 1.0:
            softmax.mul_(settings.shaping.multiplier)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row by row, [m, V] x [m, V] -> [m], without a temporary [m, V]."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).flatten()
