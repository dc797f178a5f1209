"""The public trainers that a step is measured beside, and their environments, which are built from PyPI.

Each peer gets an environment of its own, with this environment's versions of torch and transformers, so that only the
trainers differ. Of its dependencies it gets those that its training step imports: a full installation would bring
inference engines, and CUDA builds that break a CPU torch.
"""

from __future__ import annotations

import subprocess
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

ENVIRONMENTS = Path.home() / ".cache" / "dflash2-train" / "bench"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A trainer from PyPI."""

    package: str  # with its version, as pip takes it
    trains: str  # what its step computes, in few words
    module: str  # of this folder, run by the peer's interpreter
    alone: tuple[str, ...] = ()  # installed beside the package, both without their dependencies
    needs: tuple[str, ...] = ()  # what they import beside torch and transformers, resolved by pip

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.package.replace('==', ' ')} ({self.trains})"

    def requirements(self) -> tuple[str, ...]:
        """For pip's resolver: our torch and transformers, and what the package imports."""
        same = (f"torch=={version('torch').split('+')[0]}", f"transformers=={version('transformers')}")
        return (*same, *self.needs)

    def interpreter(self, environments: Path) -> Path:
        """The peer's Python, in an environment that is made when it is not there or is another one.

        Raises:
            SystemExit: the folder holds something else.
        """
        folder = environments.resolve() / self.package.replace("==", "-")
        python, marker = folder / "bin" / "python", folder / "complete"
        without_dependencies = (self.package, *self.alone)
        wanted = "\n".join((*self.requirements(), *without_dependencies))
        if marker.is_file() and marker.read_text() == wanted:
            return python
        if folder.exists() and not (folder / "pyvenv.cfg").is_file():
            raise SystemExit(f"{folder}: exists and is no environment; move it, or name another --peer-envs.")
        Console(stderr=True).print(f"building {self.package} in {folder}; some minutes, once")
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self.requirements()], check=True)
        subprocess.run([*pip, "--no-deps", *without_dependencies], check=True)
        marker.write_text(wanted)  # last: an interrupted build starts again
        return python


PEERS = (
    Peer(
        package="speculators==0.9.0",
        trains="DFlash 2, full KL",
        module="step_speculators",
        alone=("hs-connectors==0.9.0",),
        needs=(
            "triton",
            "datasets>=4.0,<=5.1.0",
            "loguru>=0.7.2,<=0.7.3",
            "pydantic>=2",
            "pydantic-settings>=2",
            "openai>=2",
            "aiohttp",
            "click",
            "httpx",
            "protobuf",
            "psutil",
            "rich",
            "typer>=0.12",
        ),
    ),
    # The fastest DFlash 1 found that runs on a CPU. Slower: nvidia-modelopt 0.47.0 (with transformers below 5.15 only),
    # speculators 0.9.0's own with cross-entropy, nemo-automodel 0.7.0. angelslim 0.5.0 loads its target onto CUDA.
    # SpecForge pins torch 2.11.0 and transformers 5.8.1; its step runs unchanged with the versions here.
    Peer(package="specforge==0.2.0", trains="DFlash 1, CE alone", module="step_specforge"),
)
