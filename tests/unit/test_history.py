"""An export's record tells how its weights came about: from the run's own files, and only from those."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from data_gen.cache.format import CaptureManifest, ShardRow
from dflash2_train.checkpoint import MANIFEST, STATE, WEIGHTS
from dflash2_train.config import RunConfig, to_plain
from dflash2_train.export import run
from dflash2_train.export.history import last_metrics, training_facts
from dflash2_train.lineage import warm_start_chain
from dflash2_train.provenance import atomic_write_json, run_record, sha256_file
from tests.cases import make_drafter, make_target_info

CACHE = {
    "target": "/models/Big",
    "tokenizer_hash": "t" * 64,
    "chat_template_hash": "c" * 64,
    "conversations": "v" * 64,
    "enable_thinking": True,
    "generated_by": "vllm",
    "captured_by": "hf",
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 4096, "seed": 5},
}
PROMPTS = {
    "label": "owner/prompts train",
    "split": "train",
    "revision": "d" * 40,
    "terms": "attribution",
    "rows": 120,
    "kept": 100,
    "licenses": {"cc-by-4.0": 90, "mit": 10},
    "duplicates": 20,
}


def write_data(root: Path) -> None:
    """What prompt planning and capture leave, as far as the history reads it."""
    held_out = {**PROMPTS, "label": "owner/held", "split": "holdout", "kept": 5, "licenses": {"mit": 5}, "terms": ""}
    atomic_write_json(root / "prompts_report.json", {"sources": [PROMPTS, held_out], "removed": [{}, {}, {}]})
    atomic_write_json(root / "capture" / "manifest.json", CaptureManifest(content=CACHE).to_dict())
    row = ShardRow(
        shard="shard-00000.safetensors",
        num_bytes=1,
        header_sha256="0" * 64,
        sample_ids=["a", "b"],
        num_tokens=[30, 12],
        num_supervised=[20, 10],
    )
    (root / "capture" / "index.jsonl").write_text(json.dumps(asdict(row)) + "\n")


def write_run(config: RunConfig, *, step: int = 20, warm_start: list[dict[str, Any]] | None = None) -> Path:
    """A run folder with one checkpoint, as training leaves it; returns the checkpoint."""
    output = Path(config.train.output_dir)
    record = run_record(to_plain(config), ["/opt/bin/dflash2-train", f"run_dir={output}"])
    record |= {"cache": CACHE, "attestation": {"passed": True}, "warm_start": warm_start or [], "run_id": "tiny-77"}
    atomic_write_json(output / "run.json", record)
    atomic_write_json(output / "run.attempt2.json", {**record, "time_utc": "later"})
    lines = [{"step": number, "attempt": 1, "loss": 9.0 - number, "epoch": 0.5} for number in (1, 2)]
    lines += [{"step": step, "attempt": 2, "loss": 1.25, "epoch": 3.0}, {"step": step + 5, "attempt": 2, "loss": 0.5}]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30, "lo')
    folder = output / f"step{step:06d}"
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in make_drafter(config).state_dict().items()}, folder / WEIGHTS
    )
    trainer = {"step": step, "rows_consumed": 160, "dropped": 1, "seconds": 3725.0, "attempt": 2, "run_id": "tiny-77"}
    atomic_write_json(folder / STATE, {"trainer": trainer, "world_size": 8})
    files = {name: sha256_file(folder / name) for name in (WEIGHTS, STATE)}
    atomic_write_json(folder / MANIFEST, {"step": step, "world_size": 8, "fingerprint": {}, "files": files})
    return folder


@pytest.fixture
def config(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(run, "open_target_config", lambda _target: make_target_info(tiny_config))
    tiny_config.train.steps = 40
    tiny_config.loss.gamma = 5.5
    return tiny_config


def test_the_papers_tell_data_loss_time_hardware_and_code_of_the_run(config: RunConfig) -> None:
    write_data(Path(config.data.root))
    write_run(config)
    folder = run.export_checkpoint(config)
    text, card = (folder / "PROVENANCE.txt").read_text(), (folder / "README.md").read_text()
    for part in (
        "tokenizer hash: " + "t" * 64,
        "chat template hash: " + "c" * 64,
        "- owner/prompts train @ dddddddddddd; licence: cc-by-4.0 (90), mit (10); 100 prompts; terms: attribution",
        "- owner/held @ dddddddddddd; licence: mit (5); 5 prompts",
        "removed for an overlap: 3",
        "temperature 0.7, top-p 0.9, top-k 20, at most 4,096 tokens, seed 5, thinking: on",
        "captured: 2 answers, 42 tokens, 30 supervised",
        "run: tiny-77",
        "wall time 1 h 2 min 5 s, attempts 2",
        "position decay gamma 5.5",
        "steps: 20 of 40, seed 0, rows seen 160, windows dropped 1",
        "last logged step: 20: epoch 3, loss 1.25",
        "started from: a fresh drafter",
        "torch ",
    ):
        assert part in text, part
    assert "| steps | 20 of 40 |" in card
    assert "| captured data | 2 answers of the target, 42 tokens, 30 supervised |" in card
    assert "| wall time | 1 h 2 min 5 s |" in card
    assert "| processes | 8 |" in card


def test_the_record_holds_every_setting_and_no_folder_of_the_machine(config: RunConfig, tmp_path: Path) -> None:
    write_data(Path(config.data.root))
    write_run(config)
    text = (run.export_checkpoint(config) / "run.json").read_text()
    record = json.loads(text)
    assert str(tmp_path) not in text
    assert "/opt/bin" not in text
    assert record["run_id"] == "tiny-77"
    assert record["config"]["loss"] == to_plain(config)["loss"]
    training = record["source"]["training"]
    assert training["config"]["train"]["steps"] == 40
    assert training["later_attempts"][0]["time_utc"] == "later"
    assert training["cache"] == {**CACHE, "target": "…/Big"}


def test_the_runs_own_configuration_wins_over_that_of_the_export(config: RunConfig) -> None:
    write_run(config)
    config.loss.gamma = 99.0
    assert "position decay gamma 5.5" in (run.export_checkpoint(config) / "README.md").read_text()


def test_another_data_folder_than_the_trained_one_lends_no_counts(config: RunConfig) -> None:
    write_data(Path(config.data.root))
    other = CaptureManifest(content={**CACHE, "enable_thinking": False})
    atomic_write_json(Path(config.data.root) / "capture" / "manifest.json", other.to_dict())
    checkpoint = write_run(config)
    assert training_facts(config, checkpoint)["training"]["data"] is None


def test_an_untold_history_is_left_out_and_not_guessed(config: RunConfig) -> None:
    checkpoint = write_run(config)
    for path in Path(config.train.output_dir).glob("run*.json"):
        path.unlink()
    assert training_facts(config, checkpoint) == {"run_id": "tiny-77", "training": None}
    assert "| hardware | not recorded |" in (run.export_checkpoint(config) / "README.md").read_text()


def test_the_last_metrics_are_those_up_to_the_step_in_the_latest_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_metrics(path, 3) is None
    lines = [{"step": 1, "a": 1}, {"step": 3, "a": 2}, {"step": 4, "a": 3}, {"step": 3, "a": 4}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "cut')
    assert last_metrics(path, 3) == {"step": 3, "a": 4}
    assert last_metrics(path, 2) == {"step": 1, "a": 1}


def test_the_chain_of_warm_starts_reaches_back_over_exports_and_checkpoints(config: RunConfig, tmp_path: Path) -> None:
    assert warm_start_chain(None) == []
    checkpoint = write_run(config)
    first = run.export_checkpoint(config)
    (parent,) = warm_start_chain(str(first))
    assert (parent["name"], parent["kind"], parent["run_id"], parent["step"]) == ("export", "published", "tiny-77", 20)
    assert parent["files"] == {
        name: sha256_file(first / name) for name in ("config.json", "mask_embedding.pt", "model.safetensors")
    }
    record = Path(config.train.output_dir) / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "warm_start": [parent]}))
    for source in (checkpoint, checkpoint.parent):  # a checkpoint, or the run folder with its newest one
        child, grandparent = warm_start_chain(str(source))
        assert (child["name"], child["kind"], child["step"]) == ("train/step000020", "checkpoint", 20)
        assert grandparent == parent


def test_a_warm_start_from_another_tools_drafter_ends_the_chain(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (entry,) = warm_start_chain(str(tmp_path))
    assert entry["run_id"] is None
    assert set(entry["files"]) == {"config.json"}
