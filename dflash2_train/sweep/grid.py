"""From ``--multirun`` and its words to the jobs of a sweep, each composed, typed and checked before the first starts.

The words are Hydra's: ``loss.gamma=3,6.5``, ``drafter.num_layers=range(1,4)``, ``loss.kl_kind=choice(…)``, or the same
in ``hydra.sweeper.params`` of a YAML file; the jobs are all combinations. Hydra's own sweeper would run them one after
another in this process, where the first fault or Ctrl-C ends all of them and memory of one job stays for the next.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash2_train.app import config_root, register_schema
from dflash2_train.config import ConfigError, RunConfig, UserError, absolute, load_config

PACKAGE = "pkg://"
# Each job gets a place of its own, so these cannot be what a sweep goes over.
PLACES = ("name", "run_dir", "stage", "train.output_dir", "export.output_dir", "eval.output_dir")
LONGEST_NAME = 120  # of a job's folder; file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """One combination of the swept values."""

    name: str  # of its folder; follows from the changes alone, so that a larger sweep finds what is done
    folder: Path
    changes: dict[str, str]  # swept key -> value, as they are written in an override
    words: tuple[str, ...]  # for dflash2-train
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All jobs of one sweep."""

    folder: Path
    jobs: tuple[SweepJob, ...]


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"dflash2-train --multirun: {message}. Give overrides, and --config-dir if need be.")


def open_sweep(words: Sequence[str]) -> Sweep:
    """The sweep that a command line describes.

    Args:
        words: those after the program's name.

    Raises:
        ConfigError: a word that is no override, a key that cannot be swept, or a job whose configuration is refused.
    """
    parser = _Words(prog="dflash2-train", add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(list(words))
    config_dir = None if options.config_dir is None else options.config_dir.expanduser().resolve()
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder. Name the one that holds your groups.")
    extra = [] if config_dir is None else ["--config-dir", str(config_dir)]
    with _hydra(config_dir) as searched:
        try:
            return _open(options.overrides, searched, extra)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"dflash2-train --multirun: {' '.join(str(error).split())}") from error


@contextmanager
def _hydra(config_dir: Path | None) -> Iterator[list[str]]:
    """Hydra ready to compose ``conf/``; yields the override that adds the user's own folder."""
    register_schema()
    root = config_root()
    if root.startswith(PACKAGE):
        opened = initialize_config_module(root.removeprefix(PACKAGE), version_base="1.3")
    else:
        opened = initialize_config_dir(root, version_base="1.3")
    with opened:
        yield [] if config_dir is None else [f"hydra.searchpath=[{quoted(f'file://{config_dir}')}]"]


def _open(words: Sequence[str], searched: list[str], extra: list[str]) -> Sweep:
    fixed, swept = _split(_parse(words))
    base = compose("config", [*searched, *fixed.values()], return_hydra_config=True)
    if OmegaConf.is_missing(base, "name"):
        raise ConfigError("a sweep goes over values of one experiment. Name one, as in +experiment=smollm2_cpu")
    listed = base.hydra.sweeper.get("params") or {}
    in_yaml = _split(_parse([f"{key}={value}" for key, value in listed.items()]))[1]
    swept = {key: one for key, one in in_yaml.items() if key not in fixed and key not in swept} | swept
    _check_swept(swept)
    folder = absolute(base.hydra.sweep.dir)
    root = [] if "data.root" in fixed or "data.root" in swept else [f"data.root={quoted(base.data.root)}"]
    names = list(swept)
    jobs = []
    for values in itertools.product(*(_values(one) for one in swept.values())):
        changes = dict(zip(names, values, strict=True))
        name = job_name(changes)
        overrides = [
            *fixed.values(),
            *(f"{swept[key].get_key_element()}={value}" for key, value in changes.items()),
            *root,
            f"run_dir={quoted(str(folder / name))}",
        ]
        config = _config_of(name, [*searched, *overrides], folder / name)
        words_of_job = (*extra, *overrides)
        jobs.append(SweepJob(name=name, folder=folder / name, changes=changes, words=words_of_job, config=config))
    _check_names([job.name for job in jobs])
    return Sweep(folder=folder, jobs=tuple(jobs))


def _parse(words: Sequence[str]) -> list[Override]:
    loader = GlobalHydra.instance().config_loader()
    overrides: list[Override] = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    return overrides


def _split(overrides: Sequence[Override]) -> tuple[dict[str, str], dict[str, Override]]:
    """Words that hold for every job, and those that name several values; both by key, of one key the last."""
    fixed: dict[str, str] = {}
    swept: dict[str, Override] = {}
    for override in overrides:
        key = override.key_or_group
        fixed.pop(key, None)
        swept.pop(key, None)
        if override.is_sweep_override():
            swept[key] = override
        else:
            fixed[key] = str(override.input_line)
    return fixed, swept


def _check_swept(swept: dict[str, Override]) -> None:
    if not swept:
        raise ConfigError(
            "dflash2-train --multirun: no key names several values, so there is nothing to sweep over. "
            "Give some, as in loss.gamma=3,6.5, or leave --multirun out."
        )
    for key, override in swept.items():
        if key in PLACES or override.is_hydra_override():
            raise ConfigError(
                f"{override.input_line}: a sweep cannot go over {key}, each job has a folder of its own. "
                "Leave it at one value."
            )
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: an interval has no end of values. List them, or use range(start,stop,step)."
            )


def _values(override: Override) -> list[str]:
    return [str(value) for value in override.sweep_string_iterator()]


def _config_of(name: str, overrides: list[str], folder: Path) -> RunConfig:
    """The checked configuration of one job.

    Raises:
        ConfigError: with the job's name before the rule that it breaks.
    """
    try:
        config = load_config(compose("config", overrides))
    except ConfigError as error:
        raise ConfigError(f"job {name}: {error}") from error
    for key, place in (("train.output_dir", config.train.output_dir), ("export.output_dir", config.export.output_dir)):
        if not absolute(place).is_relative_to(folder):
            raise ConfigError(
                f"job {name}: {key}={place!r} lies outside the job's folder {folder}, so that jobs would share it. "
                f"Leave it at ${{run_dir}}/…"
            )
    if config.data.mode != "cache":
        raise ConfigError(
            f"job {name}: data.mode={config.data.mode}: the states of a ring are used once, and the jobs of a sweep "
            "read the same ones. Use data.mode=cache."
        )
    if config.launch.kind == "slurm":
        raise ConfigError(
            f"job {name}: launch=slurm only hands a job over, and a sweep waits for each of its own. Start the sweep "
            "inside of a Slurm job with launch=local, or its jobs one by one."
        )
    return config


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"dflash2-train --multirun: job {twice[0]} stands there twice. Name each value once.")


def job_name(changes: dict[str, str]) -> str:
    """Name of a job's folder, as in ``drafter.num_layers-2+loss.gamma-3.0``: nothing that a shell or Hydra reads.

    The order of the keys on the command line does not count. Where characters had to be replaced, or the name was cut,
    a hash tells apart what would otherwise be equal.
    """
    plain = "+".join(f"{key}-{value}" for key, value in sorted(changes.items()))
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", plain)[:LONGEST_NAME]
    return safe if safe == plain else f"{safe}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def quoted(text: str) -> str:
    """A text as a quoted value of an override."""
    if "'" in text:
        raise UserError(f"{text}: a path with a quotation mark cannot be written into an override. Rename the folder.")
    return f"'{text}'"
