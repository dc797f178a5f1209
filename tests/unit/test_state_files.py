"""States come out of a block cache in token order, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_gen.backends.state_files import gather_rows, take_states, write_states

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 6, 2, 4, 3


@pytest.fixture
def cache() -> torch.Tensor:
    """Every value tells its block, layer, place and feature."""
    return torch.arange(BLOCKS * LAYERS * BLOCK_SIZE * HIDDEN).reshape(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN).float()


def test_rows_follow_the_requests_own_blocks(cache: torch.Tensor) -> None:
    rows = gather_rows(cache, [4, 1, 3], 10)
    assert rows.shape == (10, LAYERS, HIDDEN)
    for position in range(10):
        block, place = [4, 1, 3][position // BLOCK_SIZE], position % BLOCK_SIZE
        assert torch.equal(rows[position], cache[block, :, place])


def test_missing_blocks_give_fewer_rows_and_never_invented_ones(cache: torch.Tensor) -> None:
    assert gather_rows(cache, [4, 1], 10).shape[0] == 8


def test_a_file_gives_back_states_and_tokens_and_is_gone(tmp_path: Path, cache: torch.Tensor) -> None:
    path = tmp_path / "request.safetensors"
    rows = gather_rows(cache, [2], 3)
    write_states(path, rows, [7, 8, 9])
    assert [entry.name for entry in tmp_path.iterdir()] == ["request.safetensors"]
    states, token_ids = take_states(path)
    assert torch.equal(states, rows) and token_ids == [7, 8, 9]
    assert not list(tmp_path.iterdir())
