"""Prompts in, a measured drafter out: the installed commands, real vLLM, real DeepSpeed, the real 135M target."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.forked import finish, fork_ranks_of

SCRIPTS = Path(sys.executable).parent
TARGET = Path(__file__).resolve().parents[2] / "targets" / "SmolLM2-135M-Instruct"
MODULES = {
    "dflash2-gen-data": "data_gen.cli",
    "dflash2-train": "dflash2_train.train",
    "dflash2-export": "dflash2_train.export.cli",
}


def words_of(run: Path, *more: str) -> list[str]:
    return ["+experiment=smollm2_cpu", "+scale=smoke", f"run_dir={run}", *more]


def call(name: str, run: Path) -> None:
    """The installed command, which must end well."""
    command = [str(SCRIPTS / name), *words_of(run)]
    done = subprocess.run(command, cwd=TARGET.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def call_module(name: str, run: Path, *words: str, expect: int = 0) -> str:
    """The same as its module, where the libraries need not be loaded anew; what it printed."""
    return finish(fork_ranks_of(MODULES[name], words_of(run, *words), 1), expect=expect)


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose data stage was killed once after its first shard and then started again."""
    assert (TARGET / "config.json").is_file(), "make the target first: bash launch/target.sh"
    folder = tmp_path_factory.mktemp("pipeline")
    process = subprocess.Popen(
        [str(SCRIPTS / "dflash2-gen-data"), *words_of(folder)],
        cwd=TARGET.parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    conversations = folder / "data" / "conversations"
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None and not list(conversations.glob("shard-*.parquet")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    finished = stamps(conversations)
    assert any(name.endswith(".parquet") for name in finished), "the first run wrote no shard before it was killed"
    call("dflash2-gen-data", folder)
    kept = stamps(conversations)
    assert all(kept[name] == stamp for name, stamp in finished.items() if name.endswith(".parquet"))
    return folder


def test_data_killed_midway_is_complete_after_the_same_command(run: Path) -> None:
    index = [json.loads(line) for line in (run / "data" / "capture" / "index.jsonl").read_text().splitlines()]
    ids = [sample_id for row in index for sample_id in row["sample_ids"]]
    assert len(ids) == len(set(ids)) == 48
    assert len((run / "data" / "holdout.jsonl").read_text().splitlines()) == 4


def test_a_trained_drafter_is_exported_and_decodes_losslessly(run: Path) -> None:
    call("dflash2-train", run)
    export = run / "export"
    assert {"config.json", "model.safetensors", "mask_embedding.pt", "PROVENANCE.txt", "run.json", "README.md"} <= {
        path.name for path in export.iterdir()
    }
    call("dflash2-eval", run)
    report = json.loads((run / "eval" / "report.json").read_text())
    assert (run / "eval" / "report.md").exists()
    assert (run / "eval" / "acceptance.png").stat().st_size > 10_000
    text = json.dumps(report)
    assert '"equal": false' not in text
    call("dflash2-export", run)  # the measurement goes into the card
    assert "| served by vLLM | not measured |" in (export / "README.md").read_text()
    assert len(list(export.glob("evaluation-*.json"))) == 1
    before = stamps(run)
    for name in MODULES:
        call_module(name, run)
    unchanged = {path: stamp for path, stamp in stamps(run).items() if path in before and "/data/" in path}
    assert all(before[path] == stamp for path, stamp in unchanged.items() if "shard-" in path)
    assert stamps(run / "export") == {path: stamp for path, stamp in before.items() if "/export/" in path}


def test_training_without_data_says_which_command_is_missing(tmp_path: Path) -> None:
    output = call_module("dflash2-train", tmp_path, expect=2)
    assert "error:" in output
    assert "dflash2-gen-data" in output


def test_a_target_folder_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    output = call_module("dflash2-gen-data", tmp_path, "target.name=targets/nowhere", expect=2)
    assert "nowhere" in output
    assert "data_gen.local_target" in output


def test_a_broken_line_in_a_prompt_file_is_named_by_file_and_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hello there"}]}\n{"messages": [\n')
    sources = f"data.train_prompts=[{{kind: jsonl, path: {prompts}}}]"
    output = call_module("dflash2-gen-data", tmp_path, sources, expect=2)
    assert "prompts.jsonl:2" in output.replace("\n", "")
