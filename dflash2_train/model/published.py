"""The published tensors of a drafter: names and shapes, without torch, for exporters, checks and plans."""

from __future__ import annotations

from dflash2_train.model.drafter_config import DrafterShape


def published_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of exactly the 6 + 15 L published tensors."""
    hidden, kernel = shape.hidden_size, shape.conv_kernel_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    conv = {
        "base_kernel": (2, kernel, hidden),
        "kernel_projection.weight": (2 * kernel * shape.num_conv_groups, hidden),
    }
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, shape.intermediate_size),
        **{f"{side}.{name}": size for side in ("attention_conv", "mlp_conv") for name, size in conv.items()},
    }
    return {
        "fc.weight": (hidden, shape.num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.hidden_projection.weight": (shape.selector_rank, hidden),
        "candidate_selector.predecessor_codebook": (shape.vocab_size, shape.selector_rank),
        "candidate_selector.successor_codebook": (shape.vocab_size, shape.selector_rank),
        **{f"layers.{index}.{name}": size for index in range(shape.num_layers) for name, size in per_layer.items()},
    }
