"""The target's embedding and output head, read straight out of its safetensors files: training needs no more of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash2_train.config import ConfigError, TargetConfig
from dflash2_train.target.facts import TargetInfo, open_target_config
from dflash2_train.target.files import CONFIG_FILE, HEAD_NAMES, TargetTensors

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(eq=False)
class FrozenHead:
    """The target's embedding and output head. Plain tensors, no module: engines neither shard, cast nor save them."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the very same tensor as the embedding where the target ties them
    final_norm_weight: Tensor | None = None  # [H]; None where the target's final norm has another name

    @classmethod
    def load(cls, target: TargetConfig, *, dtype: str | torch.dtype, device: torch.device | str = "cpu") -> FrozenHead:
        """Read the tensors out of the target's safetensors files.

        Args:
            target: folder or Hub id; of the latter only the files that hold these tensors are fetched.
            dtype: to hold them in.
            device: to hold them on.

        Raises:
            ConfigError: a tensor is missing, quantised, of another shape than declared, or the tie flag contradicts
                the stored head.
        """
        info, tensors = open_target_config(target), TargetTensors(target)
        prefix = tensors.decoder_prefix()
        embedding = _table(tensors, f"{prefix}embed_tokens.weight", target)
        head = _resolve_head(info, tensors, embedding, target)
        norm_name = f"{prefix}norm.weight"
        norm = tensors[norm_name] if norm_name in tensors.names else None
        return cls(embedding, head, norm).to(device, torch_dtype(dtype))

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.head is self.embedding

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FrozenHead:
        """Move and cast in place; a tied head stays the same tensor. Returns this object."""
        tied = self.tied
        self.embedding = self.embedding.detach().to(device, dtype)
        self.head = self.embedding if tied else self.head.detach().to(device, dtype)
        if self.final_norm_weight is not None:
            self.final_norm_weight = self.final_norm_weight.detach().to(device, dtype)
        return self


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """``bfloat16`` or ``float32`` as torch's own; a torch dtype stays as it is."""
    if isinstance(name, torch.dtype):
        return name
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _resolve_head(info: TargetInfo, tensors: TargetTensors, embedding: Tensor, target: TargetConfig) -> Tensor:
    """The embedding itself where tied; stored tensors and the flag must tell the same story."""
    name = tensors.head_name()
    if name is None:
        if info.tie_word_embeddings:
            return embedding
        raise tensors.not_found("output head (and tie_word_embeddings is false)", HEAD_NAMES, "head")
    head = _table(tensors, name, target)
    if not info.tie_word_embeddings:
        return head
    if torch.equal(head, embedding):
        return embedding
    raise ConfigError(
        f"target.name={target.name!r}: tie_word_embeddings is true, yet {name} differs from the embedding, and readers "
        f"disagree on which of them counts. Set the flag to false in {CONFIG_FILE} or remove the tensor."
    )


def _table(tensors: TargetTensors, name: str, target: TargetConfig) -> Tensor:
    """A [V, H] tensor of the target in a plain float dtype."""
    table = tensors[name]
    expected = (target.vocab_size, target.hidden_size)
    if tuple(table.shape) != expected or table.dtype not in _FLOATS:
        raise ConfigError(
            f"target.name={target.name!r}: {name} is {table.dtype} {list(table.shape)}, expected {list(expected)} "
            "(target.vocab_size, target.hidden_size) in a plain float dtype. "
            "Use a folder whose embedding and head are not quantised."
        )
    return table
