"""Commands that start their own processes: ranks of this machine, shards, and nodes over a stand-in for ssh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash2_train.config import RunConfig, to_plain
from tests.cases import tiny_run_config
from tests.integration.run_launched import MODULE
from tests.integration.trainings import STEPS, curve, variant, weights

LIMIT_S = 240


def launch(name: str, config: RunConfig) -> subprocess.Popen[str]:
    path = Path(config.run_dir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_plain(config)))
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, name, str(path)],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(process: subprocess.Popen[str], *, expect: int) -> tuple[str, str]:
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == expect, output + errors
    return output, errors


def two_ranks(root: Path) -> RunConfig:
    config = tiny_run_config(root)
    config.launch.ranks = 2
    return config


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(path.exists() for path in paths)


def test_ranks_started_by_the_command_train_as_under_a_launcher(
    base: RunConfig, on_two_ranks: RunConfig, tmp_path: Path
) -> None:
    own = variant(base, tmp_path, rows=1)
    own.run_dir, own.launch.ranks = str(tmp_path), 2
    outputs(launch("train", own), expect=0)
    assert curve(own) == curve(on_two_ranks)
    expected, found = weights(on_two_ranks), weights(own)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (Path(own.export.output_dir) / "mask_embedding.pt").exists()
    logs = Path(own.run_dir) / "logs"
    assert f"train {STEPS}/{STEPS}" in (logs / "rank0" / "stderr.log").read_text()
    assert f"train {STEPS}/{STEPS}" not in (logs / "rank1" / "stderr.log").read_text()
    record = json.loads((Path(own.train.output_dir) / "run.json").read_text())
    assert record["command"][0] == "dflash2-train"


def test_a_stopped_run_of_two_ranks_saves_and_the_same_command_continues(base: RunConfig, tmp_path: Path) -> None:
    config = variant(base, tmp_path, steps=4000, save_every=100000, rows=1)
    config.run_dir, config.launch.ranks = str(tmp_path), 2
    process = launch("train", config)
    wait_for(Path(config.train.output_dir) / "metrics.jsonl")
    second = launch("train", config)
    _, errors = outputs(second, expect=2)
    assert f"in use by another dflash2-train, started here as process {process.pid}" in errors
    process.send_signal(signal.SIGTERM)
    outputs(process, expect=143)
    saved = sorted(Path(config.train.output_dir).glob("step*"))
    assert len(saved) == 1
    assert load_file(saved[0] / "exp_avg.safetensors")


def test_the_console_shows_the_first_rank_alone_and_its_exit_code_is_the_commands(tmp_path: Path) -> None:
    output, errors = outputs(launch("says", two_ranks(tmp_path)), expect=7)
    assert output.startswith("rank 0 of 2 says tiny ['says', ")
    assert "rank 1" not in output + errors
    logs = tmp_path / "logs" / "says"
    assert "rank 1 of 2 says tiny" in (logs / "rank1" / "stdout.log").read_text()
    outputs(launch("says", two_ranks(tmp_path)), expect=7)
    assert "rank 0" in (logs / "rank0" / "stdout.1.log").read_text(), "the log of the first start is kept"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("dies", 137, "rank 1 of 2 was killed by SIGKILL"),
        ("refuses", 2, "rank 1 of 2 failed: data.root=x: is empty. Fill it."),
        ("breaks", 1, "rank 1 of 2 failed: ZeroDivisionError: in rank 1"),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named_with_the_cause(
    name: str, code: int, words: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    _, errors = outputs(launch(name, two_ranks(tmp_path)), expect=code)
    assert f"error: {words}" in errors
    assert str(tmp_path / "logs" / name / "rank1" / "stderr.log") in errors
    assert ('raise ZeroDivisionError("in rank 1")' in errors) == (name == "breaks"), "a bug shows where it is"
    assert time.monotonic() - started < 90, "the rank that waits for ever was ended"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_reaches_every_rank_and_all_may_save_before_the_job_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = launch("waits", two_ranks(tmp_path))
    notes = [tmp_path / f"note-{rank}-0" for rank in (0, 1)]
    wait_for(*notes)
    process.send_signal(number)
    outputs(process, expect=143)
    assert [note.read_text() for note in notes] == ["ready\nsaved\n"] * 2


def test_ranks_stop_in_good_order_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    process = launch("waits", two_ranks(tmp_path))
    notes = [tmp_path / f"note-{rank}-0" for rank in (0, 1)]
    wait_for(*notes)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any("saved" not in note.read_text() for note in notes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [note.read_text() for note in notes] == ["ready\nsaved\n"] * 2


def test_data_generation_goes_into_shards_and_what_cannot_be_divided_follows_in_one_process(tmp_path: Path) -> None:
    config = two_ranks(tmp_path)
    outputs(launch("divides", config), expect=0)
    assert (tmp_path / "note-x-1").read_text() == "regenerate 1 of 2\ncapture 1 of 2\n"
    notes = (tmp_path / "note-x-0").read_text().splitlines()
    assert notes == ["regenerate 0 of 2", "capture 0 of 2", "verify 0 of 1"]


def test_a_shard_that_fails_leaves_the_others_to_finish_and_is_named(tmp_path: Path) -> None:
    config = two_ranks(tmp_path)
    config.data.sampling.seed = 1
    _, errors = outputs(launch("divides", config), expect=2)
    assert "error: shard 1 of 2 failed: shard 1 has no prompts." in errors
    assert (tmp_path / "note-x-0").read_text() == "regenerate 0 of 2\n"


SSH = """#!/usr/bin/env bash
# A stand-in for ssh: drops the options, and runs the command here unless the host is the one that is down.
while [ "$1" = -o ]; do shift 2; done
if [ "$1" = down ]; then echo "connect to host down: no route" >&2; exit 255; fi
exec bash -c "$2"
"""


def over_ssh(root: Path, *hosts: str) -> RunConfig:
    config = tiny_run_config(root)
    config.launch.kind = "hostfile"
    (root / "ssh").write_text(SSH)
    (root / "ssh").chmod(0o755)
    (root / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    config.launch.hosts.file, config.launch.hosts.ssh = str(root / "hosts"), [str(root / "ssh")]
    config.launch.hosts.environment = ["LAUNCHED_TEST"]
    with socket.socket() as probe:
        probe.bind(("", 0))
        config.launch.hosts.port = probe.getsockname()[1]
    return config


def test_two_hosts_form_one_job_with_one_console_and_its_exit_code(tmp_path: Path) -> None:
    output, errors = outputs(launch("says", over_ssh(tmp_path, "127.0.0.1", "localhost")), expect=7)
    assert output.startswith("rank 0 of 2 says tiny"), errors
    assert "rank 1" not in output
    assert "rank 1 of 2" in (tmp_path / "logs" / "says" / "rank1" / "stdout.log").read_text()


def test_a_signal_reaches_the_ranks_of_every_host(tmp_path: Path) -> None:
    process = launch("waits", over_ssh(tmp_path, "127.0.0.1", "localhost"))
    notes = [tmp_path / f"note-{rank}-0" for rank in (0, 1)]
    wait_for(*notes)
    process.send_signal(signal.SIGTERM)
    outputs(process, expect=143)
    assert [note.read_text() for note in notes] == ["ready\nsaved\n"] * 2


def test_a_rank_that_fails_on_one_host_ends_the_others(tmp_path: Path) -> None:
    _, errors = outputs(launch("refuses", over_ssh(tmp_path, "127.0.0.1", "localhost")), expect=2)
    assert "error: rank 1 of 2 failed: data.root=x: is empty. Fill it." in errors
    assert "error: node 1 of 2 (localhost) ended with exit code 2" in errors


def test_hosts_that_cannot_be_reached_and_a_port_in_use_are_named_before_anything_starts(tmp_path: Path) -> None:
    config = over_ssh(tmp_path, "127.0.0.1", "down")
    with socket.socket() as taken:
        taken.bind(("", config.launch.hosts.port))
        taken.listen()
        _, errors = outputs(launch("says", config), expect=2)
    assert "down: cannot be reached or used (ssh exit code 255: connect to host down: no route)" in errors
    assert f"127.0.0.1: launch.hosts.port={config.launch.hosts.port}: cannot be used" in errors
    assert not (tmp_path / "logs" / "says" / "rank0").exists()
