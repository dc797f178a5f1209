"""One experiment in tiny form from its plan to an examined export; a process of its own, started by the tests.

``python -m tests.integration.run_tiny_experiment EXPERIMENT FOLDER [OVERRIDE ...]`` composes the experiment with
``+scale=tiny`` through Hydra, makes its target with the command that the config names, and calls what the console
scripts call: plan, gen-data, train (which exports) and doctor. The first exit code that is not 0 is its own.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_dir

from dflash2_train.app import guarded, register_schema
from dflash2_train.config import RunConfig, load_config

CONF = Path(__file__).resolve().parents[2] / "conf"


def compose_tiny(experiment: str, folder: Path, *overrides: str) -> RunConfig:
    """The experiment under ``folder``, its target there too."""
    places = (f"run_dir={folder}/run", f"target.name={folder}/target")
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_config(compose("config", [f"+experiment={experiment}", "+scale=tiny", *places, *overrides]))


def make_target(config: RunConfig) -> int:
    """What ``target.setup`` tells the user to run."""
    from data_gen import tiny_target

    _python, _m, module, *arguments = shlex.split(config.target.setup)
    assert module == tiny_target.__name__
    sys.argv = [module, *arguments]
    return tiny_target.main()


def stages(config: RunConfig, folder: Path) -> list[Callable[[], int]]:
    """Everything that is run, in order."""
    from data_gen.cli import gen_data
    from dflash2_train.export.doctor_command import main as doctor
    from dflash2_train.planning.command import plan_training
    from dflash2_train.train import train

    examined = [str(folder / "run" / "export"), "--target", config.target.name, "--strict"]
    return [
        lambda: plan_training(config),
        lambda: make_target(config),
        lambda: gen_data(config),
        lambda: train(config),
        lambda: doctor(examined),
    ]


def main() -> int:
    """Run all stages; the first that fails ends it."""
    experiment, folder, *overrides = sys.argv[1:]
    config = compose_tiny(experiment, Path(folder), *overrides)
    for stage in stages(config, Path(folder)):
        code = guarded(stage)
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
