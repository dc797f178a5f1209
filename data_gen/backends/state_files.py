"""States on their way from an engine's worker to the capture stage: a block cache, then one file a request.

No engine is imported here. Worker and stage may be different processes (tensor parallelism); a file is written under
a temporary name and renamed, so that one that can be seen is whole.

S tokens, L layers captured, H hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STATES, TOKENS = "states", "token_ids"
WRITER_RANK = 0  # every tensor-parallel rank holds the same states; one of them writes


class RequestStates(NamedTuple):
    """What a worker kept of one request."""

    states: Tensor  # [S, L, H]
    token_ids: list[int]  # [S], as the engine saw them


def gather_rows(cache: Tensor, block_ids: list[int], num_tokens: int) -> Tensor:
    """Rows [S, L, H] of a request out of a block cache [blocks, L, block_size, H], in token order.

    With fewer blocks than the tokens need, the rows that there are come back: the reader sees that some are missing.
    """
    block_size = cache.shape[2]
    positions = torch.arange(min(num_tokens, len(block_ids) * block_size))
    blocks = torch.tensor(block_ids)[positions // block_size]  # [S]
    return cache[blocks.to(cache.device), :, (positions % block_size).to(cache.device)]


def write_states(path: Path, states: Tensor, token_ids: list[int]) -> None:
    """Store one request's states as ``path``, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    save_file({STATES: states.contiguous().cpu(), TOKENS: torch.tensor(token_ids, dtype=torch.int32)}, temporary)
    os.replace(temporary, path)


def take_states(path: Path) -> RequestStates:
    """Read a request's states and remove the file."""
    with safe_open(path, framework="pt") as file:
        states, token_ids = file.get_tensor(STATES).clone(), file.get_tensor(TOKENS).tolist()
    path.unlink()
    return RequestStates(states, token_ids)
