"""The producer's stage: the right documents, a budget that can work, and an end when the training ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_gen.cache.conversations import RowFacts
from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.ring import Ring
from data_gen.cache.row_plan import Document
from data_gen.stream import ConversationRows, DoneCheck, need_room
from dflash2_train.config import ConfigError, RunConfig, absolute
from tests.ring_cases import make_documents, make_ring


class Store:
    """Conversations in memory, two a shard."""

    folder = Path("conversations")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.reads = rows, 0

    def shards(self) -> list[int]:
        return list(range((len(self.rows) + 1) // 2))

    def facts(self) -> Iterator[RowFacts]:
        for shard in self.shards():
            rows = self.rows[2 * shard : 2 * shard + 2]
            yield RowFacts(
                row_id=[row["row_id"] for row in rows],
                repeat=[0] * len(rows),
                turn=[0] * len(rows),
                num_prompt_tokens=[len(row["prompt_ids"]) for row in rows],
                num_completion_tokens=[len(row["completion_ids"]) for row in rows],
                finish_reason=["stop"] * len(rows),
                dropped=[row["dropped"] for row in rows],
            )

    def read(self, index: int, columns: list[str] | None = None) -> list[dict[str, Any]]:
        self.reads += 1
        return self.rows[2 * index : 2 * index + 2]


def row(number: int, dropped: str = "") -> dict[str, Any]:
    return {
        "row_id": f"r{number}",
        "prompt_ids": [number] * 3,
        "completion_ids": [50 + number] * (2 + number),
        "dropped": dropped,
    }


def rows_of(store: Store) -> ConversationRows:
    return ConversationRows(store)  # type: ignore[arg-type]


def test_documents_have_the_lengths_of_their_conversations_and_dropped_ones_are_left_out() -> None:
    rows = rows_of(Store([row(0), row(1, dropped="cut"), row(2)]))
    assert rows.documents == [
        Document(sample_id="r0", num_tokens=5, num_supervised=2),
        Document(sample_id="r2", num_tokens=7, num_supervised=4),
    ]


def test_requests_come_in_the_order_of_the_documents_with_the_tokens_as_stored() -> None:
    store = Store([row(number) for number in range(6)])
    rows = rows_of(store)
    before = store.reads
    wanted = [rows.documents[place] for place in (5, 0, 4)]
    requests = rows.requests(wanted)
    assert [request.request_id for request in requests] == ["r5", "r0", "r4"]
    assert requests[1].input_ids == [0, 0, 0, 50, 50]
    assert requests[1].first_teacher_row == 2
    assert store.reads == before + 2, "one read a shard"
    rows.requests(wanted)
    assert store.reads == before + 2, "and none while the shard is at hand"


def test_without_conversations_the_missing_stage_is_named() -> None:
    with pytest.raises(CacheIntegrityError, match="stage=regenerate"):
        rows_of(Store([]))


def room(config: RunConfig, *, there: int = 0, free: int = 10**15, **stream: object) -> None:
    data = dataclasses.replace(config.data, stream=dataclasses.replace(config.data.stream, **stream))  # type: ignore[arg-type]
    ring = SimpleNamespace(segments=lambda: {0: there}, free_bytes=lambda: free, root="ring")
    need_room(ring, dataclasses.replace(config, data=data))  # type: ignore[arg-type]


def test_a_budget_that_cannot_hold_two_segments_is_refused_with_what_would_fit(tiny_config: RunConfig) -> None:
    room(tiny_config, budget_mib=1)
    with pytest.raises(ConfigError, match=r"budget_mib=1: two segments of 900 rows.*segment_rows to \d+"):
        room(tiny_config, budget_mib=1, segment_rows=900)
    huge = dataclasses.replace(tiny_config, train=dataclasses.replace(tiny_config.train, row_tokens=10**6))
    with pytest.raises(ConfigError, match=r"since even segments of one row need \d+ MiB"):
        room(huge, budget_mib=1)


def test_a_disk_smaller_than_the_budget_is_refused_before_an_engine_starts(tiny_config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="has 30 MiB free and holds 10"):
        room(tiny_config, budget_mib=50, there=10 * 2**20, free=30 * 2**20)
    room(tiny_config, budget_mib=40, there=10 * 2**20, free=30 * 2**20)


@pytest.fixture
def ring(tmp_path: Path, tiny_config: RunConfig) -> Ring:
    return make_ring(tmp_path / "ring", make_documents(6), tiny_config.data.stream)[0]


def test_a_producer_ends_when_its_training_is_done(ring: Ring, tiny_config: RunConfig) -> None:
    done = DoneCheck(ring, tiny_config)
    assert not done.at_start and not done()
    ring.finish(output_dir="anything", steps=1)
    assert done()


def test_the_end_of_this_very_training_is_known_at_the_start_and_that_of_another_is_not_taken_for_it(
    ring: Ring, tiny_config: RunConfig
) -> None:
    mine = {"output_dir": str(absolute(tiny_config.train.output_dir)), "steps": tiny_config.train.steps}
    ring.finish(**mine)  # type: ignore[arg-type]
    assert DoneCheck(ring, tiny_config).at_start
    ring.finish(output_dir="another", steps=tiny_config.train.steps)
    done = DoneCheck(ring, tiny_config)
    assert not done.at_start and not done()
    ring.finish(**mine)  # type: ignore[arg-type]
    assert done()
