"""A ring holds what the plan says within its budget, gives room in the right order, and refuses other settings."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from data_gen.cache import claims as claims_module
from data_gen.cache import shard_file
from data_gen.cache.claims import Claim
from data_gen.cache.format import CacheIntegrityError, CapturedSample
from data_gen.cache.ring import Ring, ring_plan
from data_gen.cache.row_plan import Document, RowPlan
from data_gen.cache.segment import SegmentReader
from data_gen.ring_filler import Beat, RingFiller, Work, next_work
from dflash2_train import ring_rows
from dflash2_train.config import StreamConfig, UserError
from dflash2_train.data import WindowLoader
from dflash2_train.ring_rows import Patience, RingRows, WaitStopped, wait_for_ring
from tests.ring_cases import (
    HIDDEN,
    MANIFEST,
    ROW_TOKENS,
    SEED,
    PlainRows,
    bytes_in,
    capture,
    make_documents,
    make_filler,
    make_ring,
    sample_of,
    size_of,
)

DOCUMENTS = make_documents(24)
STREAM = StreamConfig(segment_rows=2, timeout_s=20)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return make_ring(tmp_path / "ring", DOCUMENTS, STREAM)[0]


@pytest.fixture
def plan(ring: Ring) -> RowPlan:
    return ring_plan(ring, row_tokens=ROW_TOKENS, seed=SEED, stream=STREAM)


def largest(plan: RowPlan, segments: int = 12) -> int:
    return max(size_of(plan, segment) for segment in range(segments))


def rows_of(ring: Ring, plan: RowPlan, *, rank: int = 0, timeout_s: float = 20.0) -> RingRows:
    settings = dataclasses.replace(STREAM, timeout_s=timeout_s)
    return RingRows(ring, plan, rank=rank, settings=settings, give_up=lambda: False)


def loader(source: object, plan: RowPlan, *, rank: int = 0, world_size: int = 1) -> WindowLoader:
    return WindowLoader(
        source,  # type: ignore[arg-type]
        plan,
        rows=1,
        accumulation=2,
        anchors_per_document=3,
        seed=SEED,
        rank=rank,
        world_size=world_size,
    )


def same_windows(found: WindowLoader, expected: WindowLoader, windows: int) -> None:
    for number in range(windows):
        start = number * found.rows_per_window
        for one, other in zip(found.window(start), expected.window(start), strict=True):
            for name, value in vars(one).items():
                wanted = getattr(other, name)
                assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted


def room_for(plan: RowPlan, number: int) -> torch.Tensor:
    tokens = sum(document.num_tokens for document in plan.row(number).documents)
    return torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)


class Clock:
    """Time that passes only when told to, or slept through."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which claims are judged."""
    clock = Clock()
    monkeypatch.setattr(claims_module, "time", clock)
    return clock


class Producers:
    """Producers in threads, for the time of a ``with`` block."""

    def __init__(self, fillers: Sequence[RingFiller]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=filler.run, args=(self._stop.is_set,)) for filler in fillers]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


# What is read is what was captured


def test_a_segment_gives_back_every_sample_bit_for_bit(ring: Ring, plan: RowPlan) -> None:
    assert make_filler(ring, plan, budget=10**9).fill_next()
    with SegmentReader(ring.segment_path(0)) as reader:
        for document in plan.segment_documents(0):
            found, wanted = reader.read(document.sample_id), sample_of(document)
            for field in dataclasses.fields(CapturedSample):
                one, other = getattr(found, field.name), getattr(wanted, field.name)
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert ring.segment_path(0).stat().st_size <= size_of(plan, 0)


def test_states_stored_in_eight_bits_are_read_as_a_cache_reads_them(tmp_path: Path) -> None:
    manifest = dataclasses.replace(MANIFEST, content={**MANIFEST.content, "cache_dtype": "float8_e4m3"})
    wanted = [sample_of(document) for document in DOCUMENTS[:3]]
    path = tmp_path / "segment"
    shard_file.write_shard_file(path, wanted, manifest)
    cached = shard_file.ShardReader(path, manifest)
    with SegmentReader(path) as reader:
        reader.check_content()
        for row, sample in enumerate(wanted):
            place = torch.empty(len(sample), HIDDEN, dtype=torch.bfloat16)
            reader.read(sample.sample_id, place)
            assert torch.equal(place, cached.read(row).tap_hidden)
            assert torch.equal(reader.read(sample.sample_id).tap_hidden, place)


def test_a_segment_that_is_cut_or_lacks_a_sample_is_refused_by_name(ring: Ring, plan: RowPlan) -> None:
    make_filler(ring, plan, budget=10**9).fill_next()
    path = ring.segment_path(0)
    with pytest.raises(CacheIntegrityError, match="segment-00000000.*holds no sample nobody"):
        SegmentReader(path).read("nobody")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CacheIntegrityError, match="segment-00000000.*not a whole segment"):
        SegmentReader(path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_out_of_a_small_ring_equal_those_of_the_whole_data_bit_for_bit(
    ring: Ring, plan: RowPlan, world_size: int
) -> None:
    windows = 12
    ring.begin(row=0, world_size=world_size, goal=windows * 2 * world_size)
    budget = 2 * largest(plan, windows * world_size + 1)
    checks = [
        threading.Thread(
            target=same_windows,
            args=(
                loader(rows_of(ring, plan, rank=rank), plan, rank=rank, world_size=world_size),
                loader(PlainRows(), plan, rank=rank, world_size=world_size),
                windows,
            ),
        )
        for rank in range(1, world_size)
    ]
    with Producers([make_filler(ring, plan, budget=budget) for _ in range(2)]):
        for check in checks:
            check.start()
        same_windows(
            loader(rows_of(ring, plan), plan, world_size=world_size),
            loader(PlainRows(), plan, world_size=world_size),
            windows,
        )
        for check in checks:
            check.join()
    assert ring.positions().lowest >= windows * 2 * world_size, "a failed rank would not have moved"


# Whose turn it is, and what goes for it


def work(
    segments: Sequence[int] = (),
    claimed: Sequence[int] = (),
    *,
    first: int = 0,
    end: int | None = None,
    stale: Sequence[int] = (),
    budget: int = 40,
) -> Work | str:
    """A decision in a ring whose segments all take 10 bytes."""
    claims = {n: Claim(segment=n, generation=0, host="h", pid=1, token="t", num_bytes=10) for n in claimed}
    return next_work(
        first=first,
        end=end,
        segments=dict.fromkeys(segments, 10),
        claims=claims,
        stale=set(stale),
        size_of=lambda _: 10,
        budget=budget,
    )


def test_the_lowest_segment_that_nobody_has_is_next() -> None:
    assert work() == Work(segment=0, delete=[])
    assert work([0, 1], [2]) == Work(segment=3, delete=[])
    assert work([5], [], first=5) == Work(segment=6, delete=[])


def test_a_full_ring_waits_for_the_trainers_claims_counted() -> None:
    assert isinstance(work([0, 1], [2, 3]), str)
    assert isinstance(work([0, 1, 2, 3]), str)
    assert work([0, 1, 2, 3], budget=50) == Work(segment=4, delete=[])


def test_segments_behind_the_trainers_go_oldest_first_and_only_as_many_as_needed() -> None:
    assert work([0, 1, 2], first=2) == Work(segment=3, delete=[])
    assert work([0, 1, 2, 3], first=2) == Work(segment=4, delete=[0])


def test_trainers_that_went_back_get_their_segment_for_the_one_furthest_ahead() -> None:
    assert work([6, 7, 8, 9], first=4) == Work(segment=4, delete=[9])


def test_what_a_dead_producer_reserved_serves_who_takes_its_segment_over() -> None:
    assert work([0, 1, 3], [2], stale=[2]) == Work(segment=2, delete=[])


def test_nothing_is_captured_beyond_the_end_of_the_training() -> None:
    assert work([0, 1], end=3) == Work(segment=2, delete=[])
    assert "there or in work" in str(work([0, 1], [2], end=3))


# Back-pressure


def test_a_producer_fills_the_budget_and_no_more_until_a_trainer_moves_on(ring: Ring, plan: RowPlan) -> None:
    budget = 3 * largest(plan)
    filler = make_filler(ring, plan, budget=budget)
    while filler.fill_next():
        assert bytes_in(ring.root) <= budget
    filled = sorted(ring.segments())
    assert filled == list(range(len(filled)))
    assert 3 <= len(filled) < 9
    ring.begin(row=0, world_size=1, goal=10**6)
    assert not filler.fill_next(), "a trainer that has not read needs all of them"
    ring.move(0, plan.first_row_of(2))
    assert filler.fill_next()
    assert 0 not in ring.segments()
    assert max(ring.segments()) == len(filled)


def test_segments_behind_are_kept_for_a_resume_while_there_is_room_and_dropped_after_a_checkpoint(
    ring: Ring, plan: RowPlan
) -> None:
    filler = make_filler(ring, plan, budget=10**9)
    ring.begin(row=0, world_size=1, goal=plan.first_row_of(6))
    for _ in range(6):
        assert filler.fill_next()
    ring.move(0, plan.first_row_of(5))
    assert not filler.fill_next()
    assert sorted(ring.segments()) == [0, 1, 2, 3, 4, 5], "the checkpoint is still at row 0"
    ring.save_checkpoint(plan.first_row_of(4))
    assert not filler.fill_next()
    assert sorted(ring.segments()) == [4, 5]


def test_the_slowest_rank_decides_what_is_behind(ring: Ring, plan: RowPlan) -> None:
    ring.begin(row=0, world_size=2, goal=10**6)
    ring.move(0, 100)
    assert ring.positions().lowest == 0
    ring.move(1, 60)
    assert ring.positions().lowest == 60
    ring.begin(row=8, world_size=1, goal=10**6)
    assert ring.positions().lowest == 8, "ranks of an earlier training do not count"


def test_a_trainer_waits_for_its_segment_and_says_why_when_no_producer_comes(ring: Ring, plan: RowPlan) -> None:
    with pytest.raises(UserError, match=r"segment 0 of the ring.*no producer is at work.*stage=stream"):
        rows_of(ring, plan, timeout_s=0.15).read(plan.row(0), room_for(plan, 0))


def test_a_wait_names_the_producer_that_has_the_segment(ring: Ring, plan: RowPlan) -> None:
    make_filler(ring, plan, budget=10**9).claims.take(0, 10)
    with pytest.raises(UserError, match=r"process \d+ of .* captures it"):
        rows_of(ring, plan, timeout_s=0.15).read(plan.row(0), room_for(plan, 0))


def test_signs_of_life_of_a_producer_keep_a_waiting_trainer_patient(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_rows, "time", clock)
    patience = Patience("a segment", timeout_s=10, give_up=lambda: False)
    for look in range(1000):
        patience.pause(look // 90, lambda: "nothing")  # a sign every 9 seconds
    with pytest.raises(UserError, match=r"timeout_s=10 s while waiting for a segment: nothing"):
        for _ in range(150):
            patience.pause("the last sign", lambda: "nothing")


def test_a_touched_claim_and_a_new_segment_are_signs_of_life(ring: Ring, plan: RowPlan) -> None:
    filler, rows = make_filler(ring, plan, budget=10**9), rows_of(ring, plan)
    signs = [rows._sign()]
    claim = filler.claims.take(7, 10)
    assert claim is not None
    signs.append(rows._sign())
    os.utime(ring.claims / "segment-00000007.0000", (1, 1))
    signs.append(rows._sign())
    filler.claims.release(claim)
    assert filler.fill_next()
    signs.append(rows._sign())
    assert all(one != other for one, other in itertools.pairwise(signs))
    assert rows._sign() == signs[-1]


def test_a_trainer_asked_to_stop_stops_waiting(ring: Ring, plan: RowPlan) -> None:
    rows = RingRows(ring, plan, rank=0, settings=STREAM, give_up=lambda: True)
    with pytest.raises(WaitStopped, match="segment 3"):
        rows.sample(3, "doc-000")


def test_a_trainer_waits_for_a_ring_that_is_not_made_yet(tmp_path: Path) -> None:
    settings = dataclasses.replace(STREAM, timeout_s=0.15)
    with pytest.raises(UserError, match="no producer has made it yet"):
        wait_for_ring(tmp_path / "ring", settings, lambda: False)


# Several producers, and those that die


def test_producers_side_by_side_capture_every_segment_once(ring: Ring, plan: RowPlan) -> None:
    goal = 15
    ring.begin(row=0, world_size=1, goal=plan.first_row_of(goal))
    fillers = [make_filler(ring, plan, budget=10**9) for _ in range(3)]
    with Producers(fillers):
        deadline = time.monotonic() + 20
        while len(ring.segments()) < goal and time.monotonic() < deadline:
            time.sleep(0.005)
    assert sum(filler.totals.segments for filler in fillers) == len(ring.segments()) == goal
    assert list(ring.claims.iterdir()) == []


def test_what_a_dead_producer_began_is_cleared_and_made_by_another(ring: Ring, plan: RowPlan, clock: Clock) -> None:
    dead = Claim(segment=0, generation=0, host="far", pid=1, token="dead", num_bytes=size_of(plan, 0))
    (ring.claims / "segment-00000000.0000").write_text(json.dumps(vars(dead)))
    ring.temporary_path(0, "dead").write_bytes(b"half")
    filler = make_filler(ring, plan, budget=10**9)
    assert filler.fill_next()
    assert sorted(ring.segments()) == [1], "while it may be alive, others go on with the next segment"
    clock.now += 61
    assert filler.fill_next()
    assert sorted(ring.segments()) == [0, 1]
    assert filler.totals.taken_over == 1
    assert bytes_in(ring.root) == sum(ring.segments().values()), "its half-written file is gone"
    assert list(ring.claims.iterdir()) == []


def test_a_producer_that_was_only_slow_drops_its_work_when_it_was_taken_over(ring: Ring, plan: RowPlan) -> None:
    slow, other = make_filler(ring, plan, budget=10**9), make_filler(ring, plan, budget=10**9)

    def overtaken(documents: Sequence[Document], beat: Beat) -> list[CapturedSample]:
        claim = other.claims.take_over(other.claims.newest()[0], 1000)
        assert claim is not None
        return capture(documents, beat)

    slow._capture = overtaken
    assert not slow.fill_next()
    assert ring.segments() == {}
    assert slow.totals.segments == 0
    assert other.claims.newest()[0].token == other.claims.token


def test_a_claim_left_behind_all_trainers_no_longer_reserves_room(ring: Ring, plan: RowPlan, clock: Clock) -> None:
    dead = Claim(segment=0, generation=0, host="far", pid=1, token="dead", num_bytes=10**9)
    (ring.claims / "segment-00000000.0000").write_text(json.dumps(vars(dead)))
    ring.begin(row=plan.first_row_of(2), world_size=1, goal=10**6)
    filler = make_filler(ring, plan, budget=10**9)
    assert not filler.fill_next()
    clock.now += 61
    assert filler.fill_next()


def test_a_segment_damaged_in_an_earlier_life_is_captured_again(ring: Ring, plan: RowPlan) -> None:
    make_filler(ring, plan, budget=10**9).fill_next()
    path = ring.segment_path(0)
    sound = path.read_bytes()
    with SegmentReader(path) as reader:
        reader.check_content()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    filler = make_filler(ring, plan, budget=10**9)
    filler.clear_damaged()
    assert filler.fill_next()
    with SegmentReader(path) as reader:
        reader.check_content()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left (os error 28)")],
)
def test_a_full_disk_ends_a_producer_with_the_place_and_leaves_nothing_half_written(
    ring: Ring, plan: RowPlan, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(shard_file, "save_file", fail)
    with pytest.raises(UserError, match=r"segment-00000000.*could not be written.*No space left"):
        make_filler(ring, plan, budget=10**9).fill_next()
    assert bytes_in(ring.root) == 0
    assert list(ring.claims.iterdir()) == [], "another producer may go on at once"


def test_samples_of_another_length_than_planned_are_refused(ring: Ring, plan: RowPlan) -> None:
    filler = make_filler(ring, plan, budget=10**9)
    filler._capture = lambda documents, beat: [
        sample_of(dataclasses.replace(document, num_supervised=document.num_supervised - 1)) for document in documents
    ]
    with pytest.raises(CacheIntegrityError, match="conversations changed"):
        filler.fill_next()


# Other settings


def test_a_ring_of_other_settings_is_refused_with_the_differences(ring: Ring) -> None:
    with pytest.raises(CacheIntegrityError, match=r"plan\.segment_rows: 2 -> 3"):
        make_ring(ring.root, DOCUMENTS, StreamConfig(segment_rows=3))
    with pytest.raises(CacheIntegrityError, match=r"plan\.documents"):
        make_ring(ring.root, DOCUMENTS[1:], STREAM)
    other = dataclasses.replace(MANIFEST, content={**MANIFEST.content, "target": "another"})
    with pytest.raises(CacheIntegrityError, match=r"capture\.target: 'toy' -> 'another'"):
        Ring.create(ring.root, other, ring.plan_content, DOCUMENTS)
    with pytest.raises(CacheIntegrityError, match="seed: 3 -> 4"):
        ring_plan(ring, row_tokens=ROW_TOKENS, seed=4, stream=STREAM)


def test_a_ring_edited_by_hand_is_refused(ring: Ring) -> None:
    path = ring.root / "documents.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(CacheIntegrityError, match="not the list"):
        ring.documents()
    manifest = json.loads((ring.root / "manifest.json").read_text())
    manifest["content"]["plan"]["seed"] = 99
    (ring.root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CacheIntegrityError, match="edited by hand"):
        Ring(ring.root)


def test_a_second_training_is_refused_while_the_first_lives_and_not_after_its_death(ring: Ring) -> None:
    ring.begin(row=0, world_size=1, goal=9)
    ring.begin(row=4, world_size=1, goal=9)  # this very process again
    path = ring.root / "positions" / "trainer.json"
    leader = json.loads(path.read_text())
    path.write_text(json.dumps({**leader, "pid": 1}))
    with pytest.raises(UserError, match="in use by another training"):
        ring.begin(row=0, world_size=1, goal=9)
    assert ring.positions().lowest == 4, "the first is not disturbed"
    path.write_text(json.dumps({**leader, "host": "far"}))
    ring.begin(row=0, world_size=1, goal=9)


def test_the_end_of_a_training_is_told_until_the_next_one_begins(ring: Ring) -> None:
    assert ring.done() is None
    ring.finish(output_dir="/out", steps=5)
    done = ring.done()
    assert done is not None
    assert (done["output_dir"], done["steps"]) == ("/out", 5)
    ring.begin(row=0, world_size=1, goal=3)
    assert ring.done() is None
