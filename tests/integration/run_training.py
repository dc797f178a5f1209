"""Runs the trainer on a configuration in a JSON file, as one rank; the tests start it as a process of its own.

``--full-disk`` behind the file tells it of a disk with one free byte.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from dflash2_train.app import run_guarded
from dflash2_train.train import train

if __name__ == "__main__":
    path, *words = sys.argv[1:]
    if words == ["--full-disk"]:
        shutil.disk_usage = lambda _: SimpleNamespace(free=1)  # type: ignore[assignment, return-value]
    sys.exit(run_guarded(train, OmegaConf.create(Path(path).read_text())))
