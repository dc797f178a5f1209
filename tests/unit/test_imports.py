"""Who may import whom, and what a command may not load before it has read its options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "deepspeed", "vllm", "matplotlib", "wandb", "pandas")
ENTRIES = (
    "data_gen.cli",
    "dflash2_train.train",
    "dflash2_train.export.cli",
    "dflash2_train.evaluate.cli",
    "dflash2_train.runs.cli",
    "dflash2_train.app",
)


def test_every_import_keeps_to_the_layers_and_the_doors(repo_root: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=repo_root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_of_the_packages_is_named_in_the_layers(repo_root: Path) -> None:
    """A module that no layer names would escape the dependency rule unseen."""
    import tomllib

    contracts = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {name for layer in layers for name in layer.split(" : ")}
    unplaced = []
    for path in [*repo_root.glob("dflash2_train/**/*.py"), *repo_root.glob("data_gen/**/*.py")]:
        module = ".".join(path.relative_to(repo_root).with_suffix("").parts).removesuffix(".__init__")
        if not any(module == name or module.startswith(name + ".") or name.startswith(module + ".") for name in named):
            unplaced.append(module)
    assert unplaced == [], "name these modules in pyproject.toml, [[tool.importlinter.contracts]] of type layers"


@pytest.mark.parametrize("module", ENTRIES)
def test_an_entry_module_loads_no_heavy_library_at_import(module: str, repo_root: Path) -> None:
    """`--help` and `--cfg job` must answer at once, also where the training libraries are not installed."""
    script = f"import json, sys, {module}; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", script], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
