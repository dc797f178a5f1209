"""One experiment: all parts together, typed and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash2_train.config.data import DataConfig
from dflash2_train.config.drafter import DrafterConfig
from dflash2_train.config.evaluate import EvalConfig
from dflash2_train.config.export import ExportConfig
from dflash2_train.config.launch import LaunchConfig
from dflash2_train.config.loss import LossConfig
from dflash2_train.config.plan import PlanConfig
from dflash2_train.config.rules import ConfigError, require
from dflash2_train.config.target import TargetConfig
from dflash2_train.config.train import TrainConfig

STAGES = ("all", "plan", "regenerate", "capture", "stream", "verify", "inspect")


@dataclass(kw_only=True)
class RunConfig:
    """Everything that one experiment fixes."""

    name: str = MISSING  # experiment name, names the run folder
    run_dir: str = "runs/${name}"  # folder of everything that the commands write, as far as the groups place it
    stage: str = "all"  # dflash2-gen-data only
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)  # dflash2-gen-data stage=plan only
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def check(self) -> None:
        """Raise :class:`ConfigError` for the first rule that the values break."""
        require(self.stage in STAGES, "stage", self.stage, f"must be one of {STAGES}", "Pick one.")
        self.target.check()
        self.drafter.check(self.target)
        self.data.check()
        self.loss.check()
        self.train.check(self.drafter, self.target)
        self.train.validation.check(self.train.validate_every)
        self.train.guard.check()
        self.export.check(self.drafter, self.train)
        self.eval.check(self.drafter)
        self.plan.check()
        self.launch.check()


def load_config(composed: DictConfig) -> RunConfig:
    """Type, complete and check a composed configuration.

    Args:
        composed: what Hydra composed, interpolations unresolved. Keys outside the schema are refused
            here, those added with ``+`` included.

    Raises:
        ConfigError: an unknown key, a wrong type, a missing value or a broken rule; one line.
    """
    # Through plain containers: a composed node remembers keys added with "+" and would wave them through.
    plain = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        missing = [] if OmegaConf.is_missing(merged, "name") else sorted(OmegaConf.missing_keys(merged))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        key = error.full_key or error.key
        raise ConfigError(f"config key {key}: {first}. See dflash2-train --cfg job for the keys there are.") from error
    if OmegaConf.is_missing(merged, "name"):
        raise ConfigError("no experiment is named. Add one, as in: dflash2-train +experiment=smollm2_cpu")
    if missing:
        raise ConfigError(
            f"config keys without a value: {', '.join(missing)}. Set them on the command line or in YAML."
        )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    config.check()
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists, for run records."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
