"""A sweep with the real trainer: each job is trained and exported, and one that the cache does not fit is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dflash2_train.config import to_plain
from dflash2_train.runs.sweep import read_sweep
from tests.cases import tiny_run_config
from tests.tiny_target import save_tiny_llama, write_cache

ROOT = Path(__file__).resolve().parents[2]


def write_experiment(root: Path) -> Path:
    """A tiny target with captures, and the folder of an experiment over them."""
    config = tiny_run_config(root / "run")
    config.target.name, config.target.dtype = str(root / "target"), "float32"
    config.data.root, config.data.teacher_top_k = str(root / "data"), 8
    config.data.attest.min_agreement = 0.05
    config.train.dtype, config.train.steps, config.train.lr = "float32", 2, 3e-3
    write_cache(save_tiny_llama(root / "target", config), config, samples=12, length=24)
    plain = to_plain(config)
    for part, name in (("train", "train"), ("export", "export"), ("eval", "eval")):
        plain[part]["output_dir"] = f"${{run_dir}}/{name}"
    folder = root / "mine"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "tiny.yaml").write_text(f"# @package _global_\n{json.dumps(plain)}\n")
    return folder


def test_a_sweep_trains_and_exports_each_job_over_one_cache_and_reports_the_one_that_is_refused(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path)
    words = ["--multirun", "--config-dir", str(folder), "+experiment=tiny", "drafter.target_layer_ids=[0,2,4],[0,2,3]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dflash2_train.train", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    result = read_sweep(tmp_path / "run")
    trained, refused = result.rows
    assert (trained.state, trained.changes) == ("done", {"drafter.target_layer_ids": "[0,2,4]"})
    assert trained.figures["step"] == 2
    assert (result.folder / trained.name / "export" / "model.safetensors").exists()
    assert refused.state == "failed"
    assert "was captured from" in refused.cause
    record = json.loads((result.folder / trained.name / "train" / "run.json").read_text())
    assert record["command"][:2] == ["dflash2-train", "--config-dir"]
    assert record["config"]["data"]["root"] == str(tmp_path / "data")
    assert not (tmp_path / "run" / "train").exists(), "nothing is written beside the jobs"
