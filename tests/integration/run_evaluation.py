"""Runs the evaluation on a configuration in a JSON file, as one rank; the tests start it as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from dflash2_train.app import run_guarded
from dflash2_train.evaluate.cli import evaluate

if __name__ == "__main__":
    sys.exit(run_guarded(evaluate, OmegaConf.create(Path(sys.argv[1]).read_text())))
