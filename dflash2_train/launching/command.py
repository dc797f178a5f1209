"""A console command, and the decision where it runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from dflash2_train.app import guarded, run_app
from dflash2_train.config import ConfigError, RunConfig, absolute, load_config
from dflash2_train.launching.checks import check_port, check_unused, prepare_folder, ranks_here
from dflash2_train.launching.environment import (
    import_path,
    is_launched,
    module_command,
    refuse_bare_srun,
    shell_line,
)
from dflash2_train.launching.job import Job, new_job
from dflash2_train.launching.member import run_member, watch_input
from dflash2_train.launching.outcome import End
from dflash2_train.launching.shards import plan_spread, run_divided, run_shards, show_members
from dflash2_train.provenance import atomic_write_text

logger = logging.getLogger(__name__)
AS_MEMBER, AS_NODE = "--as-member", "--as-node"  # first words of commands that this package starts
SAVING_MARGIN_S = 10.0  # before a scheduler kills, so that the cause of a slow stop is told by us


def never(_: RunConfig) -> bool:
    """The default of ``Command.single``."""
    return False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One console command and how it may be divided."""

    name: str  # as typed
    module: str  # whose ``main()`` is the command
    main: Callable[[RunConfig], int]  # the work of one process; a rank finds its place in RANK and WORLD_SIZE
    shards: bool = False  # divided into processes that share a folder, not into ranks
    single: Callable[[RunConfig], bool] = never  # whether a configuration is for one process whatever the machine
    folder: Callable[[RunConfig], Path] | None = None  # that one job at a time may work in

    def words(self, first: str) -> list[str]:
        """Program and words that start this command again, as a member or a node."""
        return module_command(self.module, [first])


def run_launched(command: Command) -> None:
    """Entry of a console script."""
    words = sys.argv[1:]
    if words[:1] == [AS_MEMBER]:
        sys.exit(run_member(command.main, Path(words[1])))
    if words[:1] == [AS_NODE]:
        sys.exit(guarded(lambda: run_node(command, words[1:])))
    run_app(command.name, lambda config: start(command, config))


def start(command: Command, config: RunConfig) -> int:
    """Run ``command`` where ``config.launch`` says, unless a launcher has made this process a rank already."""
    if is_launched():
        return command.main(config)
    if config.launch.kind != "local" and command.single(config):
        raise ConfigError(
            f"launch.kind={config.launch.kind!r}: this is work for one process (eval.mode=server, or one that spreads "
            "the target itself). Use launch=local where it shall run."
        )
    if config.launch.kind == "slurm":
        from dflash2_train.launching.slurm import submit

        return submit(command, config)
    if config.launch.kind == "hostfile":
        from dflash2_train.launching.hosts import run_on_hosts

        return run_on_hosts(command, config)
    if not command.shards:
        refuse_bare_srun(command.name)
    return start_here(command, config)


def start_here(command: Command, config: RunConfig) -> int:
    """Run on this machine: in this process if one will do."""
    if config.launch.dry_run:
        show_here(command, config)
        return 0
    prepare_folder(absolute(config.run_dir), "run_dir")
    if command.single(config):
        return command.main(config)
    if command.shards:
        return run_shards(command.name, command.main, command.words(AS_MEMBER), config)
    ranks = ranks_here(config.launch)
    if ranks == 1:
        return command.main(config)
    job = prepare(command, config)
    logger.info("%d ranks on this machine, logs in %s", ranks, job.logs)
    from dflash2_train.launching.ranks import Node, run_ranks

    return run_ranks(job, [*command.words(AS_MEMBER), str(job.file)], config.launch, Node(ranks=ranks)).code


def prepare(command: Command, config: RunConfig) -> Job:
    """Look at the folders and write the job file.

    Raises:
        UserError: a folder cannot be written, or is in use.
    """
    job = new_job(command.name, config)
    prepare_folder(job.logs, "run_dir")
    if command.folder is not None:
        check_unused(command.folder(config), job)
    job.write()
    return job


def show_here(command: Command, config: RunConfig) -> None:
    """Print what would be started on this machine, one process a line."""
    words = command.words(AS_MEMBER)
    if command.single(config):
        lines = [f"{command.name}: one process, this one"]
    elif command.shards:
        lines = show_members(command.name, words, config)
    elif (ranks := ranks_here(config.launch)) == 1:
        lines = [f"{command.name}: one process, this one"]
    else:
        job = new_job(command.name, config)
        lines = [f"{command.name}: {ranks} ranks, logs in {job.logs}"]
        for rank in range(ranks):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            lines.append(shell_line([*words, str(job.file)], variables | {"PYTHONPATH": import_path()}))
    sys.stdout.write("\n".join(lines) + "\n")


def run_node(command: Command, words: Sequence[str]) -> int:
    """Run this node's part of a job of several nodes.

    Returns:
        0 for every end in good order, so that a scheduler does not end nodes that still save; the first node then
        leaves the command's code in ``Job.exit_file``. Another code for a fault.
    """
    parser = argparse.ArgumentParser(prog=f"{command.name} {AS_NODE}")
    parser.add_argument("job", type=Path)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", "1")))
    parser.add_argument("--address", default="", help="host:port of the first node")
    parser.add_argument("--watch-input", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(words)
    job = Job.read(options.job)
    os.chdir(job.cwd)
    if options.watch_input:
        watch_input()
    config = load_config(OmegaConf.create(job.config))
    end = _node_part(command, config, job, node=options.node, nodes=options.nodes, address=options.address)
    if end.good and options.node == 0:
        atomic_write_text(job.exit_file, f"{end.code}\n")
    return 0 if end.good else end.code


def _node_part(command: Command, config: RunConfig, job: Job, *, node: int, nodes: int, address: str) -> End:
    launch = config.launch
    if launch.kind == "slurm":  # the scheduler kills then, and tells nobody why
        most = max(launch.slurm.signal_s - SAVING_MARGIN_S, 1.0)
        launch = replace(launch, stop_timeout_s=min(launch.stop_timeout_s, most))
    words = command.words(AS_MEMBER)
    if command.shards:
        if nodes == 1:
            return End(True, run_shards(command.name, command.main, words, config))
        spread = plan_spread(config, node=node, nodes=nodes)
        return run_divided(command.name, words, replace(config, launch=launch), spread)
    if node == 0 and nodes > 1:
        key = "launch.hosts.port" if launch.kind == "hostfile" else "the job's port"
        check_port(int(address.rpartition(":")[2]), key)
    from dflash2_train.launching.ranks import Node, run_ranks

    place = Node(ranks=ranks_here(launch), index=node, count=nodes, address=address)
    return run_ranks(job, [*words, str(job.file)], launch, place)
