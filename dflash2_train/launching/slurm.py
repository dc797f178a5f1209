"""A Slurm job: its script, which is kept in the run folder, and handing it to ``sbatch``.

The script starts one task a node, which starts the node's ranks. Before the time limit Slurm sends SIGTERM, the ranks
save and leave in good order, and the script queues the job again under its own number: the same command, which
continues from the checkpoint. A fault ends the job with the fault's code and queues nothing.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash2_train.config import ConfigError, RunConfig, UserError
from dflash2_train.exit_codes import EXIT_STOPPED, LOST_CODES
from dflash2_train.launching.environment import import_path
from dflash2_train.launching.job import Job, new_job
from dflash2_train.launching.shards import DIVIDED
from dflash2_train.provenance import atomic_write_text

if TYPE_CHECKING:
    from dflash2_train.launching.command import Command

logger = logging.getLogger(__name__)
FIRST_PORT, PORTS = 20000, 20000  # a job's port follows from its number, so that jobs which share a node do not meet


def header(config: RunConfig, job: Job) -> list[str]:
    """The ``#SBATCH`` lines."""
    slurm = config.launch.slurm
    optional = {"cpus-per-task": slurm.cpus_per_task, "partition": slurm.partition, "account": slurm.account}
    options = {
        "job-name": f"{config.name}-{job.short}",
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": slurm.gpus_per_node} if slurm.gpus_per_node else {}),
        "time": slurm.time,
        "signal": f"TERM@{slurm.signal_s}",
        "open-mode": "append",
        "output": job.logs / f"{job.short}-{job.job_id}.slurm.log",
        **{key: value for key, value in {**optional, "qos": slurm.qos}.items() if value is not None},
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items()]
    lines.append("#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {option}" for option in slurm.options]


def job_script(config: RunConfig, job: Job, words: list[str]) -> str:
    """The whole script.

    Args:
        config: the experiment.
        job: written already, or about to be.
        words: program and words that run one node, before the job file.
    """
    exit_file = shlex.quote(str(job.exit_file))
    node = shlex.join([*words, str(job.file)])
    lost = shlex.quote(f"{job.exit_file}.lost")  # a line for every start that ended so
    again = [
        "again=no",
        'case "$code" in',
        f"    {EXIT_STOPPED}) again=yes ;;",
        f"    {'|'.join(map(str, LOST_CODES))})",
        f"        echo lost >> {lost}",
        f'        if [ "$(wc -l < {lost})" -le {config.launch.slurm.lost_requeues} ]; then again=yes; fi',
        "        ;;",
        "esac",
        'if [ "$again" = yes ]; then',
        '    echo "ended with $code; queued again"',
        '    exec scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *header(config, job),
            "set -uo pipefail",
            f"cd {shlex.quote(job.cwd)} || exit 2",
            f"export PYTHONPATH={shlex.quote(import_path())}",
            *config.launch.slurm.setup,
            f"rm -f {exit_file}",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            f'srun --kill-on-bad-exit=1 {node} --address "$head:$port"',
            "code=$?",
            f'if [ "$code" = 0 ]; then code=$(cat {exit_file}); fi  # nodes in good order end with 0',
            *(again if config.launch.slurm.requeue else []),
            'exit "$code"',
            "",
        ]
    )


def submit(command: Command, config: RunConfig) -> int:
    """Write the script into the run folder and hand it to ``sbatch``; a dry run prints both and writes nothing.

    Raises:
        ConfigError: there is no ``sbatch``, or the nodes cannot share the stages of data generation.
        UserError: ``sbatch`` refused the script; its words are told.
    """
    from dflash2_train.launching.command import AS_NODE, prepare

    slurm = config.launch.slurm
    if command.shards and slurm.nodes > 1 and config.stage not in DIVIDED:
        raise ConfigError(
            f"launch.slurm.nodes={slurm.nodes}: several nodes can share the stages {DIVIDED}, not "
            f"stage={config.stage}. Run stage=regenerate on all of them, then the rest on one."
        )
    if config.launch.ranks is None and not command.shards:
        config = replace(config, launch=replace(config.launch, ranks=max(slurm.gpus_per_node, 1)))
    if config.launch.dry_run:
        job = new_job(command.name, config)
        sys.stdout.write(job_script(config, job, command.words(AS_NODE)))
        sys.stdout.write(f"\nsbatch --parsable {shlex.quote(str(job.file.with_suffix('.sbatch')))}\n")
        return 0
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigError(
            "launch.kind='slurm': there is no sbatch here. Run this on a login node of the cluster, or look at the "
            "script with launch.dry_run=true."
        )
    job = prepare(command, config)
    script = job.file.with_suffix(".sbatch")
    atomic_write_text(script, job_script(config, job, command.words(AS_NODE)))
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise UserError(f"{script}: sbatch refused it: {done.stderr.strip()}. Mend launch.slurm and start again.")
    logger.info("Slurm job %s: %s", done.stdout.strip().split(";")[0], script)
    return 0
