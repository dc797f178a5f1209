"""Runs a data stage on a configuration in a JSON file; the tests start it as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from data_gen.cli import gen_data
from dflash2_train.app import run_guarded

if __name__ == "__main__":
    sys.exit(run_guarded(gen_data, OmegaConf.create(Path(sys.argv[1]).read_text())))
