"""Where a command runs, what is refused before it starts, and which end of many is the cause."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash2_train.config import ConfigError, RunConfig, UserError
from dflash2_train.exit_codes import EXIT_LOST_RANK, EXIT_STALLED
from dflash2_train.launching import checks, environment, shards
from dflash2_train.launching.checks import check_port, check_unused, prepare_folder, ranks_here
from dflash2_train.launching.command import AS_NODE, Command, start
from dflash2_train.launching.environment import devices_of, import_path, refuse_bare_srun, without_ranks
from dflash2_train.launching.follow import Follow, keep_older, last_lines
from dflash2_train.launching.hosts import Host, even_ranks, read_hosts, run_on_hosts
from dflash2_train.launching.job import Job, new_job
from dflash2_train.launching.outcome import CRASH, DONE, FAULT, Failure, Outcome, cause_of, combined_code
from dflash2_train.launching.shards import plan_spread, shard_config, spread_stages
from dflash2_train.launching.slurm import job_script, submit


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (checks, environment, shards):
        monkeypatch.setattr(module, "visible_gpus", lambda: count)


def command(**changes: object) -> Command:
    values = {"name": "dflash2-train", "module": "dflash2_train.train", "main": lambda config: 0} | changes
    return Command(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("launch.kind", "cloud", "must be one of"),
        ("launch.ranks", 0, "must be positive"),
        ("launch.slurm.time", "four hours", "limit as sbatch takes it"),
        ("launch.slurm.options", ["mem=0"], "one sbatch option"),
        ("launch.hosts.file", None, "must name the list"),
        ("launch.hosts.environment", ["A=b"], "without a value"),
        ("launch.hosts.environment", ["HF_TOKEN"], "process list"),
        ("launch.hosts.port", 70000, "must be a port"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_by_key(tiny_config: RunConfig, key: str, value: object, words: str) -> None:
    launch = tiny_config.launch
    launch.kind = "slurm" if "slurm" in key else "hostfile" if "hosts" in key else "local"
    launch.hosts.file = "hosts"
    *path, name = key.split(".")[1:]
    setattr(getattr(launch, path[0]) if path else launch, name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        launch.check()
    assert key in str(caught.value)


# --- who starts ranks -----------------------------------------------------------------------------------------------


def test_a_rank_of_another_launcher_starts_nothing(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tiny_config.launch.kind, tiny_config.launch.ranks = "slurm", 8
    assert start(command(main=lambda config: 5), tiny_config) == 5


def test_one_rank_stays_in_this_process(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 0)
    assert start(command(main=lambda config: os.getpid()), tiny_config) == os.getpid()


def test_a_command_for_one_process_starts_one_on_a_machine_of_eight(
    tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 8)
    alone = command(main=lambda config: 5, single=lambda config: True)
    assert start(alone, tiny_config) == 5
    tiny_config.launch.kind = "slurm"
    with pytest.raises(ConfigError, match="work for one process"):
        start(alone, tiny_config)


def test_tasks_of_srun_without_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(ConfigError, match="launch=slurm"):
        refuse_bare_srun("dflash2-train")


def test_every_visible_gpu_gets_a_rank_and_more_than_there_are_is_refused(
    tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 8)
    launch = tiny_config.launch
    assert ranks_here(launch) == 8
    launch.ranks = 4
    assert ranks_here(launch) == 4
    launch.ranks = 9
    with pytest.raises(ConfigError, match=r"launch\.ranks=9: this machine has 8 GPUs"):
        ranks_here(launch)
    see_gpus(monkeypatch, 0)
    launch.ranks = 2
    assert ranks_here(launch) == 2


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(environment, "NVIDIA_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="the driver lists 1 GPUs"):
        environment.visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.visible_gpus() == 0


def test_a_command_run_behind_training_finds_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with without_ranks():
        assert "WORLD_SIZE" not in os.environ
    assert os.environ["WORLD_SIZE"] == "8"


@pytest.mark.parametrize(
    ("module", "started"),
    [("dflash2_train.train", "rank"), ("dflash2_train.evaluate.cli", "rank"), ("data_gen.cli", "shard")],
)
def test_each_command_shows_the_processes_it_would_start_and_starts_none(
    module: str, started: str, tmp_path: Path, repo_root: Path
) -> None:
    words = ["+experiment=smollm2_cpu", f"run_dir={tmp_path}/run", "launch.ranks=2", "launch.dry_run=true"]
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    members = [line for line in done.stdout.splitlines() if f"-P -m {module} --as-member {tmp_path}/run/logs/" in line]
    shards = ("/shard0/", "/shard1/")  # of regenerate, then of capture
    marks = ("RANK=0 WORLD_SIZE=2", "RANK=1 WORLD_SIZE=2") if started == "rank" else (*shards, *shards)
    assert all(mark in line for mark, line in zip(marks, members, strict=True))
    assert not (tmp_path / "run").exists()


# --- shards ---------------------------------------------------------------------------------------------------------


def test_shards_take_their_gpus_in_groups_of_one_target(
    tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tiny_config.target.tensor_parallel_size = 4
    spread = plan_spread(tiny_config)
    assert (spread.count, spread.devices) == (2, 4)
    assert [devices_of(number, 4) for number in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,6,7")
    assert devices_of(1, 2) == "6,7"
    tiny_config.launch.ranks = 3
    with pytest.raises(ConfigError, match=r"launch\.ranks=2"):
        plan_spread(tiny_config)


def test_shards_of_all_nodes_are_the_jobs_of_one_array(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    tiny_config.stage = "regenerate"
    jobs = []
    for node in range(3):
        spread = plan_spread(tiny_config, node=node, nodes=3)
        jobs += [shard_config(tiny_config, spread, number).data for number in range(spread.count)]
    assert [(data.shard_index, data.num_shards) for data in jobs] == [(number, 6) for number in range(6)]


@pytest.mark.parametrize("changes", [{"num_shards": 4}, {"backend": "server"}, {"stage": "verify"}, {"stage": "plan"}])
def test_what_is_numbered_served_or_whole_already_stays_one_process(
    tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    see_gpus(monkeypatch, 8)
    config = replace(tiny_config, stage=str(changes.get("stage", "regenerate")))
    config.data = replace(config.data, **{key: value for key, value in changes.items() if key != "stage"})
    assert plan_spread(config).count == 1


def test_where_servers_answer_every_gpu_still_captures(tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 8)
    config = replace(tiny_config, stage="all", data=replace(tiny_config.data, backend="server", capture_backend="hf"))
    counts = {stage.stage: spread.count for stage, spread in spread_stages(config)}
    assert counts == {"regenerate": 1, "capture": 8, "verify": 1}


def test_nodes_that_cannot_share_a_stage_are_refused(tiny_config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="stage=regenerate on all"):
        plan_spread(tiny_config, node=0, nodes=2)


# --- folders and ports ----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", Path("/sys/dflash2-train"), Path("/proc/dflash2-train")):
        with pytest.raises(UserError, match=rf"run_dir='{folder}': nothing can be written there \(.*another run_dir"):
            prepare_folder(folder, "run_dir")
    prepare_folder(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checks.tempfile, "NamedTemporaryFile", read_only)
    with pytest.raises(UserError, match=r"train\.output_dir=.*Read-only file system"):
        prepare_folder(tmp_path / "run")


def test_a_folder_in_use_names_who_holds_it_and_a_lock_left_over_is_no_matter(
    tiny_config: RunConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    other = new_job("dflash2-train", tiny_config)
    other.write()
    mine = new_job("dflash2-train", tiny_config)
    (folder / ".lock").write_text("")
    check_unused(folder, mine)
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"in use by another dflash2-train, started here as process {os.getpid()}"):
            check_unused(folder, mine)
        replace(other, host="elsewhere").write()
        with pytest.raises(UserError, match="started on elsewhere"):
            check_unused(folder, mine)
    check_unused(folder, mine)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: cannot be used"):
            check_port(port, "launch.hosts.port")
    check_port(port, "launch.hosts.port")


def test_a_job_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"unknown": 1}')
    with pytest.raises(UserError, match="not a job file"):
        Job.read(tmp_path / "job.json")
    with pytest.raises(UserError, match="same path on every node"):
        Job.read(tmp_path / "none.json")


def test_nodes_that_do_not_meet_in_time_end_with_where_and_how_long(tiny_config: RunConfig) -> None:
    from dflash2_train.launching.ranks import Node, run_ranks

    tiny_config.launch.meet_timeout_s = 1.0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    job = new_job("dflash2-train", tiny_config)
    with pytest.raises(UserError, match=rf"2 nodes did not all meet at {address} within launch\.meet_timeout_s=1"):
        run_ranks(job, ["true"], tiny_config.launch, Node(ranks=1, index=1, count=2, address=address))


# --- logs -----------------------------------------------------------------------------------------------------------


def test_what_is_written_shows_whole_and_older_logs_are_kept(tmp_path: Path) -> None:
    path, shown = tmp_path / "stdout.log", io.StringIO()
    with Follow(path, shown):
        with open(path, "w") as file:
            file.write("one\ntwo")
            file.flush()
            time.sleep(0.25)
            file.write(" words\n")
    assert shown.getvalue() == "one\ntwo words\n"
    keep_older(path)
    path.write_text("next\n")
    keep_older(path)
    assert [(tmp_path / name).read_text()[:4] for name in ("stdout.1.log", "stdout.2.log")] == ["one\n", "next"]
    assert last_lines(tmp_path / "stdout.1.log", 1) == ["two words"]


# --- ends -----------------------------------------------------------------------------------------------------------


def failure(rank: int, code: int, *, seen: float = 0.0, kind: str = "", time: float = 0.0, said: int = 1) -> Failure:
    outcome = Outcome(kind=kind, code=said, message=f"message {rank}", time=time) if kind else None
    return Failure(member=f"rank {rank}", exit_code=code, seen=seen, outcome=outcome, log=Path("log"))


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        pytest.param([failure(0, 1, kind=CRASH, time=5.0), failure(1, -9)], 1, id="killed, the other lost its peer"),
        pytest.param([failure(0, 2, kind=FAULT), failure(1, -9, seen=30.0)], 0, id="killed by us, long after"),
        pytest.param([failure(0, 2, kind=FAULT, time=5.1), failure(1, 2, kind=FAULT, time=5.0)], 0, id="both refused"),
        pytest.param([failure(0, 1, kind=CRASH, time=5.1), failure(1, 1, kind=CRASH, time=5.0)], 1, id="the earliest"),
        pytest.param([failure(0, -6), failure(1, 2, kind=FAULT)], 1, id="aborted over the other's fault"),
        pytest.param([failure(0, -15), failure(1, -11)], 1, id="ended by us"),
    ],
)
def test_the_cause_is_the_end_that_the_others_followed_from(failures: list[Failure], cause: int) -> None:
    assert cause_of(failures).member == f"rank {cause}"


def test_a_failed_job_never_ends_with_the_code_of_a_stop() -> None:
    assert failure(0, -signal.SIGTERM).code() == 1
    assert failure(0, 143, kind="stopped", said=143).code() == 1
    assert failure(0, -9).code() == 137
    assert failure(0, 2, kind=FAULT, said=2).code() == 2


def test_a_job_in_good_order_ends_with_its_no_its_stop_or_nothing() -> None:
    def codes(*values: int) -> int:
        return combined_code([Outcome(kind=DONE, code=value) for value in values])

    assert [codes(0, 0), codes(143, 143), codes(1, 0), codes(143, 7)] == [0, 143, 1, 7]


# --- Slurm ----------------------------------------------------------------------------------------------------------


def test_the_slurm_script_stops_before_the_limit_queues_again_and_passes_shellcheck(
    tiny_config: RunConfig, tmp_path: Path
) -> None:
    slurm = tiny_config.launch.slurm
    slurm.nodes, slurm.partition, slurm.setup, slurm.options = 4, "gpu", ["module load cuda"], ["--mem=0"]
    job = new_job("dflash2-train", tiny_config)
    script = job_script(tiny_config, job, command().words(AS_NODE))
    for line in ("--nodes=4", "--ntasks-per-node=1", "--signal=TERM@120", "--requeue", "--partition=gpu", "--mem=0"):
        assert f"#SBATCH {line}\n" in script
    assert script.index("module load cuda") < script.index("srun --kill-on-bad-exit=1")
    assert f"--as-node {job.file} --address" in script
    path = tmp_path / "job.sbatch"
    path.write_text(script)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([str(shellcheck), str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("of_srun", "in_file", "code", "queued"),
    [(0, 143, 0, 1), (0, 1, 1, 0), (137, 143, 137, 0), (EXIT_LOST_RANK, 0, 0, 1), (EXIT_STALLED, 0, 0, 1)],
)
def test_a_stop_in_good_order_and_a_lost_rank_are_queued_again_and_nothing_else(
    tiny_config: RunConfig, tmp_path: Path, of_srun: int, in_file: int, code: int, queued: int
) -> None:
    job = new_job("dflash2-train", tiny_config)
    job.logs.mkdir(parents=True)
    script = job_script(tiny_config, job, command().words(AS_NODE))
    (tmp_path / "job.sbatch").write_text(script)
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho {in_file} > {job.exit_file}\nexit {of_srun}\n")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n[ $1 = requeue ] && touch {tmp_path}/queued\necho node1\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    surroundings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", str(tmp_path / "job.sbatch")], env=surroundings, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "queued").exists() == bool(queued)


def test_a_job_that_loses_ranks_again_and_again_is_not_queued_for_ever(tiny_config: RunConfig, tmp_path: Path) -> None:
    tiny_config.launch.slurm.lost_requeues = 2
    job = new_job("dflash2-train", tiny_config)
    job.logs.mkdir(parents=True)
    (tmp_path / "job.sbatch").write_text(job_script(tiny_config, job, command().words(AS_NODE)))
    for name, text in (("srun", f"exit {EXIT_LOST_RANK}"), ("scontrol", "echo node1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    surroundings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}
    script = ["bash", str(tmp_path / "job.sbatch")]
    codes = [subprocess.run(script, env=surroundings, capture_output=True).returncode for _ in range(3)]
    assert codes == [0, 0, EXIT_LOST_RANK]


def test_a_dry_run_prints_the_script_and_writes_nothing(
    tiny_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.launch.kind, tiny_config.launch.dry_run = "slurm", True
    assert start(command(), tiny_config) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash\n#SBATCH")
    assert printed.splitlines()[-1].startswith("sbatch --parsable ")
    assert not (Path(tiny_config.run_dir) / "logs").exists()


def test_what_sbatch_says_is_told(tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        submit(command(), tiny_config)
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "invalid partition" >&2\nexit 1\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    with pytest.raises(UserError, match="sbatch refused it: invalid partition"):
        submit(command(), tiny_config)
    (script,) = (Path(tiny_config.run_dir) / "logs").glob("*.sbatch")
    assert "--gpus-per-node=8" in script.read_text()
    assert Job.read(script.with_suffix(".json")).config["launch"]["ranks"] == 8


# --- hosts ----------------------------------------------------------------------------------------------------------


def test_a_list_of_hosts_is_read_and_its_faults_have_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# head\nme@a slots=8\n\nb   slots=8  # spare\n")
    hosts = read_hosts(path)
    assert [(host.name, host.address, host.slots) for host in hosts] == [("me@a", "a", 8), ("b", "b", 8)]
    for text, words in [
        ("a slots=8\n-oProxyCommand=x slots=8", "hosts:2: .*is not `host slots=N`"),
        ("a", "is not `host slots=N`"),
        ("a slots=0", "is not `host slots=N`"),
        ("a slots=8\na slots=4", "hosts:2: a stands there twice"),
        ("# none", "lists no host"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_hosts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hosts(tmp_path / "nothing")


def test_uneven_hosts_are_refused_with_a_number_that_fits_all() -> None:
    hosts = [Host(name="a", slots=8), Host(name="b", slots=4)]
    with pytest.raises(ConfigError, match=r"uneven \(a 8, b 4\).*launch\.ranks=4"):
        even_ranks(hosts, None)
    assert even_ranks(hosts, 4) == 4
    with pytest.raises(ConfigError, match="a host has fewer slots"):
        even_ranks(hosts, 8)


def test_a_dry_run_over_hosts_prints_every_probe_and_every_start(
    tiny_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    launch = tiny_config.launch
    launch.kind, launch.dry_run, launch.hosts.file = "hostfile", True, str(tmp_path / "hosts")
    assert run_on_hosts(command(), tiny_config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("ssh -o BatchMode=yes ") and import_path() in line for line in lines)
    assert ["--port" in line for line in lines] == [True, False, False, False]
    assert [f"--address a:29500 --node {node} --watch-input" in lines[2 + node] for node in (0, 1)] == [True, True]
    assert not (Path(tiny_config.run_dir) / "logs").exists()


def test_a_variable_that_this_shell_lacks_is_refused(tiny_config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=8\n")
    tiny_config.launch.hosts.file = str(tmp_path / "hosts")
    tiny_config.launch.hosts.environment = ["NCCL_NOT_SET_ANYWHERE"]
    with pytest.raises(ConfigError, match="NCCL_NOT_SET_ANYWHERE"):
        run_on_hosts(command(), tiny_config)
