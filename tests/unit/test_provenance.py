"""Files appear whole or not at all, and a run record tells what is needed and nothing private."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash2_train import provenance


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    provenance.atomic_write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        provenance.atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_publish_makes_a_folder_visible_under_its_final_name_only(tmp_path: Path) -> None:
    temporary, final = tmp_path / ".tmp", tmp_path / "final"
    temporary.mkdir()
    (temporary / "a").write_text("1")
    provenance.publish(temporary, final)
    assert not temporary.exists()
    assert (final / "a").read_text() == "1"


def test_equal_json_values_have_equal_hashes_whatever_their_key_order() -> None:
    assert provenance.sha256_json({"a": 1, "b": [2]}) == provenance.sha256_json({"b": [2], "a": 1})
    assert provenance.sha256_json({"a": 1}) != provenance.sha256_json({"a": 2})


def test_a_run_record_names_the_command_without_folders_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    record = provenance.run_record({"x": 1}, ["/home/somebody/bin/dflash2-train", "+experiment=tiny"])
    assert record["command"] == ["dflash2-train", "+experiment=tiny"]
    text = json.dumps(record)
    assert "hf_secret" not in text
    assert "somebody" not in text
    assert record["packages"]["torch"]


KEPT = ("name", "terms", "rate", "lr", "nothing", "prose", "api_key_env", "mask_token_id")


def test_a_public_value_keeps_what_matters_and_drops_folders_and_hosts() -> None:
    value = {
        "run_dir": "/home/somebody/runs/tiny",
        "command": ["dflash2-train", "data.root=~/big/data", "urls=[http://10.0.0.5:8000/v1]"],
        "servers": {"urls": ["http://node7.corp:8000/v1"]},
        "name": "targets/SmolLM2-135M-Instruct",
        "terms": "see https://huggingface.co/datasets/x/y",
        "rate": "3 tokens/s, 1/2",
        "lr": 1e-3,
        "nothing": None,
        "prose": "no secret of it leaves",
        "api_key_env": "MY_KEY",
        "mask_token_id": 5,
        "api_key": "abcdef",
        "flags": ["serve", "--api-key=abcdef", "--hf-token abcdef", "{'api_key': 'abcdef', 'n': 1}"],
    }
    public = provenance.public_value(value)
    assert public["run_dir"] == "…/tiny"
    assert public["command"] == ["dflash2-train", "data.root=…/data", "urls=[http://…/v1]"]
    assert public["servers"] == {"urls": ["http://…/v1"]}
    assert {key: public[key] for key in KEPT} == {key: value[key] for key in KEPT}
    assert public["flags"] == ["serve", "--api-key=…", "--hf-token …", "{'api_key': '…', 'n': 1}"]
    assert "abcdef" not in json.dumps(public)
    assert provenance.public_value(public) == public


def test_gpus_are_named_by_the_drivers_own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "NVIDIA_DEVICES", tmp_path)
    assert provenance.machine()["gpus"] == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text("Model: \t\t NVIDIA B300\nGPU UUID: \t GPU-1234\n")
    assert provenance.machine()["gpus"] == ["NVIDIA B300", "NVIDIA B300"]
