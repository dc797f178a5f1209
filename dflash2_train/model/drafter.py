"""The DFlash 2 drafter: taps of the target in, states of every block slot out.

    context  c = hidden_norm(fc(taps))                                one c feeds every layer
    layer    h, d = attention_conv.prepare(input_layernorm(x));       x += attention_conv.finish(attention(h; c), d)
             h, d = mlp_conv.prepare(post_attention_layernorm(x));    x += mlp_conv.finish(mlp(h), d)
    output   norm(x); slot k of a block at anchor a stands at position a + k and predicts the token there

Training runs all blocks of a row against one context (:meth:`Drafter.forward`); decoding runs one block against keys
and values kept from earlier rounds (:meth:`Drafter.decode_block`). Both go through the same layers, so what is trained
is what is served. Embedding and output head are the target's and live outside.

Parameter names are the published ones; ``mask_embedding``, the learned input of every mask slot, is the one extra and
is exported in a file of its own.

Letters: B rows, A blocks a row, W block size, S context tokens, T taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2_train.masks import ContextSpans
from dflash2_train.model.attend import choose_attend
from dflash2_train.model.attend_dense import Attend, DenseAttend, KeysValues
from dflash2_train.model.attention import BlockAttention
from dflash2_train.model.conv import BlockConv
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.norm import RMSNorm
from dflash2_train.model.published import published_tensors
from dflash2_train.model.rotation import Rotation, rotation
from dflash2_train.model.selector import CandidateSelector


class GatedMLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.initializer_range = shape.initializer_range
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights."""
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            projection.weight.normal_(0.0, self.initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DrafterLayer(nn.Module):
    """Attention and MLP, each normed before and convolved on both sides, each with a residual."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention_conv = BlockConv(shape.hidden_size, shape.conv_kernel_size, shape.conv_group_size)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp_conv = BlockConv(shape.hidden_size, shape.conv_kernel_size, shape.conv_group_size)
        self.mlp = GatedMLP(shape)

    def forward(self, hidden: Tensor, table: Rotation, context: KeysValues, attend: Attend) -> Tensor:
        """[B, A, W, H] -> same; other arguments as :meth:`BlockAttention.forward`."""
        prepared, delta = self.attention_conv.prepare(self.input_layernorm(hidden))
        attended = self.self_attn(prepared, table, context, attend)
        hidden = hidden + self.attention_conv.finish(attended, delta)
        prepared, delta = self.mlp_conv.prepare(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.finish(self.mlp(prepared), delta)


class Drafter(nn.Module):
    """The trainable model. Untrained, it equals a DFlash drafter without convolution and selector bit for bit."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention = "auto"  # path of the training forward, see model/attend.py
        self.mask_embedding = nn.Parameter(torch.empty(shape.hidden_size))
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector = CandidateSelector(
            shape.vocab_size, shape.hidden_size, shape.selector_rank, initializer_range=shape.initializer_range
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal ``fc``, zero ``mask_embedding`` (see :meth:`reset_mask_embedding`). Submodules reset themselves."""
        self.fc.weight.normal_(0.0, self.shape.initializer_range)
        self.mask_embedding.zero_()

    @torch.no_grad()
    def reset_mask_embedding(self, row: Tensor) -> None:
        """Start the learned mask vector from a row [H] of the target's embedding, as servers without it would use.

        Raises:
            ValueError: the row is not a finite, non-zero vector of the hidden size.
        """
        if row.shape != self.mask_embedding.shape:
            raise ValueError(
                f"mask embedding row has shape {tuple(row.shape)}, needs {tuple(self.mask_embedding.shape)}."
            )
        if not bool(row.isfinite().all()) or not bool(row.any()):
            raise ValueError("mask embedding row is zero or not finite. Choose another drafter.mask_token_id.")
        self.mask_embedding.copy_(row)

    def encode_context(self, tap_hidden: Tensor) -> Tensor:
        """Concatenated taps, ascending [B, S, T * H] -> context [B, S, H]."""
        return self.hidden_norm(self.fc(tap_hidden))

    def embed_blocks(self, block_ids: Tensor, embedding_weight: Tensor) -> Tensor:
        """Input of every slot: the frozen embedding row of its token, or the learned vector for the mask token.

        Args:
            block_ids: [..., W] int64.
            embedding_weight: [V, H] of the target; never receives a gradient.

        Returns:
            [..., W, H] in the drafter's dtype.
        """
        rows = F.embedding(block_ids, embedding_weight.detach()).to(self.mask_embedding.dtype)
        return torch.where((block_ids == self.shape.mask_token_id).unsqueeze(-1), self.mask_embedding, rows)

    def forward(
        self,
        block_embeddings: Tensor,
        context: Tensor,
        block_position_ids: Tensor,
        position_ids: Tensor,
        visible: Mapping[str, ContextSpans],
    ) -> Tensor:
        """States of every slot of every block.

        Args:
            block_embeddings: [B, A, W, H] from :meth:`embed_blocks`.
            context: [B, S, H] from :meth:`encode_context`.
            block_position_ids: [B, A, W] positions in the document.
            position_ids: [B, S] positions in the document.
            visible: per layer type of the shape what each slot sees, from ``masks.context_masks``.

        Returns:
            [B, A, W, H] after the final norm; slot 0 is the anchor's and predicts nothing.
        """
        cached = self.project_context(context, position_ids)
        attends = {
            kind: choose_attend(self.attention, visible[kind], self.shape, block_embeddings)
            for kind in set(self.shape.layer_types)
        }
        return self._run_layers(block_embeddings, block_position_ids, cached, attends)

    def project_context(self, context: Tensor, position_ids: Tensor) -> list[KeysValues]:
        """Per layer the rotated keys and the values of the context, [B, key heads, S, D] each.

        New tokens are appended along the S axis: nothing here depends on other tokens.
        """
        table = rotation(position_ids, self.shape.head_dim, self.shape.rope_theta)
        return [layer.self_attn.project_context(context, table) for layer in self._typed_layers()]

    def decode_block(
        self,
        block_embeddings: Tensor,
        block_position_ids: Tensor,
        cached_kv: Sequence[KeysValues],
        visible: Mapping[str, ContextSpans] | None = None,
    ) -> Tensor:
        """States of one block a row, against keys and values kept from :meth:`project_context`.

        Args:
            block_embeddings: [B, W, H]; any W up to the trained block size.
            block_position_ids: [B, W].
            cached_kv: one pair a layer, [B, key heads, S, D] each: the S positions before the anchor.
            visible: per layer type, of one block a row; None = every key is visible.

        Returns:
            [B, W, H] after the final norm.

        Raises:
            ValueError: ``visible`` is None although the window of a sliding layer hides some of the keys.
        """
        if visible is None:
            self._check_window_covers(cached_kv[0][0].shape[2] + block_embeddings.shape[1])
        attends: dict[str, Attend] = {
            kind: DenseAttend(None if visible is None else visible[kind].dense())
            for kind in set(self.shape.layer_types)
        }
        blocks = block_embeddings.unsqueeze(1)  # [B, 1, W, H]
        return self._run_layers(blocks, block_position_ids.unsqueeze(1), cached_kv, attends).squeeze(1)

    def _typed_layers(self) -> Iterator[DrafterLayer]:
        return (cast(DrafterLayer, layer) for layer in self.layers)

    def _check_window_covers(self, span: int) -> None:
        window = self.shape.sliding_window
        if window is not None and span > window:
            raise ValueError(
                f"visible=None: context and block span {span} positions, more than sliding_window={window}. "
                "Pass masks.context_masks for the sliding_attention layers."
            )

    def _run_layers(
        self,
        hidden: Tensor,
        block_position_ids: Tensor,
        cached_kv: Sequence[KeysValues],
        attends: Mapping[str, Attend],
    ) -> Tensor:
        table = rotation(block_position_ids, self.shape.head_dim, self.shape.rope_theta)
        for layer, kind, keys_values in zip(self._typed_layers(), self.shape.layer_types, cached_kv, strict=True):
            hidden = layer(hidden, table, keys_values, attends[kind])
        return self.norm(hidden)

    @staticmethod
    def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
        """Name -> shape of exactly the 6 + 15 L published tensors; the list that export and loading check against."""
        return published_tensors(shape)
