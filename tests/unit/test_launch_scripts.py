"""The scripts in launch/: clean by shellcheck, and dry runs whose every command is whole and would compose."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash2_train.app import register_schema
from dflash2_train.config import RunConfig, load_config
from dflash2_train.export.hf import export_hf
from dflash2_train.export.serving import serving_commands
from tests.cases import RECORD, make_drafter, make_target_info, tiny_run_config

CONSOLE = ("dflash2-gen-data", "dflash2-train", "dflash2-export", "dflash2-eval")


@pytest.fixture(scope="module")
def tree(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose .venv has this interpreter, and no command that could do anything."""
    root = tmp_path_factory.mktemp("tree")
    (root / "launch").symlink_to(repo_root / "launch")
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    train = root / ".venv" / "bin" / "dflash2-train"
    train.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dflash2_train.train "$@"\n')
    for path in (python, train):
        path.chmod(0o755)
    return root


def dry(tree: Path, script: str, *words: str, expect: int = 0) -> str:
    done = subprocess.run(
        ["bash", f"{tree}/launch/{script}", *words],
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[2])),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + (done.stderr if expect else "")


def console_lines(text: str) -> list[list[str]]:
    """The words of every line that calls one of the console commands with an experiment."""
    found = []
    for line in text.splitlines():
        words = [] if line.startswith("#") else shlex.split(line.partition("> runs/")[0])
        if "env" in words[:1]:
            words = words[2:]
        if words and Path(words[0]).name in CONSOLE and any("+experiment=" in word for word in words):
            found.append([Path(words[0]).name, *words[1:]])
    return found


def composed(words: list[str], repo_root: Path) -> RunConfig:
    register_schema()
    with initialize_config_dir(str(repo_root / "conf"), version_base="1.3"):
        return load_config(compose("config", words))


def test_every_script_is_clean_by_shellcheck(repo_root: Path) -> None:
    scripts = sorted(str(path) for path in (repo_root / "launch").glob("*.sh"))
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_whole_node_is_dry_run_with_commands_that_all_compose(tree: Path, repo_root: Path) -> None:
    printed = dry(tree, "b300_8.sh", "--dry-run", "train.steps=100")
    lines = console_lines(printed)
    assert [line[0] for line in lines] == [
        "dflash2-gen-data",
        "dflash2-gen-data",
        "dflash2-train",
        "dflash2-export",
        "dflash2-eval",
        "dflash2-eval",
    ]
    configs = [composed(line[1:], repo_root) for line in lines]
    assert {config.train.steps for config in configs} == {100}
    assert [config.stage for config in configs[:2]] == ["regenerate", "stream"]
    assert {config.data.mode for config in configs} == {"stream"}
    assert configs[2].train.rows * configs[2].train.accumulation * 4 == 8, "four GPUs take eight sequences a step"
    assert len(configs[0].data.servers.urls) == printed.count("--tensor-parallel-size 4")
    assert {config.eval.server.resolved_label for config in configs[4:]} == {"drafter", "plain"}
    assert len({config.run_dir for config in configs}) == 1
    assert re.search(r"vllm serve zai-org/GLM-5\.3-Flash --speculative-config .*num_speculative_tokens.*7", printed)
    assert "dflash2-export doctor runs/glm53_flash/export" in printed
    compared = [line for line in printed.splitlines() if "vllm serve" in line and "--tensor-parallel-size 8" in line]
    assert ["--no-enable-prefix-caching" in line for line in compared] == [True, True], "the baseline is served alike"
    assert not (tree / "runs").exists()


def test_the_name_of_a_run_moves_every_path(tree: Path) -> None:
    printed = dry(tree, "b300_8.sh", "--dry-run", "name=second")
    assert "runs/second/export" in printed
    assert "runs/glm53_flash" not in printed


def test_several_nodes_are_dry_run_with_the_jobs_script(tree: Path, repo_root: Path) -> None:
    words = ["--nodes", "4", "--time", "02:00:00", "--dry-run", "+experiment=glm53_flash"]
    printed = dry(tree, "sbatch_train.sh", *words)
    command, *script = printed.splitlines()
    (line,) = console_lines(command)
    config = composed(line[1:], repo_root)
    assert (config.launch.kind, config.launch.slurm.nodes, config.launch.slurm.time) == ("slurm", 4, "02:00:00")
    assert {"#SBATCH --nodes=4", "#SBATCH --time=02:00:00", "#SBATCH --signal=TERM@120"} <= set(script)


def test_a_target_is_served_on_its_devices_under_its_name(tree: Path) -> None:
    words = ["me/target", "--tp", "4", "--port", "8001", "--devices", "4,5", "--dry-run", "--", "--max-model-len", "9"]
    printed = shlex.split(dry(tree, "serve_target.sh", *words))
    assert printed == [
        *["env", "CUDA_VISIBLE_DEVICES=4,5", ".venv/bin/vllm", "serve", "me/target"],
        *["--served-model-name", "me/target", "--tensor-parallel-size", "4", "--port", "8001", "--max-model-len", "9"],
    ]


@pytest.mark.parametrize(
    ("server", "name", "flags"),
    [
        ("vllm", "vLLM", ["--tensor-parallel-size", "2"]),
        ("sglang", "SGLang", ["--tp-size", "2"]),
        ("llama.cpp", "llama.cpp", []),
    ],
)
def test_a_drafter_is_served_with_the_flags_that_its_card_shows(
    tree: Path, server: str, name: str, flags: list[str]
) -> None:
    words = [server, "out/drafter", "me/target", "--tp", "2", "--block-size", "8", "--dry-run"]
    doctor, line = dry(tree, "serve_drafter.sh", *words).splitlines()
    assert shlex.split(doctor)[1:] == ["doctor", "out/drafter", "--serve", server]
    shown = shlex.split(serving_commands("me/target", "out/drafter", 8)[name])
    wanted = [
        "me/target" if word == "target.gguf" else "out/drafter" if word == "drafter.gguf" else word for word in shown
    ]
    assert shlex.split(line)[1:] == [*wanted[1:], *flags, "--port", "8000"]


def test_a_drafter_that_is_there_is_served_as_the_doctor_reads_it(tree: Path, tmp_path: Path) -> None:
    config = tiny_run_config(tmp_path)
    config.drafter.selector_top_k = 4
    folder = export_hf(make_drafter(config), config, make_target_info(config), tmp_path / "out", run_record=RECORD)
    line = dry(tree, "serve_drafter.sh", "vllm", str(folder), "me/target", "--dry-run").splitlines()[-1]
    words = shlex.split(line)
    assert words[1:3] == ["serve", "me/target"]
    assert '"num_speculative_tokens": 3' in words[4]


@pytest.mark.parametrize("script", ["serve_target.sh", "serve_drafter.sh", "b300_8.sh", "sbatch_train.sh"])
def test_an_option_that_a_script_does_not_know_is_refused(tree: Path, script: str) -> None:
    assert "unknown option --nope" in dry(tree, script, "--nope", expect=2)


def test_the_container_file_copies_what_is_there(repo_root: Path) -> None:
    text = (repo_root / "launch" / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert [name for name in copied if not (repo_root / name).exists()] == []
    assert all((repo_root / path).exists() for path in re.findall(r"-r (\S+)", text))
