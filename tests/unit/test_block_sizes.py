"""Random block lengths: spread evenly, agreed by ranks, repeated by a resume."""

from __future__ import annotations

from collections import Counter

from dflash2_train.config import RunConfig
from dflash2_train.window_step import window_block_size


def test_random_short_blocks_take_every_size_alike_and_leave_the_share_of_whole_ones(tiny_config: RunConfig) -> None:
    tiny_config.drafter.block_size = 8
    train = tiny_config.train
    train.short_block_size, train.short_block_share, train.short_block_random = 4, 0.8, True
    sizes = [window_block_size(tiny_config, step) for step in range(4000)]
    counts = Counter(sizes)
    assert sizes == [window_block_size(tiny_config, step) for step in range(4000)]
    assert set(counts) == {4, 5, 6, 7, 8}
    assert all(0.17 < counts[size] / len(sizes) < 0.23 for size in counts)
