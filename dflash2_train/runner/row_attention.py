"""Attention of short blocks against rows of unequal length, as an attention implementation of transformers.

A model under :func:`row_attention` computes its prompts as before, and its blocks against a
:class:`~dflash2_train.runner.row_cache.RowCache`: the model's own mask rule is evaluated with every row's own
positions, and the query heads that share a key head are laid side by side, so that no key or value is repeated.

Letters: B rows, N query heads, M key heads, G = N / M, S block tokens, L places of the cache, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "block_rows"  # transformers takes any name with "flash" in it for flash attention
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # parts of a softmax that this one does not have


def row_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of a forward.

    Args:
        batch_size: B.
        q_length: S.
        kv_length: L.
        q_offset: an int for a prompt (transformers' own mask is right), else every row's length, [B].
        kv_offset: position of the first place.
        mask_function: the model's rule on (row, head, query position, key position), True = visible.
        attention_mask: padding, None in this runner.
        options: what transformers passes besides; ``dtype`` and ``device`` are used.

    Returns:
        for a block 0 or -inf to be added to the scores, [B, 1, S, L].
    """
    if not isinstance(q_offset, Tensor):
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    device = options["device"]
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    queries = q_offset[:, None, None, None] + torch.arange(q_length, device=device)[None, None, :, None]
    keys = kv_offset + torch.arange(kv_length, device=device)[None, None, None, :]
    visible = mask_function(rows, torch.zeros_like(rows[:1]), queries, keys).expand(batch_size, 1, q_length, kv_length)
    bias = torch.zeros(visible.shape, dtype=options["dtype"], device=device)
    return bias.masked_fill_(~visible, float("-inf"))


def row_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One softmax over the cache: [B, N, S, D], [B, M, L, D] -> [B, S, N, D].

    Raises:
        ValueError: the model's attention has a part that this one lacks.
    """
    if attention_mask is None or attention_mask.dtype == torch.bool:  # a prompt
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"{name}: the runner's block attention lacks it. Load the target with another attention.")
    groups = query.shape[1] // key.shape[1]
    folded = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, M, G * S, D]
    bias = attention_mask.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)  # [B, 1, G * S, L]
    mixed = functional.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return mixed.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2).contiguous(), None


def supports_row_attention(model: PreTrainedModel) -> bool:
    """Whether the model runs on scaled dot-product attention without extras, through transformers' interface."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation == "sdpa" and not config.to_dict().get("attn_logit_softcapping")


@contextmanager
def row_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run ``model`` with block attention inside the context; its own implementation is put back on the way out."""
    AttentionInterface.register(NAME, row_attention_forward)
    AttentionMaskInterface.register(NAME, row_mask)
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
