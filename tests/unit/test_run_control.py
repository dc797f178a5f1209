"""One run a folder, found out before anything is spent; and a run is asked to stop by signals and by the clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash2_train.config import ConfigError, GuardConfig, RunConfig, UserError
from dflash2_train.run_control import (
    SCHEDULER_END,
    STOP_SIGNALS,
    StopRequest,
    ends_of_job,
    only_run_in,
)
from dflash2_train.train import train


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_second_run_in_a_folder_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with (
        only_run_in(tmp_path / "run"),
        pytest.raises(UserError, match=rf"in use by another dflash2-train \(process {os.getpid()} of "),
        only_run_in(tmp_path / "run"),
    ):
        pass


def test_what_a_dead_run_left_in_its_lock_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"host": "gone", "pid": 1, "since": "yesterday"}')
    with only_run_in(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_a_place_where_no_export_can_be_made_is_refused_before_the_first_step(tiny_config: RunConfig) -> None:
    tiny_config.export.output_dir = "/proc/nowhere/export"
    with pytest.raises(UserError, match=r"export\.output_dir='/proc/nowhere': nothing can be written there"):
        train(tiny_config)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_to_stop_and_names_itself(number: signal.Signals) -> None:
    stop = StopRequest()
    assert stop.reason == ""
    signal.raise_signal(number)
    assert stop.reason == number.name


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    StopRequest()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_limit_in_time_asks_to_stop_once_it_has_come() -> None:
    stop = StopRequest()
    stop.stop_in(3600, "later")
    assert stop.reason == ""
    stop.stop_in(0, "train.max_seconds=0")
    assert stop.reason == "train.max_seconds=0"


@pytest.mark.parametrize(("left", "asked"), [(400.0, False), (200.0, True)])
def test_a_run_leaves_a_margin_before_the_scheduler_ends_its_job(left: float, asked: bool) -> None:
    stop = StopRequest()
    stop.heed(GuardConfig(end_margin_seconds=300), {SCHEDULER_END: str(int(time.time() + left))})
    assert (SCHEDULER_END in stop.reason) is asked


def test_the_end_of_a_job_is_read_as_seconds_or_as_a_date_and_the_scheduler_can_be_ignored() -> None:
    moment = datetime(2026, 11, 30, 18, tzinfo=UTC)
    for text in (moment.isoformat(), str(int(moment.timestamp())), "2026-11-30T18:00:00Z"):
        ((end, why),) = ends_of_job(GuardConfig(end_time=text), {})
        assert end == moment.timestamp()
        assert text in why
    assert ends_of_job(GuardConfig(scheduler_end=False), {SCHEDULER_END: "17"}) == []


def test_an_end_that_is_no_time_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME='soon'"):
        ends_of_job(GuardConfig(), {SCHEDULER_END: "soon"})
    for text in ("soon", "2026-11-30T18:00:00"):
        with pytest.raises(ConfigError, match=r"train\.guard\.end_time=.*with its zone"):
            GuardConfig(end_time=text).check()


def test_limits_that_contradict_each_other_are_refused_by_key() -> None:
    GuardConfig(stall_seconds=None, stall_exit_seconds=None).check()
    with pytest.raises(ConfigError, match=r"train\.guard\.stall_exit_seconds=5.*stall_seconds=9"):
        GuardConfig(stall_seconds=9, stall_exit_seconds=5).check()
    with pytest.raises(ConfigError, match=r"train\.guard\.collective_timeout_seconds=0"):
        GuardConfig(collective_timeout_seconds=0).check()
