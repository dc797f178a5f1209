"""A capture worker that dies is replaced; one that would only die again ends the stage with its reason."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from data_gen.stream_workers import DEVICES, WorkerPool, share_devices, visible_devices
from dflash2_train.config import ConfigError, StreamConfig, UserError

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
ENDS = "import sys; sys.exit({code})"
WAITS = "import sys; sys.stdin.read()"


class Scripts:
    """Starts of workers, each of which runs the next script of its list, the last one again and again."""

    def __init__(self, *lists: list[str]) -> None:
        self.lists, self.starts = lists, Counter[int]()
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, number: int) -> subprocess.Popen[str]:
        scripts = self.lists[number]
        script = scripts[min(self.starts[number], len(scripts) - 1)]
        self.starts[number] += 1
        process = subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process


def pool(scripts: Scripts, *, max_deaths: int = 3) -> WorkerPool:
    return WorkerPool(len(scripts.lists), scripts, max_deaths, first_pause_s=0.01)


def test_a_worker_that_dies_is_replaced_until_the_training_is_done(caplog: pytest.LogCaptureFixture) -> None:
    scripts = Scripts([DIES, ENDS.format(code=1), ENDS.format(code=0)], [ENDS.format(code=0)])
    assert pool(scripts).run() == 0
    assert scripts.starts == {0: 3, 1: 1}
    assert "capture worker 0 died of SIGKILL (1 of 3 times)" in caplog.text
    assert "capture worker 0 died of exit code 1 (2 of 3 times)" in caplog.text


def test_a_fault_that_every_worker_would_meet_ends_all_of_them_at_once() -> None:
    scripts = Scripts([WAITS], [ENDS.format(code=2)])
    assert pool(scripts).run() == 2
    assert scripts.starts == {0: 1, 1: 1}
    assert all(process.poll() is not None for process in scripts.processes), "none is left running"


def test_a_worker_that_keeps_dying_ends_the_stage_with_the_way_it_died() -> None:
    scripts = Scripts([DIES], [WAITS])
    with pytest.raises(UserError, match=r"capture worker 0 died 3 times, the last time of SIGKILL .*deaths=2"):
        pool(scripts, max_deaths=2).run()
    assert scripts.processes[1].poll() is not None


def test_a_worker_ends_as_by_ctrl_c_when_the_one_that_started_it_is_gone() -> None:
    code = (
        "import sys, threading, time; from data_gen.stream_workers import leave_with_parent\n"
        "parent = threading.Thread(target=leave_with_parent, daemon=True)\n"
        "try:\n    parent.start()\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    sys.exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 7


def test_gpus_are_shared_out_evenly_or_refused() -> None:
    assert share_devices(2, ["0", "1", "2", "3"]) == ["0,1", "2,3"]
    assert share_devices(3, []) == []
    assert visible_devices({DEVICES: "4,5"}) == ["4", "5"]
    assert visible_devices({DEVICES: ""}) == []
    with pytest.raises(ConfigError, match=r"data\.stream\.workers=3: 4 GPUs do not share out evenly"):
        share_devices(3, ["0", "1", "2", "3"])


def test_counts_of_workers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.workers=-1"):
        StreamConfig(workers=-1).check()
