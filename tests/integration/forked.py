"""Starting a module as one process a rank, without loading the libraries for each of them anew.

The processes are real ones, with signals, exit codes and an end of their own. They are forked from a server that has
imported what the commands need, since those imports take several times as long as a tiny training. What a command
imports when it starts from nothing is seen by the tests that start the console scripts.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.integration.launch import rank_environments

PRELOADED = "tests.integration.preloaded"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([PRELOADED])
LIMIT_S = 240.0


class RankProcess:
    """``python -m module arguments`` in a process of its own; members are named as by :class:`subprocess.Popen`."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(descriptor)
        self._output = Path(path)
        self._process = CONTEXT.Process(target=run_module, args=(module, list(arguments), environment, path))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = LIMIT_S) -> str:
        """Wait for the end; what was printed to both streams. A process that takes longer is killed, and fails."""
        self._process.join(timeout)
        late = self.poll() is None
        if late:
            self._process.kill()
            self._process.join()
        printed = self._output.read_text()
        self._output.unlink()
        assert not late, f"process {self.pid} took more than {timeout} s:\n{printed}"
        return printed


def run_module(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In the forked process: become ``python -m module arguments`` with both streams in the file ``output``."""
    assert PRELOADED in sys.modules, f"python -c 'import {PRELOADED}' tells why the server could not import it"
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    torch.set_num_threads(1)  # a fork leaves the pool of threads behind, if there was one
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_ranks_of(module: str, arguments: Sequence[str], ranks: int) -> list[RankProcess]:
    """Processes of ``python -m module arguments``, one a rank; a single one starts plainly, without rank variables."""
    return [RankProcess(module, arguments, environment) for environment in rank_environments(ranks)]


def finish(processes: Sequence[RankProcess], *, expect: int = 0, timeout: float = LIMIT_S) -> str:
    """Wait for all, check their exit codes, and return what they printed."""
    output = "".join(process.communicate(timeout) for process in processes)
    assert [process.returncode for process in processes] == [expect] * len(processes), output
    return output
