"""The target's own next-token distribution from its last hidden state: final norm once, then the output head.

    logits = head . RMSNorm(x; weight, eps),   log p = logits - log sum exp(logits)

Products run in the head's dtype and the logits are rounded to it, as the target does when it is served; softmax
arithmetic is float32 over the whole vocabulary. Only the top k and the normaliser are kept. Logits exist for
``CHUNK_ROWS`` rows at a time, in buffers that are used again.

N rows, H hidden size, V vocabulary, k = teacher_top_k.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from data_gen.backends.folder import EMBEDDING_NAMES, HEAD_NAMES, NORM_NAMES, load_first_tensor, text_config
from dflash2_train.config import ConfigError

CHUNK_ROWS = 128  # rows of logits alive at once

TeacherRows = tuple[Tensor, Tensor, Tensor]  # ids [N, k] int32, log probabilities [N, k] f16, normaliser [N] f32


class TeacherHead:
    """Final norm and output head of a target folder, on one device.

    Raises:
        ConfigError: the folder's tensors are not a plain RMSNorm and a head of the declared shape.
    """

    def __init__(self, folder: Path, *, top_k: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        norm = load_first_tensor(folder, NORM_NAMES)
        head = load_first_tensor(folder, HEAD_NAMES)
        if head is None:
            head = load_first_tensor(folder, EMBEDDING_NAMES)
        if norm is None or head is None or head.shape[1] != norm.shape[0]:
            raise ConfigError(
                f"{folder}: no final norm and output head under the usual names, so the teacher cannot be computed. "
                "Use data.backend=hf, which takes the model's own logits."
            )
        config = text_config(folder)
        if "rms_norm_eps" not in config:
            raise ConfigError(
                f"{folder}/config.json: no rms_norm_eps; the final norm is not an RMSNorm. Use data.backend=hf."
            )
        self.eps = float(config["rms_norm_eps"])
        place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.norm = norm.to(place, torch.float32)  # [H]
        self.head = head.to(place, dtype)  # [V, H]
        self.top_k = top_k
        self._logits = torch.empty(CHUNK_ROWS, head.shape[0], dtype=dtype, device=place)
        self._wide = torch.empty(CHUNK_ROWS, head.shape[0], dtype=torch.float32, device=place)

    @torch.inference_mode()
    def rows(self, final: Tensor) -> TeacherRows:
        """Teacher rows of last-layer states [N, H] taken before the final norm; results on the CPU."""
        parts = [self._chunk(chunk) for chunk in final.split(CHUNK_ROWS)]
        ids, logprobs, normaliser = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids, logprobs, normaliser

    def _chunk(self, final: Tensor) -> TeacherRows:
        count = final.shape[0]
        wide = final.to(self.norm.device, torch.float32)  # [n, H]
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = scaled.to(self.head.dtype) * self.norm.to(self.head.dtype)  # rounds where Llama's norm does
        logits = torch.mm(normed, self.head.T, out=self._logits[:count])  # [n, V]
        return top_rows(logits, self.top_k, self._wide[:count])


def top_rows(logits: Tensor, top_k: int, probabilities: Tensor | None = None) -> TeacherRows:
    """Top k and normaliser of logits [n, V]; ``probabilities`` is an optional float32 buffer of the same shape.

    The normaliser follows from the largest logit and its probability, which spares a second sweep for log-sum-exp.
    """
    spread = torch.softmax(logits, dim=-1, dtype=torch.float32, out=probabilities)  # [n, V]
    values, ids = spread.topk(top_k, dim=-1)  # [n, k], descending
    logprobs = values.log()
    highest = logits.gather(1, ids[:, :1])[:, 0].float()  # [n]
    normaliser = highest - logprobs[:, 0]
    return ids.to("cpu", torch.int32), logprobs.to("cpu", torch.float16), normaliser.cpu()


def place_rows(rows: TeacherRows, first: int, length: int) -> TeacherRows:
    """Rows ``first`` onward of a sample of ``length`` tokens; rows before hold id 0, -inf and normaliser 0."""
    ids, logprobs, normaliser = rows
    top_k = ids.shape[1]
    placed = (
        torch.zeros(length, top_k, dtype=torch.int32),
        torch.full((length, top_k), -torch.inf, dtype=torch.float16),
        torch.zeros(length, dtype=torch.float32),
    )
    for target, source in zip(placed, (ids, logprobs, normaliser), strict=True):
        target[first:] = source
    return placed
