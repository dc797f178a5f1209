"""A job on the hosts of a list: one ssh session a host, which starts that host's ranks.

A session is stopped by closing its input: the host notices, asks its ranks to stop, and they save. The same happens
when the session is lost. Output of the first host is shown here; each host's stands in ``RUN/logs/nodeN``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError, HostsConfig, RunConfig, UserError, absolute
from dflash2_train.launching.environment import import_path, module_command
from dflash2_train.launching.job import Job, new_job
from dflash2_train.launching.outcome import End
from dflash2_train.launching.processes import Member, run_together
from dflash2_train.launching.shards import report_ends

if TYPE_CHECKING:
    from dflash2_train.launching.command import Command

logger = logging.getLogger(__name__)
PROBE = "dflash2_train.launching.probe"
PROBE_TIMEOUT_S = 120  # torch is imported from a network file system at the far end
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*)\s+slots=(?P<slots>[1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One line of the list."""

    name: str  # as ssh takes it, user@host included
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a list, in its order.

    Raises:
        ConfigError: it cannot be read, or a line is not ``host slots=N``, or a host stands there twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"launch.hosts.file={str(path)!r}: cannot be read ({error}). Name a file with lines `host slots=N`."
        ) from error
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise ConfigError(f"{path}:{number}: {words!r} is not `host slots=N`. Write it as in: node1 slots=8")
        if match["name"] in [host.name for host in hosts]:
            raise ConfigError(f"{path}:{number}: {match['name']} stands there twice. Give it one line with all slots.")
        hosts.append(Host(name=match["name"], slots=int(match["slots"])))
    if not hosts:
        raise ConfigError(f"launch.hosts.file={str(path)!r}: lists no host. Write lines `host slots=N`.")
    return hosts


def even_ranks(hosts: list[Host], wanted: int | None) -> int:
    """Ranks on each host.

    Raises:
        ConfigError: the hosts have different numbers of slots, or fewer than wanted.
    """
    listed = ", ".join(f"{host.name} {host.slots}" for host in hosts)
    fewest = min(host.slots for host in hosts)
    if wanted is None and len({host.slots for host in hosts}) > 1:
        raise ConfigError(
            f"launch.hosts.file: the hosts are uneven ({listed}). Every host runs the same number of ranks: "
            f"take launch.ranks={fewest} on each, or leave a host out."
        )
    if wanted is not None and wanted > fewest:
        raise ConfigError(f"launch.ranks={wanted}: a host has fewer slots ({listed}). Use launch.ranks={fewest}.")
    return fewest if wanted is None else wanted


def ssh_command(hosts: HostsConfig, host: Host, words: list[str], cwd: str) -> list[str]:
    """The local command that runs ``words`` on ``host`` in the same folder."""
    variables = {"PYTHONPATH": import_path()} | {name: os.environ[name] for name in hosts.environment}
    assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    options = ["BatchMode=yes", f"ConnectTimeout={hosts.connect_timeout_s}", "ServerAliveInterval=30"]
    far = f"cd {shlex.quote(cwd)} && exec env {assigned} {shlex.join(words)}"
    return [*hosts.ssh, *(word for option in options for word in ("-o", option)), host.name, far]


def node_commands(command: Command, config: RunConfig, job: Job, hosts: list[Host]) -> list[list[str]]:
    """The ssh command of every host."""
    from dflash2_train.launching.command import AS_NODE

    settings = config.launch.hosts
    address = f"{hosts[0].address}:{settings.port}"
    common = [*command.words(AS_NODE), str(job.file), "--nodes", str(len(hosts)), "--address", address]
    return [
        ssh_command(settings, host, [*common, "--node", str(number), "--watch-input"], job.cwd)
        for number, host in enumerate(hosts)
    ]


def probe_commands(config: RunConfig, job: Job, hosts: list[Host]) -> list[list[str]]:
    """The ssh command that looks at every host before the start; the first one's port too."""
    settings = config.launch.hosts
    port = ["--port", str(settings.port)]
    return [
        ssh_command(settings, host, module_command(PROBE, [str(job.file), *(port if number == 0 else [])]), job.cwd)
        for number, host in enumerate(hosts)
    ]


def check_hosts(config: RunConfig, job: Job, hosts: list[Host], ranks: int) -> None:
    """Look at all hosts at once.

    Raises:
        UserError: one or more cannot be reached or used; every one is named with its reason.
    """
    commands = probe_commands(config, job, hosts)
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(_ask, commands))
    faults = [f"{host.name}: {answer}" for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, str)]
    found = {host.name: answer for host, answer in zip(hosts, answers, strict=True) if not isinstance(answer, str)}
    for name, answer in found.items():
        if answer["fault"] is not None:
            faults.append(f"{name}: {answer['fault']}")
        elif answer["job_id"] != job.job_id:
            faults.append(f"{name}: {job.file} is another file there. The run folder must be shared")
        elif any(other["gpus"] for other in found.values()) and answer["gpus"] < ranks:
            faults.append(f"{name}: has {answer['gpus']} GPUs to use for {ranks} ranks")
    versions = {name: answer["versions"] for name, answer in found.items()}
    if len({json.dumps(version, sort_keys=True) for version in versions.values()}) > 1:
        faults.append(f"versions differ: {versions}")
    if faults:
        listed = "\n  ".join(faults)
        raise UserError(f"the {len(hosts)} hosts cannot start the job:\n  {listed}\nMend them, or leave a host out.")


def _ask(command: list[str]) -> dict[str, Any] | str:
    """A host's answer, or why there is none."""
    try:
        done = subprocess.run(  # noqa: S603 - a list of words, no shell here
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"launch.hosts.ssh: there is no program {command[0]!r} here"
    except subprocess.TimeoutExpired:
        return f"gave no answer within {PROBE_TIMEOUT_S} s"
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return f"cannot be reached or used (ssh exit code {done.returncode}: {said})"
    answer: dict[str, Any] = json.loads(lines[-1])  # a login script may have printed before
    return answer


def run_on_hosts(command: Command, config: RunConfig) -> int:
    """Check all hosts, start the job on them, and wait for its end.

    Raises:
        ConfigError: the list or the ranks do not fit.
        UserError: a host or the run folder cannot be used.
    """
    from dflash2_train.launching.command import prepare

    settings = config.launch.hosts
    hosts = read_hosts(absolute(str(settings.file)))
    missing = [name for name in settings.environment if name not in os.environ]
    if missing:
        raise ConfigError(f"launch.hosts.environment={missing}: not set in this shell. Export them or leave them out.")
    ranks = even_ranks(hosts, config.launch.ranks)
    if not command.shards:  # a shard may take several GPUs, which its host counts
        config = replace(config, launch=replace(config.launch, ranks=ranks))
    if config.launch.dry_run:
        job = new_job(command.name, config)
        for line in [*probe_commands(config, job, hosts), *node_commands(command, config, job, hosts)]:
            sys.stdout.write(shlex.join(line) + "\n")
        return 0
    job = prepare(command, config)
    check_hosts(config, job, hosts, ranks)
    members = [
        Member(
            name=f"node {number} of {len(hosts)} ({host.name})",
            command=words,
            folder=job.logs / f"node{number}",
            remote=True,
        )
        for number, (host, words) in enumerate(zip(hosts, node_commands(command, config, job, hosts), strict=True))
    ]
    logger.info("%d hosts of %d ranks, logs in %s", len(hosts), ranks, job.logs)
    ends = run_together(members, stop_timeout_s=config.launch.stop_timeout_s, end_together=True)
    if not ends.failed() and not ends.killed:
        return int(job.exit_file.read_text(encoding="utf-8"))  # nodes in good order end with 0
    end: End = report_ends(members, ends)
    return end.code if not end.good else 1
