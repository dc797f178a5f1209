"""The doctor on GGUFs: a clean one has no finding, and each planted fault is found by its check and by no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash2_train.app import EXIT_FAULT
from dflash2_train.export.commands import dispatch
from dflash2_train.export.doctor.gguf_checks import examine_gguf
from dflash2_train.export.doctor.gguf_file import GGUF_CHECKS
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.gguf_export import export_gguf
from dflash2_train.target import open_target_config
from tests.cases import make_target_info
from tests.contract.drafter_families import export_family, tiny_family
from tests.contract.gguf_faults import GGUF_FAULTS, SWA, GgufFault, found_in_gguf
from tests.contract.tiny_gguf import gguf_parts, write_gguf
from tests.families import EXPERIMENTS, VOCAB
from tests.gguf_cases import gguf_config, save_drafter, save_target

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: export_family(name, tmp_path_factory.mktemp(name)) for name in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_clean_gguf_of_every_experiment_has_no_finding(
    experiment: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    parts = gguf_parts(folders[experiment])
    assert len(parts.tensors) == 6 + 15 * parts.keys["block_count"]
    target = TargetFacts.of(make_target_info(tiny_family(experiment, tmp_path)))
    assert examine_gguf(write_gguf(tmp_path / "drafter.gguf", parts), target=target).findings == []


def test_the_five_layer_drafter_has_81_tensors(folders: dict[str, Path]) -> None:
    assert len(gguf_parts(folders[SWA]).tensors) == 81


def test_the_files_of_our_own_exporter_are_clean_in_every_kind_of_type(tmp_path: Path) -> None:
    config = gguf_config(tmp_path)
    save_target(config)
    save_drafter(config, tmp_path / "drafter")
    config.export.gguf.source = str(tmp_path / "drafter")
    config.export.gguf.types = ["F32", "BF16", "F16", "Q8_0", "Q4_1"]
    files = sorted(export_gguf(config).glob("*.gguf"))
    target = TargetFacts.of(open_target_config(config.target))
    assert [examine_gguf(path, target=target).findings for path in files] == [[]] * 5


@pytest.mark.parametrize("fault", GGUF_FAULTS, ids=lambda fault: f"{fault.check}: {fault.what}")
def test_a_planted_fault_is_found_by_its_check_and_by_no_other(
    fault: GgufFault, folders: dict[str, Path], tmp_path: Path
) -> None:
    findings = found_in_gguf(folders[SWA], tmp_path / "drafter.gguf", fault)
    assert {finding.check for finding in findings} == {fault.check}, "\n".join(map(str, findings))


def test_another_target_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "drafter.gguf", gguf_parts(folders[SWA]))
    config = tiny_family(SWA, tmp_path)
    config.target.num_layers, config.target.vocab_size = 40, 2 * VOCAB
    findings = examine_gguf(path, target=TargetFacts.of(make_target_info(config))).findings
    assert [finding.check for finding in findings] == ["gguf-target"] * 2


def test_every_check_has_a_planted_fault() -> None:
    assert GGUF_CHECKS.checks.keys() | {"gguf-file"} == {fault.check for fault in GGUF_FAULTS} | {"gguf-target"}


def test_the_command_takes_a_gguf_and_shows_llama_cpps_view(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "my drafter.gguf", gguf_parts(folders[SWA]))
    assert dispatch(["doctor", str(path), "--serve", "llama.cpp", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)["serve"]
    assert view["server"] == "llama.cpp"
    assert f"--spec-draft-model '{path}' --spec-draft-n-max 7" in view["command"]
    assert any("no embedding of its own" in pitfall for pitfall in view["pitfalls"])


def test_a_server_that_reads_no_gguf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "drafter.gguf").write_bytes(b"")
    assert dispatch(["doctor", str(tmp_path / "drafter.gguf"), "--serve", "vllm"]) == EXIT_FAULT
    assert "reads no GGUF" in capsys.readouterr().err
