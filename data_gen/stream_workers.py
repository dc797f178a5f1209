"""Capture workers of a stream as processes of their own: started, watched, and replaced when one dies.

A worker that dies (a lost GPU, an engine that crashed, the system short of memory) leaves a claim that goes stale at
once, and its successor or another worker captures that segment again, the same to the last bit. So a death costs time
and no data; only workers that keep dying end the stage.

``python -m data_gen.stream_workers`` is such a worker. It reads the configuration from its first line of input and ends
as soon as that input is closed, so none outlives the process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from omegaconf import OmegaConf

from dflash2_train.app import EXIT_FAULT, run_guarded
from dflash2_train.config import ConfigError, RunConfig, UserError, to_plain
from dflash2_train.provenance import NVIDIA_DEVICES

logger = logging.getLogger(__name__)
DEVICES = "CUDA_VISIBLE_DEVICES"
POLL_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a worker is started again; doubled at each death
LEAVE_S, CLOSING_S = 20.0, 30.0  # that a worker takes at most to end itself, and that it is given
EXIT_ORPHANED = 3


@dataclass
class Worker:
    """One place at which a worker runs, one process after the other."""

    number: int
    process: subprocess.Popen[str] | None = None
    deaths: int = 0
    start_at: float = 0.0  # not before, by the monotonic clock
    done: bool = False


@dataclass
class WorkerPool:
    """Keeps workers running until all of them are done.

    Args:
        number: of workers.
        start: starts the process of a worker, by its number.
        max_deaths: of one worker; the next one ends the pool.
        first_pause_s: before a dead worker is started again the first time.
    """

    number: int
    start: Callable[[int], subprocess.Popen[str]]
    max_deaths: int
    first_pause_s: float = FIRST_PAUSE_S
    workers: list[Worker] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [Worker(number=number) for number in range(self.number)]

    def run(self) -> int:
        """Run all workers to their end; the exit code is 0, or that of a fault which every worker would meet.

        Raises:
            UserError: a worker died too often.
        """
        try:
            while not all(worker.done for worker in self.workers):
                for worker in self.workers:
                    code = self._look(worker)
                    if code is not None:
                        return code
                time.sleep(POLL_S)
            return 0
        finally:
            self.close()

    def close(self) -> None:
        """End all workers that run."""
        running = [worker.process for worker in self.workers if worker.process is not None]
        for process in running:
            assert process.stdin is not None
            process.stdin.close()  # the worker's sign to leave
        deadline = time.monotonic() + CLOSING_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for worker in self.workers:
            worker.process = None

    def _look(self, worker: Worker) -> int | None:
        """Start a worker, or see how it does; an exit code where that ends all of them."""
        if worker.done:
            return None
        if worker.process is None:
            if time.monotonic() >= worker.start_at:
                worker.process = self.start(worker.number)
                logger.info("capture worker %d is process %d", worker.number, worker.process.pid)
            return None
        code = worker.process.poll()
        if code is None:
            return None
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process, worker.done = None, code == 0
        if code in (0, EXIT_FAULT):  # a fault of the configuration or of files was told by the worker
            return code or None
        self._note_death(worker, code)
        return None

    def _note_death(self, worker: Worker, code: int) -> None:
        worker.deaths += 1
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if worker.deaths > self.max_deaths:
            raise UserError(
                f"capture worker {worker.number} died {worker.deaths} times, the last time of {how} "
                f"(data.stream.max_worker_deaths={self.max_deaths}). Its output above tells why; what it captured is "
                "kept, and the same command continues."
            )
        pause = min(self.first_pause_s * 2 ** (worker.deaths - 1), LONGEST_PAUSE_S)
        worker.start_at = time.monotonic() + pause
        logger.warning(
            "capture worker %d died of %s (%d of %d times); replaced in %g s",
            worker.number,
            how,
            worker.deaths,
            self.max_deaths,
            pause,
        )


def run_workers(config: RunConfig) -> int:
    """Capture with ``data.stream.workers`` processes until the training is done.

    Raises:
        ConfigError: the GPUs cannot be shared out evenly.
        UserError: a worker died too often.
    """
    settings = config.data.stream
    devices = share_devices(settings.workers, visible_devices(os.environ))
    alone = replace(config, data=replace(config.data, stream=replace(settings, workers=0)))
    line = json.dumps(to_plain(alone)) + "\n"

    def start(number: int) -> subprocess.Popen[str]:
        environment = dict(os.environ, **({DEVICES: devices[number]} if devices else {}))
        command = [sys.executable, "-m", "data_gen.stream_workers"]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)  # noqa: S603
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
        return process

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)  # so that the pool ends its workers on the way out
    return WorkerPool(settings.workers, start, settings.max_worker_deaths).run()


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; empty without any."""
    told = environment.get(DEVICES)
    if told is not None:
        return [name for name in told.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(sorted(NVIDIA_DEVICES.glob("*/information")))]


def share_devices(workers: int, devices: Sequence[str]) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each worker, neighbours together; empty where there are no GPUs.

    Raises:
        ConfigError: they do not share out evenly.
    """
    if devices and len(devices) % workers:
        raise ConfigError(
            f"data.stream.workers={workers}: {len(devices)} GPUs do not share out evenly. Use a divisor of "
            f"{len(devices)}, or set {DEVICES}."
        )
    share = len(devices) // workers
    return [",".join(devices[number * share : (number + 1) * share]) for number in range(workers)] if devices else []


def leave_with_parent() -> None:
    """End this process as soon as its input is closed, that is, when who started it is gone or wants it to end.

    First as Ctrl-C would, so that the engine lets go of its own processes and GPUs.
    """
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LEAVE_S)
    os._exit(EXIT_ORPHANED)


def capture(config: RunConfig) -> int:
    """What a worker does."""
    from data_gen.backends.folder import find_target
    from data_gen.stream import stream

    totals = stream(config, find_target(config.target))
    logger.info("captured %d segments, %d tokens", totals.segments, totals.tokens)
    return 0


def main() -> int:
    """A worker."""
    composed = OmegaConf.create(json.loads(sys.stdin.readline()))
    threading.Thread(target=leave_with_parent, name="parent", daemon=True).start()
    return run_guarded(capture, composed)


if __name__ == "__main__":
    sys.exit(main())
