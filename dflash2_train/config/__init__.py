"""The typed configuration of an experiment: every key, its type, unit, default and rule.

One experiment drives all four commands, so there is one schema. YAML under ``conf/`` holds the
structural numbers of each experiment; universal knobs have their one default here. Hydra composes
(``dflash2_train.app``), this package types and checks: :func:`load_config` is the only place where an
OmegaConf object becomes the dataclasses that the rest of the code reads.

Enumerations are plain strings with a check, because OmegaConf's structured configs take no Literal.
"""

from dflash2_train.config.attest import AttestConfig
from dflash2_train.config.data import DataConfig
from dflash2_train.config.drafter import LAYER_TYPES, DrafterConfig
from dflash2_train.config.evaluate import EvalConfig
from dflash2_train.config.export import ExportConfig
from dflash2_train.config.export_gguf import GGUF_TYPES, GgufConfig
from dflash2_train.config.generation import GenerationConfig, ServersConfig
from dflash2_train.config.guard import GuardConfig
from dflash2_train.config.launch import HostsConfig, LaunchConfig, SlurmConfig
from dflash2_train.config.loss import IMPLEMENTATIONS, KL_KINDS, LossConfig
from dflash2_train.config.plan import HardwareConfig, PlanConfig
from dflash2_train.config.prompts import PromptSourceConfig
from dflash2_train.config.rules import DTYPES, ConfigError, UserError, absolute
from dflash2_train.config.run import RunConfig, load_config, to_plain
from dflash2_train.config.sampling import SamplingConfig
from dflash2_train.config.served import EvalServerConfig, EvalTaskConfig, GateConfig
from dflash2_train.config.store import StoreConfig
from dflash2_train.config.stream import StreamConfig
from dflash2_train.config.sweep import EvalSweepConfig
from dflash2_train.config.target import TargetConfig
from dflash2_train.config.train import ATTENTION_PATHS, TrainConfig
from dflash2_train.config.validation import ValidationConfig

__all__ = [
    "AttestConfig",
    "ATTENTION_PATHS",
    "ConfigError",
    "DTYPES",
    "DataConfig",
    "DrafterConfig",
    "EvalConfig",
    "EvalServerConfig",
    "EvalSweepConfig",
    "EvalTaskConfig",
    "ExportConfig",
    "GGUF_TYPES",
    "GateConfig",
    "GenerationConfig",
    "GgufConfig",
    "GuardConfig",
    "HardwareConfig",
    "HostsConfig",
    "IMPLEMENTATIONS",
    "KL_KINDS",
    "LAYER_TYPES",
    "LaunchConfig",
    "LossConfig",
    "PlanConfig",
    "PromptSourceConfig",
    "RunConfig",
    "SamplingConfig",
    "ServersConfig",
    "SlurmConfig",
    "StoreConfig",
    "StreamConfig",
    "TargetConfig",
    "TrainConfig",
    "UserError",
    "ValidationConfig",
    "absolute",
    "load_config",
    "to_plain",
]
