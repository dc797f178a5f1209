"""Where a command runs: on this machine, as a Slurm job, or on the hosts of a list."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dflash2_train.config.rules import require

KINDS = ("local", "slurm", "hostfile")
_TIME = re.compile(r"(\d+-)?\d+(:\d{2}){0,2}")  # as sbatch takes it: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S


@dataclass(kw_only=True)
class SlurmConfig:
    """``launch=slurm``: what stands in the job's script."""

    nodes: int = 1  # machines of the job
    gpus_per_node: int = 8  # also the ranks a node, unless launch.ranks says otherwise; 0 = a cluster without
    cpus_per_task: int | None = None  # a node is one task; None = the cluster's rule
    time: str = "04:00:00"  # limit of one start; a run longer than this continues in the next
    partition: str | None = None  # None = the cluster's default, as the next two
    account: str | None = None  # who is billed
    qos: str | None = None  # quality of service
    signal_s: int = 120  # SIGTERM so long before the limit: time to finish the step and save
    requeue: bool = True  # a run that was stopped in good order is queued again
    lost_requeues: int = 3  # so often as well when ranks lost one another or stood still
    options: list[str] = field(default_factory=list)  # further #SBATCH options, as --mem=0
    setup: list[str] = field(default_factory=list)  # shell lines before the start, as `module load cuda`

    def check(self) -> None:
        for key, least in (("nodes", 1), ("gpus_per_node", 0), ("signal_s", 1), ("lost_requeues", 0)):
            value = getattr(self, key)
            require(
                value >= least, f"launch.slurm.{key}", value, f"must be at least {least}", "Count what the cluster has."
            )
        require(
            self.cpus_per_task is None or self.cpus_per_task > 0,
            "launch.slurm.cpus_per_task",
            self.cpus_per_task,
            "must be positive",
            "Use null for the cluster's rule.",
        )
        require(
            _TIME.fullmatch(self.time) is not None,
            "launch.slurm.time",
            self.time,
            "is a limit as sbatch takes it: minutes, hours:minutes:seconds or days-hours:minutes:seconds",
            "Quote it in YAML and on the command line, as in launch.slurm.time='04:00:00'.",
        )
        for option in self.options:
            require(
                option.startswith("--") and "\n" not in option,
                "launch.slurm.options",
                option,
                "is one sbatch option",
                "Write it as --mem=0.",
            )


@dataclass(kw_only=True)
class HostsConfig:
    """``launch=hostfile``: one start over ssh on every host of a list."""

    file: str | None = None  # lines `host slots=N`; the first host runs rank 0 and is where the others meet
    ssh: list[str] = field(default_factory=lambda: ["ssh"])  # the program and its options, before the host
    connect_timeout_s: int = 10  # until a host answers
    port: int = 29500  # on the first host
    environment: list[str] = field(default_factory=list)  # names of variables of this shell that the hosts get

    def check(self) -> None:
        require(len(self.ssh) > 0, "launch.hosts.ssh", self.ssh, "names the program that reaches a host", "Use [ssh].")
        require(0 < self.port < 65536, "launch.hosts.port", self.port, "must be a port, 1 to 65535", "Use 29500.")
        require(
            self.connect_timeout_s > 0,
            "launch.hosts.connect_timeout_s",
            self.connect_timeout_s,
            "must be a positive number of seconds",
            "Use 10.",
        )
        for name in self.environment:
            require(
                re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None,
                "launch.hosts.environment",
                name,
                "is the name of a variable, without a value",
                "Export the variable and name it here.",
            )
            require(
                not any(word in name.upper() for word in ("TOKEN", "KEY", "SECRET", "PASSWORD")),
                "launch.hosts.environment",
                name,
                "would show in the process list of every host",
                "Set it in the login files of the hosts.",
            )


@dataclass(kw_only=True)
class LaunchConfig:
    """How many processes a command starts, and where."""

    kind: str = "local"  # local | slurm | hostfile
    # Processes a node. None = one for each visible GPU, and one on a machine without; for hostfile the list's slots.
    ranks: int | None = None
    dry_run: bool = False  # print every command and start nothing
    stop_timeout_s: float = 600.0  # ranks that were asked to stop and save are killed after so long
    meet_timeout_s: float = 900.0  # nodes that do not all arrive within this time end the start
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)

    def check(self) -> None:
        """Raise ConfigError for the first rule that the values break."""
        require(self.kind in KINDS, "launch.kind", self.kind, f"must be one of {KINDS}", "Use launch=local.")
        require(
            self.ranks is None or self.ranks > 0,
            "launch.ranks",
            self.ranks,
            "must be positive",
            "Use null for one a GPU.",
        )
        for key in ("stop_timeout_s", "meet_timeout_s"):
            value = getattr(self, key)
            require(value > 0, f"launch.{key}", value, "must be a positive number of seconds", "Use the default.")
        if self.kind == "slurm":
            self.slurm.check()
        if self.kind == "hostfile":
            require(
                self.hosts.file is not None,
                "launch.hosts.file",
                self.hosts.file,
                "must name the list of hosts, lines `host slots=N`",
                "Set it, as in launch.hosts.file=hostfile.",
            )
            self.hosts.check()
