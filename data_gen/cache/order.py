"""An order of samples that is random and yet reads few shards at a time.

A uniformly random order touches a random place of a random file with every sample: right where the cache fits memory
or lies on flash. On disks and shared file systems, shuffling shards, taking ``window`` of them at a time and
shuffling the samples of those keeps reads near each other; a sample then lies beside those of ``window`` shards, which
were themselves drawn at random.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence


def order_by_shards(shard_numbers: Sequence[int], *, seed: int, epoch: int, window: int) -> list[int]:
    """Places 0 to n - 1, each once, shuffled by shard and within ``window`` shards; a function of its arguments alone.

    Args:
        shard_numbers: shard of each place, as ``CaptureReader.index.shard_numbers``.
        seed: with ``epoch`` it fixes the draw.
        epoch: which pass over the data.
        window: shards that are mixed with each other, at least 1.
    """
    rng = random.Random(f"{seed}/{epoch}/shards")  # noqa: S311 - a data order, not a secret
    members: defaultdict[int, list[int]] = defaultdict(list)
    for place, shard in enumerate(shard_numbers):
        members[int(shard)].append(place)
    shards = sorted(members)
    rng.shuffle(shards)
    order: list[int] = []
    for start in range(0, len(shards), window):
        group = [place for shard in shards[start : start + window] for place in members[shard]]
        rng.shuffle(group)
        order += group
    return order
