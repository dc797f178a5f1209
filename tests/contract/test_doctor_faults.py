"""The doctor finds every planted fault under its own name, and in clean exports of every experiment nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2_train.export.doctor.examine import examine
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS
from dflash2_train.export.doctor.target_facts import TargetFacts
from tests.cases import make_target_info
from tests.contract.drafter_families import export_family, tiny_family
from tests.contract.fault_table import FAULTS, found_in
from tests.contract.faults import Fault, shard
from tests.families import EXPERIMENTS

OUTSIDE_THE_REGISTRY = {"config-json", "proposals"}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export of each experiment for the whole module; tests edit copies."""
    return {name: export_family(name, tmp_path_factory.mktemp(name)) for name in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_clean_export_of_every_experiment_has_no_finding(
    experiment: str, clean: dict[str, Path], tmp_path: Path
) -> None:
    config = tiny_family(experiment, tmp_path)
    examination = examine(clean[experiment], target=TargetFacts.of(make_target_info(config)))
    assert examination.findings == []
    assert examination.subject is not None
    assert examination.subject.num_proposals == config.export.resolved_num_proposals(config.drafter)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.what}")
def test_a_planted_fault_is_found_by_its_check_and_by_no_other(
    fault: Fault, clean: dict[str, Path], tmp_path: Path
) -> None:
    findings, _ = found_in(clean[fault.family], tmp_path, fault)
    assert {finding.check for finding in findings} == {fault.check, *fault.also}, "\n".join(map(str, findings))


def test_every_check_has_a_planted_fault() -> None:
    planted = {name for fault in FAULTS for name in (fault.check, *fault.also)}
    assert DRAFTER_CHECKS.checks.keys() | OUTSIDE_THE_REGISTRY == planted


def test_shards_with_their_index_are_as_clean_as_one_file(clean: dict[str, Path], tmp_path: Path) -> None:
    def plant(folder: Path) -> None:
        shard(folder)

    fault = Fault(what="shards", check="none", plant=plant)
    findings, folder = found_in(clean["glm53"], tmp_path, fault)
    assert (folder / "model.safetensors.index.json").exists()
    assert findings == []
