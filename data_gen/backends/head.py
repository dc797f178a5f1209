"""The target's own next-token distribution from its last hidden state: final norm once, then the output head.

    logits = cap(multiplier . head . norm(x)),   log p = logits - log sum exp(logits)

x is the stream after the last layer, *before* the final norm. Products run in the head's dtype and the logits are
rounded to it, as the target does when it is served; softmax arithmetic is float32 over the whole vocabulary. Only the
top k and the normaliser are kept. Logits exist for ``CHUNK_ROWS`` rows at a time, in buffers that are used again.

What the target does to its logits is read from its configuration (:class:`HeadRule`). Scales and caps keep the first
choice and change its probability, so a rule that is missing here shows only in numbers: every engine's own log
probability is held against this one (``data_gen.capture_rows``).

N rows, H hidden size, V vocabulary, k = teacher_top_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_gen.backends.folder import EMBEDDING_NAMES, HEAD_NAMES, NORM_NAMES, load_first_tensor, model_config
from dflash2_train.config import ConfigError

CHUNK_ROWS = 256  # rows of logits alive at once; products of fewer rows take longer a row
MULTIPLIER_KEYS = ("logit_scale", "lm_head_multiplier")  # Cohere, Falcon-H1
DIVISOR_KEYS = ("logits_scaling",)  # Granite
CAP_KEY = "final_logit_softcapping"  # Gemma
SCALE_KEYS = (*MULTIPLIER_KEYS, *DIVISOR_KEYS, CAP_KEY)
# Architectures whose RMSNorm multiplies by 1 + weight, in float32.
UNIT_OFFSET_NORMS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)

TeacherRows = tuple[Tensor, Tensor, Tensor]  # ids [N, k] int32, log probabilities [N, k] f16, normaliser [N] f32


@dataclass(frozen=True, kw_only=True)
class HeadRule:
    """What a target does between its last state and its logits; equal for training, capture and manifest."""

    norm: str = "rms"  # rms: x / rms(x) * w | rms_unit_offset: ... * (1 + w) | layer: (x - mean) / std * w
    eps: float
    multiplier: float = 1.0  # logits times this
    softcap: float | None = None  # then cap * tanh(logits / cap)

    @classmethod
    def from_config(cls, config: dict[str, Any], where: Path) -> HeadRule:
        """Read the rule out of the text part of a ``config.json``.

        Raises:
            ConfigError: no epsilon of a known norm is stated.
        """
        rms = config.get("rms_norm_eps") is not None
        eps = config.get("rms_norm_eps" if rms else "layer_norm_eps")
        if eps is None:
            raise ConfigError(
                f"{where}/config.json: no rms_norm_eps and no layer_norm_eps; the final norm is of an unknown kind. "
                "Use data.backend=hf, which takes the model's own logits."
            )
        kind = "layer" if not rms else "rms_unit_offset" if config.get("model_type") in UNIT_OFFSET_NORMS else "rms"
        stated = {key: float(value) for key, value in config.items() if key in SCALE_KEYS and value is not None}
        multiplier = math.prod(stated.get(key, 1.0) for key in MULTIPLIER_KEYS)
        divisor = math.prod(stated.get(key, 1.0) for key in DIVISOR_KEYS)
        return cls(norm=kind, eps=float(eps), multiplier=multiplier / divisor, softcap=stated.get(CAP_KEY))

    def normalise(self, state: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Final norm of [n, H] float32 states, once; rounds to ``dtype`` where the architecture does."""
        centred = state - state.mean(dim=-1, keepdim=True) if self.norm == "layer" else state
        scaled = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        if self.norm == "rms":
            return scaled.to(dtype) * weight.to(dtype)
        return (scaled * (1.0 + weight if self.norm == "rms_unit_offset" else weight)).to(dtype)

    def finish_(self, logits: Tensor) -> Tensor:
        """Multiplier and cap on raw logits [n, V], in place."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class TeacherHead:
    """Final norm and output head of a target folder, on one device.

    Raises:
        ConfigError: the folder's tensors are not a final norm and a head of the declared shape.
    """

    def __init__(self, folder: Path, *, top_k: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        config = model_config(folder)
        self.rule = HeadRule.from_config(config, folder)
        norm, head = load_first_tensor(folder, NORM_NAMES), load_head(folder, config.get("tie_word_embeddings"))
        if norm is None or head is None or head.shape[1] != norm.shape[0]:
            raise ConfigError(
                f"{folder}: no final norm and output head under the usual names, so the teacher cannot be computed. "
                "Use data.backend=hf, which takes the model's own logits."
            )
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
        normed = self.rule.normalise(final.to(self.norm.device, torch.float32), self.norm, self.head.dtype)
        logits = torch.mm(normed, self.head.T, out=self._logits[:count])  # [n, V]
        return top_rows(self.rule.finish_(logits), self.top_k, self._wide[:count])


def load_head(folder: Path, tied: bool | None) -> Tensor | None:
    """The output head [V, H]: the embedding where the target ties them, else the stored head.

    Where the configuration does not say, a stored head counts, else the embedding. A head that should be stored and
    is not is None, never the embedding in its place.
    """
    head = None if tied else load_first_tensor(folder, HEAD_NAMES)
    if head is None and tied is not False:
        head = load_first_tensor(folder, EMBEDDING_NAMES)
    return head


def top_rows(logits: Tensor, top_k: int, probabilities: Tensor | None = None) -> TeacherRows:
    """Top k and normaliser of logits [n, V]; ``probabilities`` is an optional float32 buffer of the same shape.

    The normaliser follows from the largest logit and its probability, which spares a second sweep for log-sum-exp.
    Logits are widened into the buffer and overwritten there: ``softmax(dtype=...)`` would widen them into fresh memory,
    and on a CPU touching that takes longer than the softmax.
    """
    spread = torch.empty_like(logits, dtype=torch.float32) if probabilities is None else probabilities  # [n, V]
    torch.softmax(spread.copy_(logits), dim=-1, out=spread)
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
