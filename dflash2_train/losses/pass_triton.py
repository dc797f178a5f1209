"""The pass over a chunk of logits on CUDA: two or three Triton kernels, everything else on [M, T] or [M, C].

Why not one kernel with the products in it: the softmax of a row is known only after its last logit, so a fused
kernel makes every logit twice, which is half as much arithmetic again, in tiles that seldom reach the library's rate.
Between two library products the kernels here move the chunk three times (read, read and write, 16 bits a logit), a
few percent of the products' time. Times on a GPU are not measured yet; ``tests/bench/bench_loss.py --device cuda`` is
ready to.

The places that the gradient is corrected at are computed apart, in fp32, and written over what the kernel left there:
near a good drafter q - p is small against both, and adding to a rounded q would lose it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dflash2_train.budgets import LOGIT_GROUP as GROUP
from dflash2_train.budgets import triton_row_bytes
from dflash2_train.config import ConfigError
from dflash2_train.losses import kernels
from dflash2_train.losses.candidates import top_candidates
from dflash2_train.losses.divergence import TeacherTerms, teacher_terms
from dflash2_train.losses.sweep import RowResults, Rows, SweepSettings

TILE = 4096  # logits a program holds
WARPS = 8


class TritonPass:
    """A :class:`~dflash2_train.losses.sweep.LogitPass`.

    Args:
        settings: what is computed.
        head_weight: [V, H], for its dtype, device and V.
        full: whether a teacher over the whole vocabulary is given.

    Raises:
        ConfigError: neither a CUDA device nor Triton's interpreter, or fp64 parameters.
    """

    def __init__(self, settings: SweepSettings, head_weight: Tensor, *, full: bool) -> None:
        device, dtype = head_weight.device, head_weight.dtype
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ConfigError(f"loss.implementation=triton: needs CUDA, not {device.type}. Use auto or torch.")
        if dtype == torch.float64:
            raise ConfigError("loss.implementation=triton: float64 is computed by torch alone. Use torch.")
        self._settings, self._vocab = settings, head_weight.shape[0]
        self._num_groups = triton.cdiv(self._vocab, GROUP)
        self.bytes_per_row = triton_row_bytes(self._vocab, settings.top_k, planes=2 if full else 1)
        self.fixed_bytes = 0
        cap = settings.shaping.cap
        self._shape_options = {"multiplier": settings.shaping.multiplier, "cap": 1.0 if cap is None else cap}
        self._options = {"HAS_CAP": cap is not None, "TILE": TILE, "num_warps": WARPS}

    def run(self, raw: Tensor, teacher_raw: Tensor | None, rows: Rows, with_gradient: bool) -> RowResults:
        """See :class:`~dflash2_train.losses.sweep.LogitPass`."""
        settings = self._settings
        log_normaliser, group_max = self._statistics(raw)
        candidate_logits, candidate_ids = self._candidates(raw, group_max)
        places = torch.cat([rows.target_ids[:, None], rows.teacher_ids], 1)  # [M, 1 + T]
        logits = settings.shaping.apply(raw.gather(1, places))
        log_q = logits - log_normaliser[:, None]
        teacher_normaliser = None
        if teacher_raw is None:
            terms = teacher_terms(log_q[:, 1:], rows.teacher_logprobs.float(), settings.kl_kind)
        else:
            teacher_normaliser, _ = self._statistics(teacher_raw)
            terms = self._full_terms(raw, teacher_raw, log_normaliser, teacher_normaliser, rows)
        if with_gradient:
            scale = settings.ce_weight + settings.kl_weight * terms.row_scale
            values = self._corrected(log_q, logits, terms, scale, places)
            if teacher_raw is not None and teacher_normaliser is not None:
                log_p = settings.shaping.apply(teacher_raw.gather(1, places)) - teacher_normaliser[:, None]
                values -= settings.kl_weight * log_p.exp() * settings.shaping.slope(logits)
            self._write_gradient(raw, teacher_raw, log_normaliser, teacher_normaliser, scale)
            raw.scatter_(1, places, values.to(raw.dtype))
        top1_correct = candidate_ids[:, 0] == rows.target_ids
        return RowResults(
            -log_q[:, 0], terms.kl, candidate_ids, candidate_logits, log_normaliser, top1_correct, terms.sum_min_pq
        )

    def _statistics(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log-normaliser [M] and the maxima of groups of neighbours [M, G], fp32."""
        log_normaliser = torch.empty(len(raw), dtype=torch.float32, device=raw.device)
        group_max = torch.empty((len(raw), self._num_groups), dtype=torch.float32, device=raw.device)
        kernels.statistics[(len(raw),)](
            raw,
            log_normaliser,
            group_max,
            self._vocab,
            self._num_groups,
            **self._shape_options,
            GROUP=GROUP,
            **self._options,
        )
        return log_normaliser, group_max

    def _candidates(self, raw: Tensor, group_max: Tensor) -> tuple[Tensor, Tensor]:
        """The C largest logits of each row, descending: values [M, C] and ids [M, C]."""
        count, shaping = self._settings.top_k, self._settings.shaping
        if self._num_groups < 2 * count:
            values, ids = top_candidates(raw, count)
            return shaping.apply(values), ids
        groups = group_max.topk(count, dim=-1, sorted=False).indices  # hold all of the count largest logits
        ids = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=raw.device)).flatten(1)
        outside = ids >= self._vocab
        logits = shaping.apply(raw.gather(1, ids.clamp(max=self._vocab - 1))).masked_fill(outside, -torch.inf)
        best = logits.topk(count, dim=-1)
        return best.values, ids.gather(1, best.indices)

    def _full_terms(
        self, raw: Tensor, teacher_raw: Tensor, log_normaliser: Tensor, teacher_normaliser: Tensor, rows: Rows
    ) -> TeacherTerms:
        """KL over the whole vocabulary; its gradient is q - p, nothing to correct."""
        divergence, overlap = torch.empty_like(log_normaliser), torch.empty_like(log_normaliser)
        kernels.full_divergence[(len(raw),)](
            raw,
            teacher_raw,
            log_normaliser,
            teacher_normaliser,
            divergence,
            overlap,
            self._vocab,
            **self._shape_options,
            **self._options,
        )
        corrections = divergence.new_zeros(rows.teacher_ids.shape)
        return TeacherTerms(divergence, torch.ones_like(divergence), corrections, overlap)

    def _corrected(self, log_q: Tensor, logits: Tensor, terms: TeacherTerms, scale: Tensor, places: Tensor) -> Tensor:
        """Gradient by the raw product at the gold token and the teacher's ids, [M, 1 + T] fp32.

        A place named twice (the gold token is often one of T) gets the sum of its corrections both times.
        """
        settings = self._settings
        gold = torch.full_like(log_q[:, :1], -settings.ce_weight)
        corrections = torch.cat([gold, settings.kl_weight * terms.corrections], 1)
        same = places[:, :, None] == places[:, None, :]  # [M, 1 + T, 1 + T]
        summed = torch.where(same, corrections[:, None, :], 0.0).sum(-1)
        return (scale[:, None] * log_q.exp() + summed) * settings.shaping.slope(logits)

    def _write_gradient(
        self,
        raw: Tensor,
        teacher_raw: Tensor | None,
        log_normaliser: Tensor,
        teacher_normaliser: Tensor | None,
        scale: Tensor,
    ) -> None:
        """The raw product becomes the gradient by it, before corrections."""
        kernels.gradient[(len(raw), triton.cdiv(self._vocab, TILE))](
            raw,
            raw if teacher_raw is None else teacher_raw,
            log_normaliser,
            log_normaliser if teacher_normaliser is None else teacher_normaliser,
            scale,
            self._settings.kl_weight,
            self._vocab,
            **self._shape_options,
            HAS_TEACHER=teacher_raw is not None,
            **self._options,
        )
