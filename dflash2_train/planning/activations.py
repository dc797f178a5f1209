"""Tensors that the forward pass keeps for the backward pass, and what a backward pass needs beside them.

Read off ``model/``: an autograd function keeps what it names in ``save_for_backward``, a product its two operands, and
views keep their whole storage. Everything else is gone when its consumer has run.
"""

from __future__ import annotations

from collections import Counter

from dflash2_train.budgets import CPU_CHUNK_BYTES, DEVICE_CHUNK_BYTES, KEPT_WEIGHT_BYTES
from dflash2_train.planning.parameters import parameter_sizes
from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import LAYERS, STEP, Item

FULL = 4  # bytes of fp32
TILE = 128  # of FlexAttention: queries and keys are filled up to whole ones
TILE_BYTES = 40  # of its lists, see model/attend_flex.py
GROUP = "activations"


def layer_slot_bytes(setting: Setting) -> int:
    """What one layer keeps for one slot, attention's own tensors left out.

    H-sized, 8: the layer's input and the state behind the attention (both kept by the norms that read them), the two
    normed states, the two convolved ones, and the outputs of attention and MLP that the second convolutions read.
    I-sized, 4: gate, its silu, up, and their product. Q D: the projected queries (for the norm), the rotated ones,
    and the mixed values. M D: keys likewise, and values. The dynamic kernels, 2 x 2 Kc G. fp32: one scale for each
    norm, head by head in the attention.
    """
    shape = setting.shape
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    kernels = 4 * shape.conv_kernel_size * shape.num_conv_groups
    elements = 8 * shape.hidden_size + 4 * shape.intermediate_size + 3 * query + 3 * key + kernels
    return setting.itemsize * elements + FULL * (2 + shape.num_heads + shape.num_kv_heads)


def layer_context_bytes(setting: Setting) -> int:
    """What one layer keeps for one context token: projected keys, rotated keys, values, and a scale a key head."""
    shape = setting.shape
    return setting.itemsize * 3 * shape.num_kv_heads * shape.head_dim + FULL * shape.num_kv_heads


def attention_bytes(setting: Setting) -> int:
    """What one layer's attention keeps beside queries, keys and values.

    dense: the softmax over context and own block, [B, Q, A W, S + W]. flex: keys and values of context and blocks side
    by side, the mixed values before they change their layout, and a log-normaliser for every query. chunked: at most
    the weights over the whole document and twice the own block, and nothing where they are made again.
    """
    shape, batch, e = setting.shape, setting.batch, setting.itemsize
    if setting.path == "dense":
        return e * batch.slots * shape.num_heads * (batch.tokens + batch.block_size)
    if setting.path == "flex":
        keys = batch.rows * (_tiles(batch.tokens) + _tiles(batch.anchors * batch.block_size)) * TILE
        joined = 2 * keys * shape.num_kv_heads * shape.head_dim
        return e * (joined + batch.slots * shape.num_heads * shape.head_dim) + FULL * batch.slots * shape.num_heads
    columns = batch.document_tokens + 2 * batch.block_size
    return min(KEPT_WEIGHT_BYTES, int(e * batch.slots * shape.num_heads * columns))


def mask_bytes(setting: Setting) -> int:
    """What the attention of each layer type holds of its mask.

    dense: the mask [B, A, W | 1, S] as booleans and as additive bias. flex: lists of tiles, and two int32 bounds a
    query. chunked: two integers a block, and biases of the few ragged columns, left out here.
    """
    shape, batch = setting.shape, setting.batch
    size = 0
    for kind in Counter(shape.layer_types):
        own = batch.block_size if kind == "sliding_attention" else 1
        if setting.path == "dense":
            size += (1 + setting.itemsize) * batch.rows * batch.anchors * own * batch.tokens
        elif setting.path == "flex":
            queries = batch.anchors * batch.block_size * (shape.num_heads // shape.num_kv_heads)
            keys = _tiles(batch.tokens) + _tiles(batch.anchors * batch.block_size)
            size += batch.rows * (_tiles(queries) * keys * TILE_BYTES + 2 * 4 * _tiles(queries) * TILE)
    return size


def kept_of_layer(setting: Setting) -> int:
    """All that one layer keeps for its backward pass, its context's keys and values left out."""
    return setting.batch.slots * layer_slot_bytes(setting) + attention_bytes(setting)


def kept_of_layers(setting: Setting) -> int:
    """What all layers keep until their backward passes; with checkpointing the input of each, [n, H]."""
    if setting.train.gradient_checkpointing:
        inputs = setting.itemsize * setting.batch.slots * setting.shape.hidden_size
        return setting.shape.num_layers * inputs
    return setting.shape.num_layers * kept_of_layer(setting)


def recomputed(setting: Setting) -> int:
    """With checkpointing, what one layer keeps while it is run again, its input left out."""
    if not setting.train.gradient_checkpointing:
        return 0
    return kept_of_layer(setting) - setting.itemsize * setting.batch.slots * setting.shape.hidden_size


def around_bytes(setting: Setting) -> int:
    """Kept around the layers.

    [n, H]: input of the final norm; [B S, H] twice: the fused taps before and behind their norm; the slots' ids that
    are the mask token; cosines and sines of slots and context, fp32 [.., D / 2] each.
    """
    shape, batch = setting.shape, setting.batch
    states = setting.itemsize * shape.hidden_size * (batch.slots + 2 * batch.context)
    return states + FULL * shape.head_dim * (batch.slots + batch.context) + batch.slots + FULL * batch.slots


def layer_transient(setting: Setting) -> int:
    """The most that the backward pass of the last layer takes beside what is kept.

    MLP: gradients by silu and up, [n, I] each, where the product that was kept is gone by then; the gradient of the
    residual and of the MLP's input, [n, H] each. Convolution on a GPU, at once and in fp32: state, gradient, kernels,
    sum and product, (4 + Kc) [n, H]. Attention, while the MLP's tensors are gone: dense, the gradients of the softmax
    and of the scores; chunked, two buffers of a chunk and two of the own blocks' scores. Any of them makes the gradient
    of one weight before it is added to the sum.
    """
    shape, batch, e = setting.shape, setting.batch, setting.itemsize
    hidden, inner = shape.hidden_size, shape.intermediate_size
    residual = 2 * e * batch.slots * hidden
    takes = [2 * e * batch.slots * inner]
    if setting.device == "cuda":
        takes.append(FULL * (4 + shape.conv_kernel_size) * batch.slots * hidden)
    freed = e * batch.slots * (4 * inner + 3 * hidden)
    if setting.path == "dense":
        takes.append(2 * e * batch.slots * shape.num_heads * (batch.tokens + batch.block_size) - freed)
    if setting.path == "chunked":
        chunk = CPU_CHUNK_BYTES if setting.device == "cpu" else DEVICE_CHUNK_BYTES
        takes.append(2 * chunk + 2 * e * batch.slots * shape.num_heads * batch.block_size - freed)
    weight = max(size for name, size in parameter_sizes(shape).items() if name.startswith("layers.0."))
    return residual + max(takes) + e * weight


def largest_piece(setting: Setting) -> int:
    """Bytes of the largest single tensor that a layer keeps: [n, I], or the softmax of the dense path."""
    shape, batch = setting.shape, setting.batch
    scores = shape.num_heads * (batch.tokens + batch.block_size) if setting.path == "dense" else 0
    return setting.itemsize * batch.slots * max(shape.intermediate_size, shape.hidden_size, scores)


def activation_items(setting: Setting) -> list[Item]:
    """All of it, as lines of the table."""
    shape, batch = setting.shape, setting.batch
    context = shape.num_layers * batch.context * layer_context_bytes(setting)
    name = "inputs of layers, checkpointed" if setting.train.gradient_checkpointing else "layers"
    return [
        Item(group=GROUP, name=name, size=kept_of_layers(setting), moments=STEP),
        Item(group=GROUP, name="one layer run again", size=recomputed(setting), moments=(LAYERS,)),
        Item(group=GROUP, name="keys and values of the context", size=context, moments=STEP),
        Item(group=GROUP, name="around the layers", size=around_bytes(setting), moments=STEP),
        Item(group=GROUP, name=f"masks ({setting.path})", size=mask_bytes(setting), moments=STEP),
        Item(group=GROUP, name="gradients passing through a layer", size=layer_transient(setting), moments=(LAYERS,)),
    ]


def _tiles(length: int) -> int:
    return -(-length // TILE)
