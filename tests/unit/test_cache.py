"""The capture cache: what is written is what is read, and nothing damaged, stale or half-written passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data_gen.cache import writer as writer_module
from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest, shard_name
from data_gen.cache.reader import CaptureReader
from data_gen.cache.verify import agreement, verify_capture
from data_gen.cache.writer import CaptureWriter

TAPS, HIDDEN, VOCAB, TOP_K = [0, 2], 4, 50, 3
CONTENT = {
    "target": "toy",
    "target_layer_ids": TAPS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "teacher_top_k": TOP_K,
    "sampling": {"temperature": 1.0, "seed": 0},
}
MANIFEST = CaptureManifest(content=CONTENT)


def make_sample(name: str, length: int = 6, prompt: int = 2) -> CapturedSample:
    """Random states; the teacher's first choice is the next token."""
    ids = torch.randint(0, VOCAB - TOP_K, (length,), dtype=torch.int32)
    following = torch.cat([ids[1:], ids[:1]])
    logprobs = torch.tensor([0.5, 0.3, 0.1]).log().half().repeat(length, 1)
    return CapturedSample(
        sample_id=name,
        input_ids=ids,
        loss_mask=torch.arange(length) >= prompt,
        tap_hidden=torch.randn(length, len(TAPS) * HIDDEN).bfloat16(),
        teacher_ids=following[:, None] + torch.arange(TOP_K, dtype=torch.int32),
        teacher_logprobs=logprobs,
        teacher_log_normaliser=torch.randn(length),
    )


def make_cache(root: Path, shards: int = 2) -> list[CapturedSample]:
    writer = CaptureWriter(root, MANIFEST)
    samples = []
    for shard in range(shards):
        group = [make_sample(f"s{shard}-{row}", length=4 + row) for row in range(3)]
        writer.write_shard(shard, group)
        samples += group
    return samples


def equal(one: CapturedSample, other: CapturedSample) -> bool:
    fields = [field.name for field in dataclasses.fields(one) if field.name != "sample_id"]
    same = [torch.equal(getattr(one, name), getattr(other, name)) for name in fields]
    types = [getattr(one, name).dtype == getattr(other, name).dtype for name in fields]
    return one.sample_id == other.sample_id and all(same) and all(types)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_samples_are_read_back_bit_for_bit_in_a_fixed_order(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    reader = CaptureReader(tmp_path)
    assert len(reader) == len(samples)
    assert all(equal(reader.read(index), sample) for index, sample in enumerate(samples))
    assert [row.num_tokens for row in reader.index] == [len(sample) for sample in samples]
    assert [row.num_supervised for row in reader.index] == [int(sample.loss_mask.sum()) for sample in samples]


def test_the_order_does_not_depend_on_which_shard_was_written_first(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, MANIFEST)
    writer.write_shard(1, [make_sample("late")])
    writer.write_shard(0, [make_sample("early")])
    assert [row.sample_id for row in CaptureReader(tmp_path).index] == ["early", "late"]


@pytest.mark.parametrize("loss", ["gone", "torn"])
def test_the_index_is_rebuilt_from_the_shards(tmp_path: Path, loss: str) -> None:
    make_cache(tmp_path)
    before = CaptureReader(tmp_path).index
    path = tmp_path / "index.jsonl"
    whole = path.read_bytes()
    path.unlink() if loss == "gone" else path.write_bytes(whole[:-30])
    assert CaptureReader(tmp_path).index == before, "the reader does without it"
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {0, 1}
    assert path.read_bytes() == whole, "the writer restores it"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_refused_by_the_reader_and_set_aside_by_the_writer(tmp_path: Path, damage: str) -> None:
    samples = make_cache(tmp_path)
    path = tmp_path / shard_name(1)
    if damage == "flip":
        flip_byte(path)
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    with pytest.raises(CacheIntegrityError, match=path.name):
        CaptureReader(tmp_path)
    writer = CaptureWriter(tmp_path, MANIFEST)
    assert writer.existing_shards() == {0}
    writer.write_shard(1, samples[3:])
    reader = CaptureReader(tmp_path)
    assert all(equal(reader.read(index), sample) for index, sample in enumerate(samples))


def test_a_damaged_shard_is_not_given_a_fresh_checksum_when_the_index_is_lost_too(tmp_path: Path) -> None:
    make_cache(tmp_path)
    flip_byte(tmp_path / shard_name(0))
    (tmp_path / "index.jsonl").unlink()
    with pytest.raises(CacheIntegrityError, match="bytes are not those"):
        CaptureReader(tmp_path)


def test_a_shard_missing_from_disk_is_named(tmp_path: Path) -> None:
    make_cache(tmp_path)
    (tmp_path / shard_name(0)).unlink()
    with pytest.raises(CacheIntegrityError, match="shard-00000"):
        CaptureReader(tmp_path)


def test_a_cache_of_other_settings_is_refused_with_the_differences(tmp_path: Path) -> None:
    make_cache(tmp_path)
    other = {**CONTENT, "target_layer_ids": [0, 1], "sampling": {"temperature": 0.7, "seed": 0}}
    with pytest.raises(CacheIntegrityError) as caught:
        CaptureWriter(tmp_path, CaptureManifest(content=other))
    assert "target_layer_ids: [0, 2] -> [0, 1]" in str(caught.value)
    assert "sampling.temperature: 1.0 -> 0.7" in str(caught.value)
    assert "target:" not in str(caught.value), "what agrees is not listed"


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"toy"', '"boy"'))
    with pytest.raises(CacheIntegrityError, match="fingerprint"):
        CaptureReader(tmp_path)


def test_a_writer_that_dies_before_the_rename_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_cache(tmp_path, shards=1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    writer = CaptureWriter(tmp_path, MANIFEST)
    monkeypatch.setattr(writer_module, "publish", die)
    with pytest.raises(KeyboardInterrupt):
        writer.write_shard(1, samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.jsonl", "manifest.json", shard_name(0)]


def test_a_shard_whose_index_lines_were_never_written_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_cache(tmp_path, shards=1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    writer = CaptureWriter(tmp_path, MANIFEST)
    monkeypatch.setattr(writer_module, "append_index", die)
    with pytest.raises(KeyboardInterrupt):
        writer.write_shard(1, samples)
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {0, 1}


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


def test_verify_finds_nothing_in_a_sound_cache_and_counts_the_agreement(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    report = verify_capture(tmp_path)
    assert report.faults == []
    assert report.tokens == sum(len(sample) for sample in samples)
    assert report.argmax == report.in_top_k == report.supervised > 0
    assert agreement(CaptureReader(tmp_path))["argmax"] == 1.0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"input_ids": torch.full((6,), VOCAB, dtype=torch.int32)}, "outside the vocabulary"),
        ({"tap_hidden": torch.zeros(6, 8, dtype=torch.bfloat16)}, "all-zero"),
        ({"teacher_logprobs": torch.zeros(6, TOP_K, dtype=torch.float16)}, "no distribution"),
        ({"teacher_log_normaliser": torch.full((6,), torch.nan)}, "not finite"),
        ({"sample_id": "twin"}, "more than once"),
    ],
)
def test_verify_names_the_sample_and_the_fault(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    bad = dataclasses.replace(make_sample("bad"), **change)
    CaptureWriter(tmp_path, MANIFEST).write_shard(0, [make_sample("twin"), bad])
    report = verify_capture(tmp_path)
    assert len(report.faults) == 1
    assert fault in report.faults[0]


def test_text_that_the_target_did_not_write_shows_in_the_agreement(tmp_path: Path) -> None:
    sample = make_sample("foreign")
    wrong = dataclasses.replace(sample, teacher_ids=(sample.teacher_ids + 20) % VOCAB)
    CaptureWriter(tmp_path, MANIFEST).write_shard(0, [wrong])
    assert agreement(CaptureReader(tmp_path))["in_top_k"] < 0.5
