"""A vLLM logits processor that applies top-p without vLLM's sort of the whole vocabulary.

Used on CPUs only, where that sort took more than half of a decoding step; on accelerators vLLM's own kernels
are fast. A request carries ``top_p=1.0`` for vLLM and the real value under ``NUCLEUS_KEY``; vLLM applies the
temperature first and this processor right after it, which is the order of vLLM's own top-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from data_gen.backends.nucleus import keep_nucleus_

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NUCLEUS_KEY = "dflash2_top_p"


def request_top_p(params: SamplingParams) -> float:
    """The nucleus mass that a request asks this processor for; 1.0 where it asks for none."""
    return float((params.extra_args or {}).get(NUCLEUS_KEY, 1.0))


class NucleusProcessor(LogitsProcessor):
    """Keeps the nucleus of every row of the batch (see :mod:`data_gen.backends.nucleus`)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        slots = vllm_config.scheduler_config.max_num_seqs
        self._top_p = torch.ones(slots, dtype=torch.float32, device=device)  # [slots], 1.0 = nothing to do

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a nucleus mass outside (0, 1], or one that vLLM would apply a second time."""
        top_p = request_top_p(sampling_params)
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"{NUCLEUS_KEY}={top_p}: must lie in (0, 1]. Set data.sampling.top_p in that range.")
        if top_p < 1.0 and sampling_params.top_p < 1.0:
            raise ValueError(f"top_p={sampling_params.top_p} with {NUCLEUS_KEY}={top_p}: give one of them only.")

    def is_argmax_invariant(self) -> bool:
        """The most probable token always stays, so greedy rows may skip the processor."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as vLLM adds, removes and moves them in its batch; in that order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._top_p[index] = 1.0
        for index, params, _, _ in batch_update.added:
            self._top_p[index] = request_top_p(params)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._top_p[source].item(), self._top_p[target].item()
            self._top_p[target] = moved
            self._top_p[source] = displaced if direction == MoveDirectionality.SWAP else 1.0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask ``logits`` [n, V] float32 in place."""
        return keep_nucleus_(logits, self._top_p[: logits.shape[0]])
