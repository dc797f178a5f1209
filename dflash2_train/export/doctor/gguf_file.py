"""A drafter's GGUF, opened without trust: keys, tensors, and values a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash2_train.config import UserError
from dflash2_train.export.doctor.findings import Registry
from dflash2_train.export.doctor.opened import tensor_shape, whole
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.doctor.weights import PIECE_ELEMENTS, Figures, figures
from dflash2_train.export.gguf_types import GgufError, decode
from dflash2_train.export.published import NO_SECOND, SECOND_KEYS, expected_tensors

ARCHITECTURE = "dflash"
SIZES = (
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "feed_forward_length",
)
# What a cut or foreign file makes gguf's reader raise: it indexes arrays that came out shorter than promised.
UNREADABLE = (ValueError, IndexError, KeyError, TypeError, OSError)
# A second description of the names, on purpose: a check that asked the writer's own table would pass its mistakes.
GLOBAL_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def gguf_name(published: str) -> str:
    """The name in a GGUF of a published tensor."""
    if published in GLOBAL_NAMES:
        return GLOBAL_NAMES[published]
    _, layer, part = published.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[part]}"


class OpenedGguf:
    """Keys and tensors of one file.

    Raises:
        ValueError: the file is no GGUF, or cut.
        UserError: the package ``gguf`` is not installed.
    """

    def __init__(self, path: Path, target: TargetFacts | None = None) -> None:
        self.target = target
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise UserError(f"{path}: reading GGUF needs a package. pip install 'dflash2-train[gguf]'") from error
        try:
            self._reader = GGUFReader(path)
        except UNREADABLE as error:
            raise ValueError(f"{path}: no whole GGUF file ({type(error).__name__}: {error})") from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._figures: dict[str, Figures | None] = {}

    def value(self, key: str) -> Any:
        """The value of a key, None if absent; ``dflash.`` is put in front unless the key has a section of its own."""
        full = key if key.startswith(("general.", "tokenizer.")) else f"{ARCHITECTURE}.{key}"
        field = self._reader.get_field(full)
        return None if field is None else field.contents()

    def number(self, key: str) -> int | None:
        """A whole number, or None."""
        return whole(self.value(key))

    @cached_property
    def target_layers(self) -> list[int]:
        """Layers of the target whose input is captured: taps plus 1. Empty where there is no such list."""
        stated = self.value("target_layers")
        if not isinstance(stated, list) or any(whole(layer) is None for layer in stated):
            return []
        return list(stated)

    @property
    def mask_token_id(self) -> int | None:
        """The row that stands in the slots to be drafted."""
        return self.number("tokenizer.ggml.mask_token_id")

    @cached_property
    def num_tokens(self) -> int | None:
        """Tokens of the tokenizer; counted without decoding them."""
        field = self._reader.get_field("tokenizer.ggml.tokens")
        return None if field is None else len(field.data)

    @cached_property
    def is_second(self) -> bool:
        """DFlash 2, as llama.cpp tells it: by the selector's tensor."""
        return "selector_hidden.weight" in self.tensors or any(self.value(key) is not None for key in SECOND_KEYS)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch's order, the reverse of GGUF's own."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def kind(self, name: str) -> str:
        """Storage type, as GGUF calls it: F32, F16, BF16, Q8_0 ..."""
        return str(self.tensors[name].tensor_type.name)

    @property
    def vocab_size(self) -> int | None:
        """V: rows of the codebooks, else the tokenizer's tokens."""
        for name in ("selector_predecessor.weight", "selector_successor.weight"):
            if name in self.tensors and len(self.shape(name)) == 2:
                return self.shape(name)[0]
        return self.number("vocab_size") or self.num_tokens

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]] | None:
        """Name -> shape in torch's order of exactly the tensors that belong here; None where keys do not give them."""
        hidden, layers, heads, kv_heads, head_dim, intermediate = map(self.number, SIZES)
        second = [self.number(key) for key in SECOND_KEYS] if self.is_second else list(NO_SECOND)
        shape = tensor_shape(
            [hidden, layers, heads, kv_heads, head_dim, intermediate, self.vocab_size], second, len(self.target_layers)
        )
        if shape is None:
            return None
        published = expected_tensors(shape, 2 if self.is_second else 1)
        return {gguf_name(name): size for name, size in published.items()}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The values in float32, some rows at a time; quantised ones as llama.cpp would read them."""
        tensor = self.tensors[name]
        data = tensor.data
        rows = data.shape[0] if data.ndim > 1 else 1
        step = max(1, PIECE_ELEMENTS // max(1, tensor.n_elements // rows))
        for start in range(0, rows, step):
            piece = data[start : start + step] if data.ndim > 1 else data
            yield decode(piece, self.kind(name))

    def figures(self, name: str) -> Figures | None:
        """One pass over the values, remembered; None for a type that gguf cannot read back."""
        if name not in self._figures:
            try:
                self._figures[name] = figures(self.pieces(name))
            except GgufError:
                self._figures[name] = None
        return self._figures[name]


GGUF_CHECKS: Registry[OpenedGguf] = Registry()
