"""Ranks of this node through torch's elastic launcher: their logs, one console, the cause of a failure, the exit code.

Nothing is restarted within a start: a resume reads checkpoints, and the same command or the scheduler's queue does it.
Several nodes meet at a fixed address with fixed numbers (torch's ``static`` rendezvous), so that rank 0, the console
and the meeting point are on the first node, the last one to leave. The ``c10d`` kind sorts nodes by name: its store
may sit on a node that ends early, which then takes the others with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as AgentConfig
from torch.distributed.launcher.api import elastic_launch

from dflash2_train.config import LaunchConfig, UserError
from dflash2_train.launching.environment import import_path
from dflash2_train.launching.follow import Follow, keep_older, last_lines
from dflash2_train.launching.job import Job
from dflash2_train.launching.outcome import (
    CRASH,
    FAULT,
    FILE_NAME,
    End,
    Failure,
    Outcome,
    cause_of,
    combined_code,
    read_outcome,
)

logger = logging.getLogger(__name__)
SHOWN_LINES = 30  # of the log of a rank that is not on the console
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


@dataclass(frozen=True, kw_only=True)
class Node:
    """This node among those of the job."""

    ranks: int  # processes on every node
    index: int = 0
    count: int = 1
    address: str = ""  # host:port of the first node; empty for a single one

    def globals(self) -> list[int]:
        """Ranks of this node, in the order of their local numbers."""
        return list(range(self.index * self.ranks, (self.index + 1) * self.ranks))


class RankLogs(LogsSpecs):
    """``rankN/stdout.log`` and ``rankN/stderr.log`` under one folder; N counts over all nodes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of all ranks."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where torch sends what the local ranks write."""
        folders = {local: self._folder / f"rank{variables['RANK']}" for local, variables in envs.items()}
        return LogsDest(
            stdouts={local: str(folder / "stdout.log") for local, folder in folders.items()},
            stderrs={local: str(folder / "stderr.log") for local, folder in folders.items()},
            error_files={local: str(folder / "error.json") for local, folder in folders.items()},
        )


def run_ranks(job: Job, command: list[str], launch: LaunchConfig, node: Node) -> End:
    """Run ``command`` as the ranks of this node and wait for them.

    Args:
        job: its folder takes logs and outcomes.
        command: program and words of a rank; the rest stands in its environment.
        launch: time limits.
        node: this node's place.

    Returns:
        Good if every rank ended in good order, with the command's own code: 0, 143 after a stop, or its "no". Else the
        code of the rank that was the cause, which is told on stderr.
    """
    folders = {rank: job.logs / f"rank{rank}" for rank in node.globals()}
    for folder in folders.values():
        _clear(folder)
    _quiet_agent()
    failures: dict[int, Any] = {}
    stopped = False
    with _as_one_process(node.ranks), _console(folders[node.globals()[0]], shown=node.index == 0):
        try:
            elastic_launch(_agent_config(job, launch, node), command[0])(*command[1:])
        except SignalException:
            stopped = True
        except ChildFailedError as error:
            failures = error.failures
        except DistError as error:
            raise UserError(
                f"the {node.count} nodes did not all meet at {node.address or 'this machine'} within "
                f"launch.meet_timeout_s={launch.meet_timeout_s:g} ({error}). Look at the logs of the nodes that are "
                "missing, and whether the first one's port can be reached from them."
            ) from error
    outcomes = {rank: read_outcome(folder) for rank, folder in folders.items()}
    if stopped:
        return _after_stop(outcomes, folders)
    if failures:
        return End(False, _after_failure(failures, outcomes, folders, node))
    return End(True, combined_code([outcome for outcome in outcomes.values() if outcome is not None]))


def _agent_config(job: Job, launch: LaunchConfig, node: Node) -> AgentConfig:
    """Torch's description of this node's part."""
    single = node.count == 1
    timeout = int(launch.meet_timeout_s)
    return AgentConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=node.ranks,
        run_id=job.job_id,
        role=job.short,
        rdzv_backend="c10d" if single else "static",
        rdzv_endpoint="127.0.0.1:0" if single else node.address,  # port 0: a free one, taken by the store itself
        rdzv_configs={"timeout": timeout} if single else {"rank": node.index, "timeout": timeout},
        local_addr="127.0.0.1" if single else None,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=RankLogs(job.logs),
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=int(launch.stop_timeout_s),
    )


def _clear(folder: Path) -> None:
    """Make a rank's folder ready: older logs under other names, no outcome of an earlier start."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("stdout.log", "stderr.log"):
        keep_older(folder / name)
    (folder / FILE_NAME).unlink(missing_ok=True)


def _quiet_agent() -> None:
    """Leave the report to us: the agent would tell each end several times, in boxes."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(AGENT_LOGGERS):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _as_one_process(ranks: int) -> Iterator[None]:
    """Variables that ranks inherit, and a closed terminal taken as a wish to stop; signals as before afterwards."""
    os.environ["PYTHONPATH"] = import_path()
    # Ranks that each take all cores stall one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    before = {number: signal.getsignal(number) for number in CAUGHT}

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _console(folder: Path, *, shown: bool) -> Iterator[None]:
    """Show the first rank's streams on ours."""
    with contextlib.ExitStack() as stack:
        if shown:
            stack.enter_context(Follow(folder / "stdout.log", sys.stdout))
            stack.enter_context(Follow(folder / "stderr.log", sys.stderr))
        yield


def _after_stop(outcomes: Mapping[int, Outcome | None], folders: Mapping[int, Path]) -> End:
    """The end of a job that was asked to stop; says so where a rank did not leave in good order."""
    left = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}
    faults = {rank: outcome for rank, outcome in left.items() if outcome.kind in (FAULT, CRASH)}
    killed = [rank for rank, outcome in outcomes.items() if outcome is None]
    for rank, outcome in faults.items():
        sys.stderr.write(f"error: rank {rank} failed while it stopped: {outcome.message}\n")
    for rank in killed:
        sys.stderr.write(
            f"error: rank {rank} had not begun, or had not stopped in time (launch.stop_timeout_s) and was killed. "
            f"The last checkpoint is whole. Its log: {folders[rank] / 'stderr.log'}\n"
        )
    return End(False, 1) if faults or killed else End(True, combined_code(list(left.values())))


def _after_failure(
    failures: Mapping[int, Any], outcomes: Mapping[int, Outcome | None], folders: Mapping[int, Path], node: Node
) -> int:
    """Tell which rank ended the job and how; its exit code."""
    total = node.ranks * node.count
    found = [
        Failure(
            member=f"rank {rank} of {total}",
            exit_code=failure.exitcode,
            seen=float(failure.timestamp),
            outcome=outcomes[rank],
            log=folders[rank] / "stderr.log",
        )
        for rank, failure in failures.items()
    ]
    cause = cause_of(found)
    if cause.log.parent != folders[node.globals()[0]] or node.index > 0:
        for line in last_lines(cause.log, SHOWN_LINES):
            sys.stderr.write(f"  {line}\n")
    sys.stderr.write(f"error: {cause.describe()}\n")
    return cause.code()
