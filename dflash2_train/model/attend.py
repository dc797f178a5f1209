"""Which way a training forward computes its attention: one mask rule, three paths with the same result.

chunked   neighbouring blocks together, over the keys they see; any device, the default on CPU
flex      FlexAttention, the default on CUDA
dense     all scores at once: the reference, for checks on small shapes
"""

from __future__ import annotations

from torch import Tensor

from dflash2_train.budgets import CPU_CHUNK_BYTES, DEVICE_CHUNK_BYTES
from dflash2_train.config import ATTENTION_PATHS, ConfigError
from dflash2_train.masks import ContextSpans
from dflash2_train.model.attend_chunked import ChunkedAttend
from dflash2_train.model.attend_dense import Attend, DenseAttend
from dflash2_train.model.drafter_config import DrafterShape


def choose_attend(path: str, spans: ContextSpans, shape: DrafterShape, blocks: Tensor) -> Attend:
    """The attention of one layer type in one forward pass.

    Args:
        path: one of ``ATTENTION_PATHS``.
        spans: what each slot sees.
        shape: of the drafter.
        blocks: [B, A, W, H] block states; their device, dtype and W count.

    Raises:
        ConfigError: an unknown path, or ``flex`` without CUDA.
    """
    if path not in ATTENTION_PATHS:
        raise ConfigError(f"train.attention={path!r}: must be one of {ATTENTION_PATHS}. Use auto.")
    if path == "flex" and not blocks.is_cuda:
        raise ConfigError(f"train.attention='flex': FlexAttention trains on CUDA, not on {blocks.device}. Use auto.")
    width = blocks.shape[2]
    if path == "dense":
        return DenseAttend(spans.dense())
    if path == "flex" or (path == "auto" and blocks.is_cuda):
        # Here, so that a CPU process never loads the compiler that comes with it.
        from dflash2_train.model.attend_flex import FlexAttend

        return FlexAttend(spans, block_size=width, heads_per_key=shape.num_heads // shape.num_kv_heads)
    return ChunkedAttend(
        spans,
        block_size=width,
        rows_per_block=shape.num_heads * width,
        chunk_bytes=DEVICE_CHUNK_BYTES if blocks.is_cuda else CPU_CHUNK_BYTES,
        dtype=blocks.dtype,
    )
