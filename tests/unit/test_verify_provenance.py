"""``verify-provenance`` notices every change to an exported drafter, and names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash2_train.config import UserError
from dflash2_train.export.commands import dispatch
from dflash2_train.export.hf import export_hf
from dflash2_train.export.payload import ALL_FILES
from dflash2_train.export.rewrite import rewrite_papers
from dflash2_train.export.verify import BAD, verify
from dflash2_train.provenance import hash_chat_template, hash_model_folder, hash_tokenizer_files, sha256_file
from tests.cases import RECORD, edit_json, make_drafter, make_target_info, tiny_run_config
from tests.reports import write_report


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with one evaluation."""
    root = tmp_path_factory.mktemp("verify")
    config = tiny_run_config(root)
    out = export_hf(make_drafter(config), config, make_target_info(config), root / "out", run_record=RECORD)
    rewrite_papers(out, [write_report(root / "report.json", out)])
    return out


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "out"))


def faults(folder: Path) -> set[str]:
    return {check.what for check in verify(folder) if check.verdict in BAD}


def evaluation(folder: Path) -> Path:
    (path,) = folder.glob("evaluation-*.json")
    return path


def test_an_untouched_export_holds_in_every_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["verify-provenance", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*ALL_FILES, evaluation(folder).name))
    assert "0 do not" in shown


def append(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (append("model.safetensors"), "model.safetensors"),
        (append("config.json"), "config.json"),
        (append("mask_embedding.pt"), "mask_embedding.pt"),
        (append("README.md"), "README.md"),
        (append("PROVENANCE.txt"), "PROVENANCE.txt"),
        (lambda folder: edit_json(folder / "run.json", run_id="another"), "run.json"),
        (lambda folder: edit_json(folder / "run.json", config__loss__gamma=99.0), "run.json"),
        (lambda folder: edit_json(folder / "run.json", evaluations=[]), "run.json"),
        (lambda folder: (folder / "mask_embedding.pt").unlink(), "mask_embedding.pt"),
        (lambda folder: evaluation(folder).unlink(), "as taken over"),
        (lambda folder: append(evaluation(folder).name)(folder), "as taken over"),
        (lambda folder: edit_json(evaluation(folder), greedy__counts__rounds=1), "numbers of"),
        (append("model.safetensors"), "numbers of"),  # it was measured with other weights
    ],
)
def test_each_change_is_found_and_named(
    folder: Path, change: Callable[[Path], object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert any(named in what for what in faults(folder))
    assert dispatch(["verify-provenance", str(folder)]) == 1
    assert "do not" in capsys.readouterr().out


def test_a_file_that_nothing_lists_is_shown_and_is_no_fault(folder: Path) -> None:
    (folder / "extra.bin").write_bytes(b"x")
    (check,) = [check for check in verify(folder) if check.what == "extra.bin"]
    assert check.verdict == "not listed"
    assert faults(folder) == set()


def test_json_gives_the_same_verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append("README.md")(folder)
    assert dispatch(["verify-provenance", str(folder), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["holds"] is False
    assert [check["what"] for check in value["checks"] if check["verdict"] == "DIFFERS"] == ["README.md"]


def test_the_target_is_hashed_on_demand(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "tokenizer.json").write_text("[]")
    (target / "chat_template.jinja").write_text("{{ x }}")
    verdicts = {check.what: check.verdict for check in verify(folder, target)}
    assert verdicts["target"] == "DIFFERS"  # the tiny export names another one
    assert verdicts["tokenizer of the target"] == "not listed"
    record = json.loads((folder / "run.json").read_text())
    record["target"]["hash"] = hash_model_folder(target)
    hashed = {"tokenizer_hash": hash_tokenizer_files(target), "chat_template_hash": hash_chat_template(target)}
    record["source"] = {"training": {"cache": hashed}}
    (folder / "run.json").write_text(json.dumps(record))
    verdicts = {check.what: check.verdict for check in verify(folder, target)}
    assert {verdicts[name] for name in verdicts if "target" in name} == {"same"}


@pytest.mark.parametrize("kind", ["no folder", "no record", "no json", "foreign"])
def test_what_is_no_export_is_told_apart_from_one_that_changed(folder: Path, kind: str) -> None:
    if kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "no record":
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_text("{" if kind == "no json" else '{"tool": "other"}')
    text = {"no folder": "no such folder", "no record": r"has no run\.json", "no json": "not readable"}
    with pytest.raises(UserError, match=text.get(kind, "is not a record")):
        verify(folder)
    assert dispatch(["verify-provenance", str(folder)]) == 2


def test_a_copy_holds_as_the_original_does(folder: Path, pristine: Path) -> None:
    assert {sha256_file(path) for path in folder.iterdir()} == {sha256_file(path) for path in pristine.iterdir()}
    assert faults(folder) == set()
