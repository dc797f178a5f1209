"""The capture cache: what is written is what is read, and nothing damaged, stale or half-written passes."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from data_gen.cache import shard_file
from data_gen.cache import writer as writer_module
from data_gen.cache.format import CacheIntegrityError, CaptureManifest, shard_name
from data_gen.cache.index import compare_index, read_index
from data_gen.cache.quarantine import quarantine
from data_gen.cache.reader import CaptureReader
from data_gen.cache.shard_file import ShardReader, write_shard_file
from data_gen.cache.writer import CaptureWriter
from dflash2_train.config import UserError
from tests.cache_cases import CONTENT, FP8_MANIFEST, MANIFEST, equal, flip_bit, make_cache, make_group, make_sample


def test_samples_are_read_back_bit_for_bit_in_a_fixed_order(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    reader = CaptureReader(tmp_path)
    assert len(reader) == len(samples)
    assert all(equal(reader.read(index), sample) for index, sample in enumerate(samples))
    assert [row.num_tokens for row in reader.index] == [len(sample) for sample in samples]
    assert [row.num_supervised for row in reader.index] == [int(sample.loss_mask.sum()) for sample in samples]
    assert reader.index.num_tokens.tolist() == [len(sample) for sample in samples]
    assert reader.index[-1] == list(reader.index)[-1]
    with pytest.raises(IndexError):
        reader.read(len(samples))


def test_the_order_is_that_of_shard_numbers_whichever_was_written_first(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, MANIFEST)
    for number in (100_000, 1, 99_999):
        writer.write_shard(number, [make_sample(str(number))])
    assert [row.sample_id for row in CaptureReader(tmp_path).index] == ["1", "99999", "100000"]


@pytest.mark.parametrize("loss", ["gone", "torn", "older"])
def test_the_index_is_rebuilt_from_the_shards(tmp_path: Path, loss: str) -> None:
    make_cache(tmp_path)
    before = list(CaptureReader(tmp_path).index)
    path = tmp_path / "index.jsonl"
    if loss == "gone":
        path.unlink()
    else:
        old = '{"kind": "shard", "shard": "shard-00000.safetensors", "num_samples": 3, "num_bytes": 1, "sha256": "a"}\n'
        path.write_text(old if loss == "older" else path.read_text()[:-30])
    assert list(CaptureReader(tmp_path).index) == before, "the reader does without it"
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {0, 1}
    assert sorted(read_index(tmp_path)) == [shard_name(0), shard_name(1)], "the writer restores it, past a torn line"


def test_opening_a_cache_reads_no_shard_that_the_index_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(shard_file, "safe_open", refuse)
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {0, 1}
    assert len(CaptureReader(tmp_path, verify_checksums=False)) == 6


def test_a_flipped_bit_is_refused_by_a_reader_that_compares_digests(tmp_path: Path) -> None:
    make_cache(tmp_path)
    flip_bit(tmp_path / shard_name(1))
    with pytest.raises(CacheIntegrityError, match=f"{shard_name(1)}.*bytes are not those"):
        CaptureReader(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_cut_shard_is_refused_by_the_reader_and_set_aside_and_made_again_by_the_writer(
    tmp_path: Path, damage: str
) -> None:
    samples = make_cache(tmp_path)
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    with pytest.raises(CacheIntegrityError, match=path.name):
        CaptureReader(tmp_path, verify_checksums=False)
    writer = CaptureWriter(tmp_path, MANIFEST)
    assert writer.existing_shards() == {0}
    reason = json.loads((tmp_path / "quarantine" / "shard-00001.0.json").read_text())["reasons"][0]
    assert "were written" in reason
    writer.write_shard(1, samples[3:])
    reader = CaptureReader(tmp_path)
    assert all(equal(reader.read(index), sample) for index, sample in enumerate(samples))


def test_a_damaged_shard_is_not_given_a_fresh_digest_when_the_index_is_lost_too(tmp_path: Path) -> None:
    make_cache(tmp_path)
    flip_bit(tmp_path / shard_name(0))
    (tmp_path / "index.jsonl").unlink()
    CaptureWriter(tmp_path, MANIFEST)
    with pytest.raises(CacheIntegrityError, match="bytes are not those"):
        CaptureReader(tmp_path)


def test_a_shard_replaced_by_another_of_the_same_size_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    make_cache(tmp_path, shards=1)
    reader = CaptureReader(tmp_path, verify_checksums=False)
    (tmp_path / shard_name(0)).unlink()
    write_shard_file(tmp_path / shard_name(0), make_group(0), MANIFEST)
    with pytest.raises(CacheIntegrityError, match="not what the index says"):
        reader.read(0)


def test_a_falsified_line_of_the_index_is_never_believed(tmp_path: Path) -> None:
    """Every bit of the index, flipped: readers give what was written or refuse, and a writer opens."""
    samples = {sample.sample_id: sample for sample in make_cache(tmp_path, shards=1)}
    path = tmp_path / "index.jsonl"
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole)
        flip_bit(path, place)
        try:
            reader = CaptureReader(tmp_path)
        except CacheIntegrityError:
            refused += 1
            continue
        assert [row.sample_id for row in reader.index] == list(samples)
        assert all(equal(reader.read(row), sample) for row, sample in enumerate(samples.values()))
    assert refused > 0


def test_a_sound_shard_with_a_wrong_size_in_the_index_is_kept_and_its_line_corrected(tmp_path: Path) -> None:
    make_cache(tmp_path)
    size = (tmp_path / shard_name(0)).stat().st_size
    path = tmp_path / "index.jsonl"
    path.write_text(path.read_text().replace(f'"num_bytes":{size}', f'"num_bytes":{size - 1}', 1))
    assert len(CaptureReader(tmp_path)) == 6
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {0, 1}
    assert read_index(tmp_path)[shard_name(0)].num_bytes == size
    assert not (tmp_path / "quarantine").exists()


def test_writers_that_start_together_set_a_damaged_shard_aside_once(tmp_path: Path) -> None:
    samples = make_cache(tmp_path, shards=1)
    os.truncate(tmp_path / shard_name(0), 50)
    stale = compare_index(tmp_path, MANIFEST)
    CaptureWriter(tmp_path, MANIFEST).write_shard(0, samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "compare_index", lambda *_: stale)
        CaptureWriter(tmp_path, MANIFEST)
    assert (tmp_path / shard_name(0)).exists(), "the one made meanwhile stays"
    assert quarantine(tmp_path, shard_name(7), ["gone before"]) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


@pytest.mark.parametrize("opened_by", ["reader", "writer"])
def test_a_shard_missing_from_disk_is_named_by_the_reader_and_made_again_by_the_writer(
    tmp_path: Path, opened_by: str
) -> None:
    make_cache(tmp_path)
    (tmp_path / shard_name(0)).unlink()
    if opened_by == "reader":
        with pytest.raises(CacheIntegrityError, match="shard-00000"):
            CaptureReader(tmp_path)
    else:
        assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {1}
        assert len(CaptureReader(tmp_path)) == 3


def test_a_cache_of_other_settings_is_refused_with_the_differences(tmp_path: Path) -> None:
    make_cache(tmp_path)
    other = {**CONTENT, "target_layer_ids": [0, 1], "cache_dtype": "float8_e4m3", "sampling": {"temperature": 0.7}}
    with pytest.raises(CacheIntegrityError) as caught:
        CaptureWriter(tmp_path, CaptureManifest(content=other))
    assert "target_layer_ids: [0, 2] -> [0, 1]" in str(caught.value)
    assert "cache_dtype: 'bfloat16' -> 'float8_e4m3'" in str(caught.value)
    assert "sampling.temperature: 1.0 -> 0.7" in str(caught.value)
    assert "target:" not in str(caught.value), "what agrees is not listed"


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"toy"', '"boy"'))
    with pytest.raises(CacheIntegrityError, match="fingerprint"):
        CaptureReader(tmp_path)


def test_a_cache_of_the_first_version_is_read_and_continued_under_its_own_fingerprint(tmp_path: Path) -> None:
    tmp_path.joinpath("manifest.json").write_text(
        json.dumps(CaptureManifest(content=CONTENT, format_version=1).to_dict())
    )
    samples = make_cache(tmp_path)
    manifest = CaptureReader(tmp_path).manifest
    assert (manifest.format_version, len(CaptureReader(tmp_path))) == (1, len(samples))
    assert manifest.fingerprint == CaptureManifest(content=CONTENT, format_version=1).fingerprint


@pytest.mark.parametrize("lost", ["_publish_new", "append_index"])
def test_a_writer_that_dies_leaves_a_whole_shard_or_none(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_cache(tmp_path, shards=1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    writer = CaptureWriter(tmp_path, MANIFEST)
    monkeypatch.setattr(shard_file if lost == "_publish_new" else writer_module, lost, die)
    with pytest.raises(KeyboardInterrupt):
        writer.write_shard(1, samples)
    monkeypatch.undo()
    assert list(tmp_path.glob(".*")) == []
    expected = {0} if lost == "_publish_new" else {0, 1}
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == expected


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    make_cache(tmp_path, shards=1)
    mine = shard_file._temporary(tmp_path / shard_name(1))
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{2**22 + 1}."))  # beyond the kernel's largest id
    elsewhere = tmp_path / f".{shard_name(1)}.another-host.17.ab12cd34.tmp"
    for path in (mine, dead, elsewhere):
        path.write_bytes(b"part")
    CaptureWriter(tmp_path, MANIFEST)
    assert [path.exists() for path in (mine, dead, elsewhere)] == [True, False, True]
    os.utime(elsewhere, (0, 0))
    CaptureWriter(tmp_path, MANIFEST)
    assert not elsewhere.exists()


def test_of_two_writers_of_one_shard_the_second_is_harmless_unless_its_samples_differ(tmp_path: Path) -> None:
    samples = make_group(0)
    one, two = CaptureWriter(tmp_path, MANIFEST), CaptureWriter(tmp_path, MANIFEST)
    barrier = threading.Barrier(2)

    def write(writer: CaptureWriter) -> str:
        barrier.wait()
        return writer.write_shard(0, samples).header_sha256

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(write, (one, two)))) == 1
    reader = CaptureReader(tmp_path)
    assert [row.sample_id for row in reader.index] == [sample.sample_id for sample in samples]
    with pytest.raises(CacheIntegrityError, match="another writer"):
        one.write_shard(0, make_group(7))
    assert all(equal(reader.read(row), sample) for row, sample in enumerate(samples)), "the first is untouched"


def test_a_full_disk_is_a_plain_message_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path, shards=1)

    def full(_tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file, "save_file", full)
    with pytest.raises(UserError, match="No space left"):
        CaptureWriter(tmp_path, MANIFEST).write_shard(1, make_group(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.jsonl", "manifest.json", shard_name(0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": torch.zeros(6, dtype=torch.bool)}, "no supervised token"),
        ({"tap_hidden": torch.zeros(5, 8, dtype=torch.bfloat16)}, "tap_hidden"),
        ({"tap_hidden": torch.full((6, 8), torch.inf, dtype=torch.bfloat16)}, "not finite"),
        ({"teacher_ids": torch.zeros(6, 2, dtype=torch.int32)}, "teacher_ids"),
        ({"input_ids": torch.zeros(6, dtype=torch.int64)}, "input_ids"),
    ],
)
def test_a_sample_that_breaks_the_format_is_not_written(
    tmp_path: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    bad = dataclasses.replace(make_sample("bad"), **change)
    with pytest.raises(CacheIntegrityError, match=message):
        CaptureWriter(tmp_path, MANIFEST).write_shard(0, [make_sample("good"), bad])
    assert not (tmp_path / shard_name(0)).exists()


def test_a_shard_of_another_dtype_or_shape_is_not_opened_under_this_manifest(tmp_path: Path) -> None:
    path = tmp_path / shard_name(0)
    write_shard_file(path, make_group(0), MANIFEST)
    for other in (FP8_MANIFEST, CaptureManifest(content={**CONTENT, "target_layer_ids": [0]})):
        with pytest.raises(CacheIntegrityError, match="tap_hidden"):
            ShardReader(path, other)


def test_reading_copies_nothing_and_samples_outlive_a_closed_reader(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    reader = CaptureReader(tmp_path, open_shards=1)
    first, again = reader.read(0), reader.read(0)
    assert first.tap_hidden.data_ptr() == again.tap_hidden.data_ptr()
    reader.read(len(samples) - 1)  # closes the first shard
    reader.close()
    assert equal(first, samples[0])


def test_threads_share_a_reader_that_keeps_one_file_open(tmp_path: Path) -> None:
    samples = make_cache(tmp_path, shards=4)
    reader = CaptureReader(tmp_path, open_shards=1)
    places = [(7 * place) % len(samples) for place in range(300)]
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(reader.read, places))
    assert all(equal(sample, samples[place]) for sample, place in zip(read, places, strict=True))


def test_a_reader_can_be_handed_to_a_worker_process(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    reader = CaptureReader(tmp_path)
    reader.read(0)
    handed = pickle.loads(pickle.dumps(reader))
    assert all(equal(handed.read(place), sample) for place, sample in enumerate(samples))


@pytest.mark.parametrize("manifest", [MANIFEST, FP8_MANIFEST], ids=["bf16", "fp8"])
def test_states_copied_into_a_batch_are_those_of_the_sample(tmp_path: Path, manifest: CaptureManifest) -> None:
    make_cache(tmp_path, manifest=manifest)
    reader = CaptureReader(tmp_path)
    reader.prefetch(range(len(reader)))
    for place in range(len(reader)):
        sample = reader.read(place)
        batch = torch.full((3, 10, sample.tap_hidden.shape[1]), 7.0, dtype=torch.bfloat16)
        place_in_batch = batch[1, 2 : 2 + len(sample)]
        assert reader.read(place, place_in_batch).tap_hidden is place_in_batch
        assert torch.equal(place_in_batch, sample.tap_hidden)
        assert bool((batch[1, :2] == 7).all()) and bool((batch[0] == 7).all())


def test_closing_a_reader_closes_its_files(tmp_path: Path) -> None:
    make_cache(tmp_path, shards=4)
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = CaptureReader(tmp_path, open_shards=2)
    for place in range(len(reader)):
        reader.read(place)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_bytes_to_prefetch_are_those_of_the_samples_states(tmp_path: Path) -> None:
    samples = make_cache(tmp_path, shards=1)
    shard = ShardReader(tmp_path / shard_name(0), MANIFEST)
    for place, sample in enumerate(samples):
        start, length = shard.state_bytes(place)
        assert shard.path.read_bytes()[start : start + length] == sample.tap_hidden.view(torch.uint8).numpy().tobytes()
