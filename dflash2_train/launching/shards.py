"""Data generation on all GPUs of a machine: one process a shard, each with its own devices and its share of the work.

Shards do not talk to each other. Regenerate divides the prompts by their hash and capture the conversation shards by
their number (``data.num_shards``), so shards are the jobs of a job array; stage ``stream`` needs no numbers, since its
producers share the ring by claims. What is not divided, as verify, runs in the first process when all shards are done.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.exit_codes import EXIT_STOPPED
from dflash2_train.launching.checks import ranks_here
from dflash2_train.launching.environment import VISIBLE, devices_of, import_path, shell_line, visible_gpus
from dflash2_train.launching.follow import last_lines
from dflash2_train.launching.job import Job, new_job
from dflash2_train.launching.outcome import End, Failure, Outcome, cause_of, combined_code, read_outcome
from dflash2_train.launching.processes import Ends, Member, run_together

logger = logging.getLogger(__name__)
DIVIDED = ("regenerate", "capture", "stream")
AFTER_A_STOP = (EXIT_STOPPED, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
SHOWN_LINES = 30  # of the log of a member that is not on the console
WHOLE_RUN = ("regenerate", "capture", "verify")  # stage=all, in turn


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Which processes do a stage on this machine."""

    count: int  # here
    first: int = 0  # number of the first one among all
    total: int  # on all nodes
    devices: int = 0  # GPUs each; 0 on a CPU


def stages_of(config: RunConfig) -> tuple[str, ...]:
    """The stages that a run goes through."""
    return WHOLE_RUN if config.stage == "all" else (config.stage,)


def spread_stages(config: RunConfig) -> list[tuple[RunConfig, Spread]]:
    """Every stage that a run goes through, as a run of its own, and its processes on this machine.

    Raises:
        ConfigError: see :func:`plan_spread`.
    """
    stages = [replace(config, stage=stage) for stage in stages_of(config)]
    return [(stage, plan_spread(stage)) for stage in stages]


def plan_spread(config: RunConfig, *, node: int = 0, nodes: int = 1) -> Spread:
    """Into how many processes the divided stages of ``config`` go on this node.

    Raises:
        ConfigError: the nodes cannot share the stages, or a target needs more GPUs than there are.
    """
    stages = stages_of(config)
    if nodes > 1 and (len(stages) > 1 or stages[0] not in DIVIDED):
        raise ConfigError(
            f"stage={config.stage}: several nodes can share the stages {DIVIDED} only. Run stage=regenerate on all of "
            "them, then stage=capture, then the rest on one, or stage=stream beside the training."
        )
    array = config.data.num_shards > 1  # the user numbers the jobs already
    server = config.data.backend == "server" and stages[0] == "regenerate"
    if array or server or not set(stages) & set(DIVIDED):
        return Spread(count=1, total=nodes)
    gpus, size = visible_gpus(), config.target.tensor_parallel_size
    if gpus and gpus < size:
        raise ConfigError(
            f"target.tensor_parallel_size={size}: this machine has {gpus} GPUs to use. Lower it, or use more GPUs."
        )
    if config.launch.ranks is None:
        count = max(gpus // size, 1)
    else:
        count = ranks_here(config.launch)
    if gpus and count * size > gpus:
        raise ConfigError(
            f"launch.ranks={count}: each shard takes target.tensor_parallel_size={size} of {gpus} GPUs. "
            f"Use launch.ranks={gpus // size}, or leave it null."
        )
    return Spread(count=count, first=node * count, total=nodes * count, devices=size if gpus else 0)


def run_shards(command: str, main: Callable[[RunConfig], int], words: list[str], config: RunConfig) -> int:
    """Run the stages of ``config`` on this machine, the divided ones as several processes.

    Args:
        command: console command, for logs.
        main: runs a stage in this process.
        words: program and words that run a member, before the job file.
        config: the experiment.
    """
    stages = spread_stages(config)
    if all(spread.count == 1 for _, spread in stages):
        return main(config)
    if "capture" in stages_of(config):
        logger.info("states will be read by %s", config.data.capturer)  # refuses now what would fail after a week
    for stage, spread in stages:
        code = run_divided(command, words, stage, spread).code if spread.count > 1 else main(stage)
        if code != 0:
            return code
    return 0


def shard_config(config: RunConfig, spread: Spread, number: int) -> RunConfig:
    """What shard ``number`` of this node reads."""
    if config.stage == "stream":
        return config
    return replace(config, data=replace(config.data, num_shards=spread.total, shard_index=spread.first + number))


def build_members(command: str, words: list[str], config: RunConfig, spread: Spread) -> list[tuple[Job, Member]]:
    """The shards of one stage, not started."""
    built = []
    job_id = new_job(command, config).job_id
    for number in range(spread.count):
        name = f"shard{spread.first + number}"
        job = new_job(command, shard_config(config, spread, number), member=name, job_id=job_id)
        variables = {"PYTHONPATH": import_path()}
        if spread.devices:
            variables[VISIBLE] = devices_of(number, spread.devices)
        member = Member(
            name=f"shard {spread.first + number} of {spread.total}",
            command=[*words, str(job.file)],
            folder=job.logs / name,
            variables=variables,
        )
        built.append((job, member))
    return built


def run_divided(command: str, words: list[str], config: RunConfig, spread: Spread) -> End:
    """Run one stage as the shards of this node; a shard that fails leaves the others to finish their share."""
    built = build_members(command, words, config, spread)
    for job, _ in built:
        job.write()
    logger.info("%s: %d shards, logs in %s", config.stage, spread.count, built[0][0].logs)
    members = [member for _, member in built]
    ends = run_together(members, stop_timeout_s=config.launch.stop_timeout_s, end_together=False)
    return report_ends(members, ends)


def show_members(command: str, words: list[str], config: RunConfig) -> list[str]:
    """Lines that a dry run prints: each shard as one would start it by hand."""
    lines = []
    for stage, spread in spread_stages(config):
        if spread.count == 1:
            lines.append(f"{stage.stage}: one process, this one")
            continue
        lines.append(f"{stage.stage}: {spread.count} shards of {spread.total}")
        for _, member in build_members(command, words, stage, spread):
            lines.append(shell_line(member.command, member.variables))
    return lines


def report_ends(members: list[Member], ends: Ends) -> End:
    """Say on stderr which members failed, the cause last, with the end of its log if the console did not show it."""
    outcomes: dict[str, Outcome | None] = {member.name: read_outcome(member.folder) for member in members}
    folders: dict[str, Path] = {member.name: member.folder for member in members}
    for name in ends.killed:
        sys.stderr.write(f"error: {name} had not stopped in time (launch.stop_timeout_s) and was killed.\n")
    failures = [
        Failure(
            member=name,
            exit_code=ends.codes[name],
            seen=ends.seen[name],
            outcome=outcomes[name],
            log=folders[name] / "stderr.log",
        )
        for name in ends.failed()
        if name not in ends.killed and not (ends.stopped_by and ends.codes[name] in AFTER_A_STOP)
    ]
    if not failures:
        if ends.stopped_by:
            return End(False, 1) if ends.killed else End(True, EXIT_STOPPED)
        return End(True, combined_code([outcome for outcome in outcomes.values() if outcome is not None]))
    cause = cause_of(failures)
    for failure in failures:
        if failure is not cause:
            sys.stderr.write(f"also: {failure.describe()}\n")
    if cause.member != members[0].name:
        sys.stderr.writelines(f"  {line}\n" for line in last_lines(cause.log, SHOWN_LINES))
    sys.stderr.write(f"error: {cause.describe()}\n")
    return End(False, cause.code())
