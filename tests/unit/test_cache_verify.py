"""Verify finds what is wrong, names it, sets it aside within a budget, and inspect tells what a cache holds."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CacheIntegrityError, CapturedSample, shard_name
from data_gen.cache.reader import CaptureReader
from data_gen.cache.statistics import gather_statistics
from data_gen.cache.verify import StoreVerifier, VerifyReport, choose_shards
from data_gen.cache.writer import CaptureWriter
from data_gen.cli import open_display
from data_gen.store_stages import run_inspect, run_verify
from dflash2_train.config import ConfigError, StoreConfig
from tests.cache_cases import (
    CONTENT,
    FP8_MANIFEST,
    MANIFEST,
    TOP_K,
    VOCAB,
    flip_bit,
    make_cache,
    make_sample,
    write_conversations,
)
from tests.cases import tiny_run_config


def verify(root: Path, conversations: ConversationStore | None = None, **settings: Any) -> VerifyReport:
    return StoreVerifier(root, StoreConfig(**settings), conversations).run(lambda _: None)


def write_one(root: Path, *samples: CapturedSample) -> None:
    CaptureWriter(root, MANIFEST).write_shard(0, samples)


@pytest.mark.parametrize("manifest", [MANIFEST, FP8_MANIFEST], ids=["bf16", "fp8"])
def test_nothing_is_found_in_a_sound_cache_and_its_agreement_is_counted(tmp_path: Path, manifest: Any) -> None:
    samples = make_cache(tmp_path, manifest=manifest)
    report = verify(tmp_path)
    assert report.faults == {}
    assert (report.read, report.shards) == (2, 2)
    assert report.tokens == sum(len(sample) for sample in samples)
    assert report.argmax == report.in_top_k == report.supervised > 0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"input_ids": torch.full((6,), VOCAB, dtype=torch.int32)}, "outside the vocabulary"),
        ({"tap_hidden": torch.zeros(6, 8, dtype=torch.bfloat16)}, "all-zero"),
        ({"tap_hidden": torch.ones(6, 8).index_fill_(1, torch.arange(4, 8), 0).bfloat16()}, "all-zero"),
        ({"teacher_logprobs": torch.zeros(6, TOP_K, dtype=torch.float16)}, "no distribution"),
        ({"teacher_log_normaliser": torch.full((6,), torch.nan)}, "not finite"),
        ({"sample_id": "twin"}, "more than once"),
    ],
)
def test_a_fault_is_named_with_its_shard(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    write_one(tmp_path, make_sample("twin"), dataclasses.replace(make_sample("bad"), **change))
    report = verify(tmp_path)
    assert list(report.faults) == [shard_name(0)]
    assert fault in report.faults[shard_name(0)][0]


def test_states_that_are_not_finite_are_found_although_the_digest_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dataclasses.replace(make_sample("bad"), tap_hidden=torch.full((6, 8), torch.nan, dtype=torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr("data_gen.cache.shard_file.check_sample", lambda *_: None)
        write_one(tmp_path, bad)
    assert "not finite" in verify(tmp_path).faults[shard_name(0)][0]


def test_tokens_that_are_not_those_of_the_conversation_are_found(tmp_path: Path) -> None:
    capture, conversations = tmp_path / "capture", ConversationStore(tmp_path)
    samples = [make_sample(f"s{row}") for row in range(5)]
    write_conversations(tmp_path, 0, [*samples[:4], make_sample("unread")])
    changed = samples[0].input_ids.roll(1)
    stored = [
        dataclasses.replace(samples[0], input_ids=changed),
        dataclasses.replace(samples[1], loss_mask=torch.ones(6, dtype=torch.bool)),
        dataclasses.replace(make_sample("s2", length=5)),
        samples[3],
        samples[4],  # no such conversation
    ]
    write_one(capture, *stored)
    report = verify(capture, conversations)
    faults = report.faults[shard_name(0)]
    assert [fault.split(":")[0] for fault in faults] == ["sample s0", "sample s1", "sample s2", "sample s4"]
    for fault, text in zip(faults, ["foreign tokens", "prompt tokens", "5 tokens", "no conversation"], strict=True):
        assert text in fault
    assert (report.compared, report.without_states) == (5, 1)


def damaged_cache(root: Path) -> None:
    """20 shards: one cut by 100 bytes, one empty, one without tensors."""
    make_cache(root, shards=20)
    path = root / shard_name(4)
    path.write_bytes(path.read_bytes()[:-100])
    (root / shard_name(9)).write_bytes(b"")
    (root / shard_name(17)).unlink()
    save_file({}, root / shard_name(17))


def test_damaged_shards_are_set_aside_within_the_budget_and_the_rest_is_used(tmp_path: Path) -> None:
    damaged_cache(tmp_path)
    report = verify(tmp_path, quarantine=True, max_damaged=0, max_damaged_share=0.2)
    assert report.quarantined == [shard_name(4), shard_name(9), shard_name(17)]
    assert report.left == {}
    assert len(CaptureReader(tmp_path).shards) == 17
    reasons = json.loads((tmp_path / "quarantine" / "shard-00009.0.json").read_text())["reasons"]
    assert "0 bytes" in reasons[0]
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == set(range(20)) - {4, 9, 17}, "to be made again"


def test_beyond_the_budget_nothing_is_moved_and_the_first_causes_are_told(tmp_path: Path) -> None:
    damaged_cache(tmp_path)
    with pytest.raises(CacheIntegrityError, match=r"(?s)3 of 20 shards.*shard-00004.*shard-00009.*shard-00017"):
        verify(tmp_path, quarantine=True, max_damaged=0, max_damaged_share=0.05)
    assert not (tmp_path / "quarantine").exists()
    assert (tmp_path / shard_name(9)).exists()


def test_without_being_told_to_verify_moves_nothing(tmp_path: Path) -> None:
    damaged_cache(tmp_path)
    report = verify(tmp_path)
    assert list(report.left) == list(report.faults) == [shard_name(4), shard_name(9), shard_name(17)]
    assert not (tmp_path / "quarantine").exists()


def test_a_shard_set_aside_twice_keeps_both_files(tmp_path: Path) -> None:
    samples = make_cache(tmp_path)
    for _ in range(2):
        flip_bit(tmp_path / shard_name(0))
        assert verify(tmp_path, quarantine=True).quarantined == [shard_name(0)]
        CaptureWriter(tmp_path, MANIFEST).write_shard(0, samples[:3])
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert names == [f"shard-00000.{number}.{kind}" for number in (0, 1) for kind in ("json", "safetensors")]
    assert verify(tmp_path).faults == {}


def test_a_shard_that_is_gone_is_a_fault_until_it_is_taken_out_of_the_index(tmp_path: Path) -> None:
    make_cache(tmp_path)
    (tmp_path / shard_name(1)).unlink()
    assert "gone" in verify(tmp_path).faults[shard_name(1)][0]
    assert verify(tmp_path, quarantine=True).quarantined == [shard_name(1)]
    assert verify(tmp_path).faults == {}


def test_a_wrong_line_of_a_sound_shard_is_a_fault_and_is_corrected_when_mending_is_asked_for(tmp_path: Path) -> None:
    make_cache(tmp_path)
    path = tmp_path / "index.jsonl"
    path.write_text(path.read_text().replace('"s0-1"', '"s0-9"'))
    assert "the index says something else" in verify(tmp_path).faults[shard_name(0)][0]
    report = verify(tmp_path, quarantine=True)
    assert (report.faults, report.quarantined) == ({}, [])
    assert verify(tmp_path).faults == {}
    assert CaptureReader(tmp_path).index[1].sample_id == "s0-1"


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_line_that_claims_another_shards_sample_costs_no_shard(tmp_path: Path, share: float, wrong: int) -> None:
    samples = make_cache(tmp_path)
    path = tmp_path / "index.jsonl"
    lines = path.read_text().splitlines()
    lines[wrong] = lines[wrong].replace(f'"s{wrong}-0"', f'"s{1 - wrong}-0"')  # as one flipped bit does
    path.write_text("\n".join(lines) + "\n")
    assert verify(tmp_path, verify_share=share).faults.keys() == {shard_name(wrong)}
    mended = verify(tmp_path, verify_share=share, quarantine=True)
    assert (mended.faults, mended.quarantined) == ({}, [])
    assert [row.sample_id for row in CaptureReader(tmp_path).index] == [sample.sample_id for sample in samples]


def test_a_crash_while_a_shard_is_set_aside_never_brings_it_back_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path)
    flip_bit(tmp_path / shard_name(0))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_gen.cache.quarantine.append_removal", die)
        with pytest.raises(KeyboardInterrupt):
            verify(tmp_path, quarantine=True)
    with pytest.raises(CacheIntegrityError, match="gone"):
        CaptureReader(tmp_path)
    assert CaptureWriter(tmp_path, MANIFEST).existing_shards() == {1}


def test_a_sampled_verification_reads_its_share_drawn_by_the_seed(tmp_path: Path) -> None:
    names = [shard_name(number) for number in range(40)]
    chosen = choose_shards(names, 0.25, seed=1)
    assert len(chosen) == 10 and chosen == choose_shards(names, 0.25, seed=1) != choose_shards(names, 0.25, seed=2)
    assert choose_shards(names, 1.0, seed=0) == names
    assert len(choose_shards(names, 0.001, seed=0)) == 1
    make_cache(tmp_path, shards=4)
    report = verify(tmp_path, verify_share=0.5)
    assert (report.read, report.shards, report.samples) == (2, 4, 6)


def test_text_that_the_target_did_not_write_shows_in_the_agreement_of_its_source(tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    good, bad = make_sample("good", length=40), make_sample("bad", length=30)
    bad = dataclasses.replace(bad, teacher_ids=(bad.teacher_ids + 20) % VOCAB)
    write_one(capture, good)
    CaptureWriter(capture, MANIFEST).write_shard(1, [bad])
    write_conversations(tmp_path, 0, [good], source="maths")
    write_conversations(tmp_path, 1, [bad], source="chat")
    done: list[int] = []
    statistics = gather_statistics(CaptureReader(capture), ConversationStore(tmp_path), on_samples=done.append)
    assert statistics.sources["maths"].argmax_share == 1.0
    assert statistics.sources["chat"].in_top_k_share < 0.5
    assert statistics.total.supervised == 38 + 28
    assert statistics.total.finish_reasons == {"stop": 2}
    assert sum(statistics.length_counts) == 2 and statistics.length_edges[-1] > 40
    assert done == [1, 2]


def stage_config(root: Path, samples: Sequence[CapturedSample]) -> Any:
    config = tiny_run_config(root)
    data = Path(config.data.root)
    write_conversations(data, 0, list(samples))
    write_one(data / "capture", *samples)
    return config


def test_the_inspect_stage_leaves_figures_and_a_plot(tmp_path: Path) -> None:
    config = stage_config(tmp_path, [make_sample(f"s{row}", length=5 + row) for row in range(4)])
    run_inspect(config, open_display)
    folder = Path(config.data.root) / "inspect"
    figures = json.loads((folder / "cache.json").read_text())
    assert figures["dtype"] == CONTENT["cache_dtype"]
    assert figures["sources"]["toy"]["samples"] == figures["total"]["samples"] == 4
    assert figures["sources"]["toy"]["in_top_k_share"] == 1.0
    assert (folder / "cache.png").read_bytes()[:4] == b"\x89PNG" and (folder / "cache.png").stat().st_size > 10_000


def test_the_verify_stage_ends_with_1_while_faults_are_left_and_with_0_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = stage_config(tmp_path, [make_sample("a"), make_sample("b")])
    assert run_verify(config, open_display) == 0
    flip_bit(Path(config.data.root) / "capture" / shard_name(0))
    with caplog.at_level(logging.ERROR):
        assert run_verify(config, open_display) == 1
    assert shard_name(0) in caplog.text and "bytes are not those" in caplog.text
    config.data.store.quarantine = True
    assert run_verify(config, open_display) == 0
    record = json.loads((Path(config.data.root) / "inspect" / "verify.json").read_text())
    assert record["quarantined"] == [shard_name(0)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float8_e5m2"),
        ("verify_share", 0.0),
        ("verify_share", 1.5),
        ("max_damaged", -1),
        ("max_damaged_share", 2.0),
    ],
)
def test_a_setting_of_the_store_that_means_nothing_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"data.store.{key}"):
        StoreConfig(**{key: value}).check()
