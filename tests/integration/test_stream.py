"""Stream mode end to end: capture and training side by side give what capture and then training give, killed or not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.ring import Ring
from data_gen.cli import gen_data
from dflash2_train.config import RunConfig, load_config, to_plain
from dflash2_train.tracker import read_metrics
from tests.cases import tiny_run_config, without_clock
from tests.integration.forked import RankProcess, fork_ranks_of
from tests.integration.forked import finish as finish_ranks
from tests.tiny_target import EOS, save_tiny_llama

STEPS, PROMPT, CONVERSATIONS = 6, 4, 24


def row(number: int, ids: list[int], config: RunConfig) -> dict[str, Any]:
    text = dict.fromkeys(("messages", "source", "license", "completion_text", "revision", "target_hash"), "")
    reals = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return {
        **text,
        **dict.fromkeys(reals, 1.0),
        "row_id": f"p{number:02d}-0",
        "prompt_id": f"p{number:02d}",
        "repeat": 0,
        "turn": 0,
        "tools": "",
        "prompt_ids": ids[:PROMPT],
        "completion_ids": ids[PROMPT:],
        "num_prompt_tokens": PROMPT,
        "num_completion_tokens": len(ids) - PROMPT,
        "finish_reason": "length",
        "dropped": "cut" if number == 3 else "",
        "seed": 0,
        "top_k": 0,
        "max_tokens": 32,
        "stop_ids": list(EOS),
        "target": config.target.name,
        "enable_thinking": None,
    }


@torch.inference_mode()
def write_conversations(model: Any, config: RunConfig) -> None:
    """Text that the target itself sampled, in two shards."""
    from dflash2_train.provenance import hash_model_folder

    store = ConversationStore(Path(config.data.root))
    content = {
        "target": config.target.name,
        "target_hash": hash_model_folder(Path(config.target.name)),
        "backend": "hf",
        "enable_thinking": None,
    }
    store.open(content)
    generator = torch.Generator().manual_seed(11)
    rows = []
    for number in range(CONVERSATIONS):
        ids = torch.randint(3, config.target.vocab_size - 1, (PROMPT,), generator=generator).tolist()
        while len(ids) < 28 - number % 9:
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            logits[config.drafter.mask_token_id] = -torch.inf
            ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        rows.append(row(number, ids, config))
    store.write(0, rows[: CONVERSATIONS // 2])
    store.write(1, rows[CONVERSATIONS // 2 :])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny target with finished conversations and nothing captured."""
    root = tmp_path_factory.mktemp("stream")
    config = tiny_run_config(root)
    config.target.name, config.target.dtype = str(root / "target"), "float32"
    config.data.backend, config.data.teacher_top_k, config.data.attest.min_agreement = "hf", 8, 0.05
    config.data.max_num_seqs = 1  # a sequence's states may round differently in another batch
    config.data.stream.segment_rows, config.data.stream.budget_mib = 2, 1
    config.train.dtype, config.train.steps, config.train.save_every = "float32", STEPS, 2
    config.train.row_tokens, config.train.rows, config.train.lr = 64, 2, 3e-3
    config.train.init_layers = []
    write_conversations(save_tiny_llama(root / "target", config), config)
    return config


def variant(base: RunConfig, folder: Path, *, mode: str, stage: str) -> RunConfig:
    """The same experiment with output, ring and stage of its own."""
    from omegaconf import OmegaConf

    config = load_config(OmegaConf.create(to_plain(base)))
    config.data.mode, config.data.stream.root, config.stage = mode, str(folder / "ring"), stage
    config.train.output_dir, config.export.output_dir = str(folder / "train"), str(folder / "export")
    return config


def start(config: RunConfig, folder: Path, module: str) -> RankProcess:
    path = folder / f"{module}-{config.stage}.json"
    path.write_text(json.dumps(to_plain(config)))
    return fork_ranks_of(f"tests.integration.{module}", [str(path)], 1)[0]


def finish(process: RankProcess) -> str:
    return finish_ranks([process])


def wait_for(condition: Callable[[], object], process: RankProcess) -> None:
    deadline = time.monotonic() + 200
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def curve(config: RunConfig) -> list[dict[str, float]]:
    rows = read_metrics(Path(config.train.output_dir) / "metrics.jsonl")
    return [without_clock(row) for row in rows]


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.train.output_dir) / f"step{STEPS:06d}" / "drafter.safetensors")


def same(one: RunConfig, other: RunConfig) -> None:
    assert curve(one) == curve(other)
    assert len(curve(one)) == STEPS
    expected, found = weights(one), weights(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def cached(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """All captured first, then trained."""
    folder = tmp_path_factory.mktemp("cached")
    config = variant(base, folder, mode="cache", stage="capture")
    assert gen_data(config) == 0
    finish(start(config, folder, "run_training"))
    return config


def test_a_stream_trains_to_the_same_curve_and_weights_as_a_cache(
    base: RunConfig, cached: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, mode="stream", stage="stream")
    producer = start(config, tmp_path, "run_gen_data")
    finish(start(config, tmp_path, "run_training"))
    finish(producer)
    same(cached, config)
    assert list((tmp_path / "ring" / "claims").iterdir()) == []


@pytest.mark.slow
def test_killed_on_both_sides_and_started_again_a_stream_still_equals_the_cache(
    base: RunConfig, cached: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, mode="stream", stage="stream")
    trainer = start(config, tmp_path, "run_training")  # waits for the ring to be made
    producer = start(config, tmp_path, "run_gen_data")
    segments = tmp_path / "ring" / "segments"
    wait_for(lambda: list(segments.glob("segment-*")), producer)
    producer.send_signal(signal.SIGKILL)
    producer.communicate()
    producer = start(config, tmp_path, "run_gen_data")
    wait_for((Path(config.train.output_dir) / "step000002").exists, trainer)
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    ring = Ring(tmp_path / "ring")
    for segment in ring.segments():
        ring.delete(segment)  # as if they had been released for want of room
    assert "continuing from step" in finish(start(config, tmp_path, "run_training"))
    finish(producer)
    same(cached, config)


@pytest.mark.slow
def test_a_capture_worker_that_dies_is_replaced_and_two_ranks_train_to_the_same_curve(
    base: RunConfig, cached: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, tmp_path, mode="stream", stage="stream")
    config.data.stream.workers, config.train.rows = 1, 1
    producer = start(config, tmp_path, "run_gen_data")
    claims, segments = tmp_path / "ring" / "claims", tmp_path / "ring" / "segments"
    wait_for(lambda: list(segments.glob("segment-*")), producer)
    children = Path(f"/proc/{producer.pid}/task/{producer.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    path = tmp_path / "two.json"
    path.write_text(json.dumps(to_plain(config)))
    finish_ranks(fork_ranks_of("tests.integration.run_training", [str(path)], 2))
    assert "capture worker 0 died of SIGKILL (1 of 20 times)" in re.sub(r"\s+", " ", finish(producer))
    assert list(claims.iterdir()) == []
    for one, two in zip(curve(cached), curve(config), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_finished_training_ends_new_producers_and_trainers_at_once(
    base: RunConfig, cached: RunConfig, tmp_path: Path
) -> None:
    """Trained from the cache, ended as a stream: the two share one fingerprint, so a run may change its mode."""
    config = variant(base, tmp_path, mode="stream", stage="stream")
    config.train.output_dir, config.export.output_dir = cached.train.output_dir, cached.export.output_dir
    producer = start(config, tmp_path, "run_gen_data")
    wait_for((tmp_path / "ring" / "manifest.json").exists, producer)
    assert "training is complete" in finish(start(config, tmp_path, "run_training"))
    finish(producer)
    assert "nothing to capture" in finish(start(config, tmp_path, "run_gen_data"))


@pytest.mark.slow
def test_a_stream_holds_back_what_a_cache_would_and_validates_to_the_same_figures(
    base: RunConfig, cached: RunConfig, tmp_path: Path
) -> None:
    modes = {}
    for mode in ("cache", "stream"):
        config = modes[mode] = variant(base, tmp_path / mode, mode=mode, stage="capture" if mode == "cache" else mode)
        config.train.validate_every, config.train.validation.share = 3, 0.2
        (tmp_path / mode).mkdir()
    assert cached.data.root == modes["cache"].data.root  # captured by the fixture
    finish(start(modes["cache"], tmp_path / "cache", "run_training"))
    producer = start(modes["stream"], tmp_path / "stream", "run_gen_data")
    finish(start(modes["stream"], tmp_path / "stream", "run_training"))
    finish(producer)
    for config in modes.values():
        assert sum("validation/acceptance_length" in row for row in curve(config)) == 2
    same(*modes.values())
