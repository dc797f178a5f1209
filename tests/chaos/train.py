"""A training of two ranks under fire: killed, stopped, out of time, out of disk; and continued to the same curve.

``python -m tests.chaos.train [NAME ...]`` runs the named disturbances, or all of them, and prints a line for each.

Every disturbance gets a run folder of its own. What it does to the job must end all ranks that still can end, soon,
with the documented exit codes and a line that says why. Then the same command, undisturbed, must end with the log lines
and weights of a run that nothing ever happened to, to the last bit.

Ranks are forks of this process, since a fresh interpreter takes seconds to import what a training needs.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dflash2_train import checkpoint, training_run
from dflash2_train.app import EXIT_FAULT, run_guarded
from dflash2_train.config import RunConfig, load_config, to_plain
from dflash2_train.exit_codes import EXIT_LOST_RANK, EXIT_STALLED, EXIT_STOPPED
from dflash2_train.export import formats  # noqa: F401 - imported here once and not in every rank
from dflash2_train.guard.status import STATUS_FILE
from dflash2_train.guard.watchdog import STACKS_FILE
from dflash2_train.ranks import import_deepspeed
from dflash2_train.run_control import SCHEDULER_END, rank_folder
from dflash2_train.tracker import read_metrics
from dflash2_train.train import train
from tests.cases import tiny_run_config, without_clock
from tests.tiny_target import save_tiny_llama, write_cache

RANKS, STEPS, SAVE_EVERY = 2, 10, 3
PACE_S = 0.05  # a step takes at least so long, so that a disturbance hits the middle of a run
LIMIT_S = 120.0  # for whatever must happen; seconds on an idle machine
Sabotage = Callable[[], None]


def base_config(root: Path) -> RunConfig:
    """A tiny target with a filled cache, two ranks of one row each."""
    config = tiny_run_config(root)
    config.target.name, config.target.dtype = str(root / "target"), "float32"
    config.data.teacher_top_k, config.data.attest.min_agreement = 8, 0.05
    config.train.dtype, config.train.steps, config.train.save_every = "float32", STEPS, SAVE_EVERY
    config.train.row_tokens, config.train.rows, config.train.lr = 64, 1, 3e-3
    write_cache(save_tiny_llama(root / "target", config), config, samples=12, length=24)
    return config


def run_rank(config: RunConfig, rank: int, ranks: int, port: int, log: Path, sabotage: Sabotage | None) -> int:
    """The body of a child: one rank of a training, its output in ``log``."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    step = training_run.WindowStep.__call__

    def paced(self: Any, window: Any) -> Any:
        time.sleep(PACE_S)
        return step(self, window)

    training_run.WindowStep.__call__ = paced  # type: ignore[method-assign]
    if sabotage is not None:
        sabotage()
    return run_guarded(train, OmegaConf.create(to_plain(config)))


class Job:
    """One start of a training: a process for each rank.

    Args:
        config: of the training.
        ranks: of the job.
        absent: how many of the last ones are never started.
        port: where they meet; a free one by default.
        sabotage: what a rank does to itself before it trains.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        ranks: int = RANKS,
        absent: int = 0,
        port: int | None = None,
        sabotage: dict[int, Sabotage] | None = None,
    ) -> None:
        self.output = Path(config.train.output_dir)
        self._logs = [self.output.parent / f"rank{rank}.log" for rank in range(ranks)]
        self._codes: dict[int, int] = {}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        for log in self._logs:
            log.write_bytes(b"")
        if port is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        doing = sabotage or {}
        self.pids = [self._fork(config, rank, ranks, port, doing.get(rank)) for rank in range(ranks - absent)]

    def _fork(self, config: RunConfig, rank: int, ranks: int, port: int, sabotage: Sabotage | None) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            torch.set_num_threads(1)
            code = run_rank(config, rank, ranks, port, self._logs[rank], sabotage)
        except BaseException:  # noqa: BLE001 - the child's only door out
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait_for_step(self, step: int) -> None:
        """Return once ``step`` is logged."""
        metrics = self.output / "metrics.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert time.monotonic() < deadline, f"step {step} is not reached:\n{self.told()}"
            assert self.alive(), f"ended before step {step}:\n{self.told()}"
            time.sleep(0.005)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.pids[rank], number)

    def alive(self) -> list[int]:
        """Ranks whose process runs; the others' exit codes are kept."""
        for rank, pid in enumerate(self.pids):
            if rank not in self._codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(len(self.pids)) if rank not in self._codes]

    def code_of(self, rank: int) -> int:
        """Exit code of a rank, as soon as it has ended."""
        deadline = time.monotonic() + LIMIT_S
        while rank in self.alive():
            assert time.monotonic() < deadline, f"rank {rank} does not end:\n{self.told()}"
            time.sleep(0.01)
        return self._codes[rank]

    def codes(self) -> list[int]:
        """Exit codes of all ranks, as soon as they have ended."""
        return [self.code_of(rank) for rank in range(len(self.pids))]

    def told(self) -> str:
        """What all ranks printed."""
        return "".join(log.read_text() for log in self._logs)

    def said(self, rank: int) -> str:
        """What one rank printed, in one line."""
        return re.sub(r"\s+", " ", self._logs[rank].read_text())

    def kill(self) -> None:
        """End what is left of it, all at once."""
        running = self.alive()
        for rank in running:
            self.signal(rank, signal.SIGKILL)
        for rank in running:
            self.code_of(rank)


class Arena:
    """The undisturbed run, and folders for those that are disturbed.

    Args:
        root: folder for all of it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        torch.set_num_threads(1)
        import_deepspeed()
        self._base = base_config(root)
        self.straight = self.variant("straight")
        job = Job(self.straight)
        assert job.codes() == [0] * RANKS, job.told()

    def variant(self, name: str, **guard: Any) -> RunConfig:
        """The same experiment with a run folder of its own and other limits."""
        config = load_config(OmegaConf.create(to_plain(self._base)))
        config.train.output_dir = str(self.root / name / "train")
        config.export.output_dir = str(self.root / name / "export")
        for key, value in guard.items():
            setattr(config.train.guard, key, value)
        return config

    def check_resumed(self, config: RunConfig) -> None:
        """Run it to its end, and compare with the undisturbed run to the last bit."""
        job = Job(config)
        assert job.codes() == [0] * RANKS, job.told()
        assert curve(config) == curve(self.straight)
        ids = {record["run_id"] for record in records(config)}
        assert len(ids) == 1, "trackers know a run by its id, which a resume keeps"
        expected, found = final_weights(self.straight), final_weights(config)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def curve(config: RunConfig) -> list[dict[str, float]]:
    """The log, each step once, without what hangs on the clock."""
    return [without_clock(row) for row in read_metrics(Path(config.train.output_dir) / "metrics.jsonl")]


def records(config: RunConfig) -> list[dict[str, Any]]:
    """What each start left, the first one first."""
    folder = Path(config.train.output_dir)
    return [json.loads(path.read_text()) for path in [folder / "run.json", *sorted(folder.glob("run.attempt*.json"))]]


def final_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """The trained drafter."""
    return load_file(Path(config.train.output_dir) / f"step{STEPS:06d}" / checkpoint.WEIGHTS)


def checkpoints(config: RunConfig) -> list[str]:
    """Names of the committed checkpoints."""
    return sorted(path.parent.name for path in Path(config.train.output_dir).glob("step*/MANIFEST.json"))


def one_rank_killed(arena: Arena) -> None:
    """The second rank is killed: the first one ends by itself and says which rank is gone, and behind which step."""
    config = arena.variant("one-rank-killed")
    job = Job(config)
    job.wait_for_step(SAVE_EVERY + 1)
    job.signal(1, signal.SIGKILL)
    assert job.codes() == [EXIT_LOST_RANK, -signal.SIGKILL], job.told()
    assert re.search(r"error: rank 1 \(process \d+ of \S+, .* behind step \d+\) is gone without a word", job.said(0))
    assert re.search(r"Rank 0 ends for it, .* behind step \d+", job.said(0))
    assert "Traceback" not in job.told()
    arena.check_resumed(config)


def first_rank_killed(arena: Arena) -> None:
    """The rank that writes everything is killed: the other one ends by itself, and names it."""
    config = arena.variant("first-rank-killed")
    job = Job(config)
    job.wait_for_step(SAVE_EVERY + 1)
    job.signal(0, signal.SIGKILL)
    assert job.codes() == [-signal.SIGKILL, EXIT_LOST_RANK], job.told()
    assert re.search(r"error: rank 0 \(.*\) is gone without a word", job.said(1))
    arena.check_resumed(config)


def all_ranks_killed(arena: Arena) -> None:
    """Nobody has time to say anything, before the first checkpoint and behind it."""
    config = arena.variant("all-ranks-killed")
    for step in (1, SAVE_EVERY + 1):
        job = Job(config)
        job.wait_for_step(step)
        job.kill()
        assert set(job.codes()) == {-signal.SIGKILL}
    arena.check_resumed(config)


def one_rank_never_came(arena: Arena) -> None:
    """A rank that does not start, and a port that is taken, end the others in time, with the address."""
    config = arena.variant("one-rank-never-came", collective_timeout_seconds=2.0)
    job = Job(config, absent=1)
    assert job.codes() == [EXIT_LOST_RANK], job.told()
    assert re.search(r"error: rank 0 of 2 did not find the others at 127.0.0.1:\d+ within", job.said(0))
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        job = Job(config, absent=1, port=taken.getsockname()[1])
        assert job.codes() == [EXIT_LOST_RANK], job.told()
    assert "EADDRINUSE" in job.said(0)
    config.train.guard.collective_timeout_seconds = 1800.0
    arena.check_resumed(config)


def one_rank_told_to_stop(arena: Arena) -> None:
    """SIGTERM to one rank: all of them save behind the same step and leave with the code of a good stop."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        config = arena.variant(f"stop-{number.name}")
        job = Job(config)
        job.wait_for_step(1)
        job.signal(1, number)
        assert job.codes() == [EXIT_STOPPED] * RANKS, job.told()
        assert len(checkpoints(config)) >= 1
        assert "stopped at step" in job.said(0)
    arena.check_resumed(config)


def one_rank_stopped(arena: Arena) -> None:
    """SIGSTOP: the other rank writes its stacks, runs out of patience in a collective, and names the silent one."""
    config = arena.variant(
        "one-rank-stopped", stall_seconds=1.5, stall_exit_seconds=60.0, collective_timeout_seconds=4.0
    )
    job = Job(config)
    job.wait_for_step(SAVE_EVERY + 1)
    job.signal(1, signal.SIGSTOP)
    assert job.code_of(0) == EXIT_LOST_RANK, job.told()
    assert re.search(r"rank 1 \(.*\) is furthest behind, last sign of life \d+ s ago", job.said(0))
    stacks = (rank_folder(job.output, 0) / STACKS_FILE).read_text()
    assert "rank 0: " in stacks
    assert "training_run.py" in stacks
    job.kill()
    config.train.guard.collective_timeout_seconds = 1800.0
    arena.check_resumed(config)
    (_, resumed) = records(config)
    assert resumed["changed"] == ["config.train.guard.collective_timeout_seconds: 4.0 -> 1800.0"]


def stopped_for_too_long(arena: Arena) -> None:
    """A rank that stands still ends itself even where no collective ever runs out of patience."""
    config = arena.variant("stopped-for-too-long", stall_seconds=1.0, stall_exit_seconds=3.0)
    job = Job(config)
    job.wait_for_step(SAVE_EVERY + 1)
    job.signal(1, signal.SIGSTOP)
    assert job.code_of(0) == EXIT_STALLED, job.told()
    assert re.search(r"error: rank 0 stands still, .* stacks are in \S+/logs/rank0/stacks.txt", job.said(0))
    told = json.loads((rank_folder(job.output, 0) / STATUS_FILE).read_bytes())
    assert told["exit_code"] == EXIT_STALLED
    job.signal(1, signal.SIGCONT)  # a rank that wakes up to find the others gone ends too
    assert job.code_of(1) in (EXIT_LOST_RANK, EXIT_STALLED), job.told()
    config.train.guard.stall_seconds = config.train.guard.stall_exit_seconds = None
    arena.check_resumed(config)


def paused_and_continued(arena: Arena) -> None:
    """A job that its scheduler suspends as a whole goes on where it was, and nothing is lost for it."""
    config = arena.variant("paused", stall_seconds=8.0, stall_exit_seconds=10.0)
    job = Job(config)
    job.wait_for_step(SAVE_EVERY + 1)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in range(RANKS):
            job.signal(rank, number)
        if number is signal.SIGSTOP:
            time.sleep(12.0)  # longer than a rank may stand still
    assert job.codes() == [0] * RANKS, job.told()
    assert curve(config) == curve(arena.straight)


def failing_writer() -> None:
    """Sabotage: the disk takes no file of tensors any more once some steps are done."""
    save_file = checkpoint.save_file

    def fails(tensors: Any, path: Any, metadata: dict[str, str] | None = None) -> None:
        if int((metadata or {"step": "0"})["step"]) > SAVE_EVERY:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_file(tensors, path, metadata)

    checkpoint.save_file = fails


def disk_full_while_saving(arena: Arena) -> None:
    """A checkpoint that does not fit any more: all ranks end with the cause, the one before stays, its room is free."""
    config = arena.variant("disk-full-while-saving")
    job = Job(config, sabotage={0: failing_writer})
    assert job.codes() == [EXIT_FAULT] * RANKS, job.told()
    assert re.search(r"error: .*a checkpoint could not be written .*No space left on device", job.said(0))
    assert re.search(r"error: rank 0 \(.*\) ended: .*No space left on device", job.said(1))
    assert checkpoints(config) == [f"step{SAVE_EVERY:06d}"]
    assert list(Path(config.train.output_dir).glob(f"{checkpoint.TEMPORARY}*")) == []
    arena.check_resumed(config)


def small_disk_full(arena: Arena) -> None:
    """A real file system without a free byte, log and status included. Needs the right to mount one."""
    config = arena.variant("small-disk-full")
    output = Path(config.train.output_dir)
    output.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(output)], capture_output=True).returncode:
        sys.stdout.write("  (no right to mount a file system: left out)\n")
        return
    try:
        job = Job(config)
        job.wait_for_step(SAVE_EVERY + 1)
        ballast = output / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        assert job.codes() == [EXIT_FAULT] * RANKS, job.told()
        assert re.search(r"error: .*(GiB free|No space left on device)", job.said(0))
        ballast.unlink()
        arena.check_resumed(config)
    finally:
        subprocess.run(["umount", str(output)], check=True)


def out_of_time(arena: Arena) -> None:
    """A limit in time, of the run's own, or of the job as Slurm tells it: saved, left, and continued later."""
    config = arena.variant("out-of-time")
    config.train.max_seconds = 0.0
    job = Job(config)
    assert job.codes() == [EXIT_STOPPED] * RANKS, job.told()
    assert checkpoints(config) == ["step000001"]
    config.train.max_seconds = None

    def scheduled() -> None:
        os.environ[SCHEDULER_END] = str(int(time.time()) + 200)  # before the margin of 300 s is over

    job = Job(config, sabotage=dict.fromkeys(range(RANKS), scheduled))
    assert job.codes() == [EXIT_STOPPED] * RANKS, job.told()
    assert "300 s before the end of the job" in job.said(0)
    assert checkpoints(config) == ["step000001", "step000002"]
    arena.check_resumed(config)


def other_numbers_of_ranks(arena: Arena) -> None:
    """Two ranks, then one, then two: the same windows, sums rounded in another order."""
    config = arena.variant("other-numbers-of-ranks")
    for ranks in (RANKS, 1, RANKS):
        config.train.rows = RANKS // ranks
        config.train.max_seconds = 0.0
        job = Job(config, ranks=ranks)
        assert job.codes() == [EXIT_STOPPED] * ranks, job.told()
    config.train.max_seconds, config.train.rows = None, RANKS
    job = Job(config, ranks=1)
    assert job.codes() == [0], job.told()
    for one, two in zip(curve(arena.straight), curve(config), strict=True):
        assert one["lr"] == two["lr"]
        assert abs(one["loss"] - two["loss"]) <= 1e-5 * one["loss"]
    found = final_weights(config)
    for name, expected in final_weights(arena.straight).items():
        torch.testing.assert_close(expected, found[name], rtol=1e-3, atol=2e-5)


def two_jobs_on_one_folder(arena: Arena) -> None:
    """The second job is refused with the holder's name and touches nothing; the first goes on."""
    config = arena.variant("two-jobs")
    job = Job(config, ranks=RANKS)
    job.wait_for_step(1)
    twin = arena.variant("twin")
    twin.train.output_dir, twin.export.output_dir, twin.train.rows = config.train.output_dir, "twin-export", RANKS
    log = arena.root / "twin.log"
    child = os.fork()
    if child == 0:
        os._exit(run_rank(twin, 0, 1, 0, log, None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_FAULT
    assert re.search(rf"is in use by another dflash2-train \(process {job.pids[0]} of ", log.read_text())
    assert job.codes() == [0] * RANKS, job.told()
    assert curve(config) == curve(arena.straight)


DISTURBANCES: dict[str, Callable[[Arena], None]] = {
    work.__name__: work
    for work in (
        one_rank_killed,
        first_rank_killed,
        all_ranks_killed,
        one_rank_never_came,
        one_rank_told_to_stop,
        one_rank_stopped,
        stopped_for_too_long,
        paused_and_continued,
        disk_full_while_saving,
        small_disk_full,
        out_of_time,
        other_numbers_of_ranks,
        two_jobs_on_one_folder,
    )
}


def main() -> None:
    """Run and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DISTURBANCES)}")
    chosen = parser.parse_args().names or list(DISTURBANCES)
    root = Path(tempfile.mkdtemp(prefix="train-chaos-"))
    try:
        arena = Arena(root)
        for name in chosen:
            started = time.monotonic()
            DISTURBANCES[name](arena)
            sys.stdout.write(f"{name}: as it should, {time.monotonic() - started:.1f} s\n")
            sys.stdout.flush()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
