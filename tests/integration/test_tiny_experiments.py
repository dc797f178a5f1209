"""Every experiment, scaled down by one override group, from its plan to a folder that the doctor finds clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from dflash2_train.planning.command import PLAN_FILE
from dflash2_train.tracker import read_metrics
from tests.integration.forked import finish, fork_ranks_of
from tests.integration.run_tiny_experiment import compose_tiny

WINDOW = "drafter.sliding_window=48"  # smaller than the documents, so that the window bites
CASES = [
    pytest.param("qwen3_8b", [], id="qwen3_8b"),
    pytest.param("glm53_flash", [], marks=pytest.mark.slow, id="glm53_flash"),
    pytest.param("glm53_flash_swa", [WINDOW], marks=pytest.mark.slow, id="glm53_flash_swa"),
    pytest.param("glm53", [WINDOW], marks=pytest.mark.slow, id="glm53"),
    pytest.param("smollm2_cpu", [], marks=pytest.mark.slow, id="smollm2_cpu"),
]


@pytest.mark.parametrize(("experiment", "overrides"), CASES)
def test_a_tiny_experiment_runs_from_its_plan_to_a_folder_without_findings(
    experiment: str, overrides: list[str], tmp_path: Path
) -> None:
    config = compose_tiny(experiment, tmp_path, *overrides)
    words = [experiment, str(tmp_path), *overrides]
    finish(fork_ranks_of("tests.integration.run_tiny_experiment", words, 1), timeout=900)
    assert json.loads((tmp_path / "run" / PLAN_FILE).read_text())["fits"] is True
    target = json.loads((tmp_path / "target" / "config.json").read_text())
    assert target["model_type"] == config.target.architecture
    index = (tmp_path / "run" / "data" / "capture" / "index.jsonl").read_text().splitlines()
    assert sum(len(json.loads(line)["sample_ids"]) for line in index) > 4
    rows = read_metrics(tmp_path / "run" / "train" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, config.train.steps + 1))
    assert rows[-1]["dropped"] == 0
    assert any("validation/acceptance_length" in row for row in rows)
    exported = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert exported["dflash_config"]["target_layer_ids"] == config.drafter.target_layer_ids
    assert exported["layer_types"] == config.drafter.resolved_layer_types()
    with safe_open(tmp_path / "run" / "export" / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 6 + 15 * config.drafter.num_layers
