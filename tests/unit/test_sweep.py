"""A sweep refuses before it starts, gives each job a folder and all one cache, loses nothing, and ranks the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash2_train.config import ConfigError, UserError
from dflash2_train.exit_codes import EXIT_LOST_RANK, EXIT_STALLED, EXIT_STOPPED
from dflash2_train.runs.cli import run_command
from dflash2_train.runs.sweep import read_sweep
from dflash2_train.sweep.grid import Sweep, SweepJob, job_name, open_sweep
from dflash2_train.sweep.jobs import JobRecord, Signals
from dflash2_train.sweep.run import run_sweep

GRID = ("-m", "+experiment=smollm2_cpu", "loss.gamma=3,6.5", "drafter.num_layers=1,2")
# Leaves what training leaves: a curve whose forecast grows with gamma. Fails for the words that a test names.
TRAINER = """
import json, os, pathlib, signal, sys, time
folder, gamma, act = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if act == "fail":
    sys.exit(print("error: train.lr=9: must lie in (0, 1). Use 6e-4.", file=sys.stderr) or 2)
if act.isdigit():
    sys.exit(print("error: rank 1 is gone without a word.", file=sys.stderr) or int(act))
if act == "stop":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
(folder / "train").mkdir(parents=True, exist_ok=True)
rows = [{"step": step, "attempt": 1, "loss": 3.0 - gamma / 10, "selector_path": gamma / 10} for step in (1, 2)]
(folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
if act != "hand on":
    (folder / "export").mkdir(exist_ok=True)
    (folder / "export" / "config.json").write_text("{}")
with open(folder / "starts", "a") as file:
    file.write("x")
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grid of four jobs in a folder of its own, with captures that are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "cache" / "capture").mkdir(parents=True)
    (tmp_path / "cache" / "capture" / "manifest.json").write_text("{}")
    return [*GRID, "data.root=cache"]


@pytest.fixture
def two(words: list[str]) -> list[str]:
    """The two jobs of one swept key, where no more are needed."""
    return [*words, "drafter.num_layers=1"]


class FakeTrainer:
    """A command for each job; ``acts`` says which do something else than train."""

    def __init__(self, **acts: str) -> None:
        self.acts = acts

    def __call__(self, job: SweepJob) -> list[str]:
        act = next((act for words, act in self.acts.items() if words.replace("_", "-") in job.name), "train")
        return [sys.executable, "-c", TRAINER, str(job.folder), job.changes["loss.gamma"], act]


def starts(folder: Path) -> dict[str, int]:
    """How often each job trained."""
    return {path.parent.name: len(path.read_text()) for path in sorted(folder.glob("*/starts"))}


def test_jobs_are_all_combinations_each_in_a_folder_of_its_own_over_one_cache(words: list[str]) -> None:
    sweep = open_sweep(words)
    assert [job.changes for job in sweep.jobs] == [
        {"loss.gamma": gamma, "drafter.num_layers": layers} for gamma in ("3", "6.5") for layers in ("1", "2")
    ]
    assert sweep.folder == Path("runs/smollm2_cpu/sweep").resolve()
    assert {job.config.data.root for job in sweep.jobs} == {"cache"}
    for job in sweep.jobs:
        assert Path(job.config.train.output_dir) == job.folder / "train"
        assert Path(job.config.export.output_dir) == job.folder / "export"
        assert job.folder.parent == sweep.folder
    assert [job.config.loss.gamma for job in sweep.jobs] == [3.0, 3.0, 6.5, 6.5]


def test_without_a_root_the_cache_is_that_of_the_experiment_itself(words: list[str]) -> None:
    sweep = open_sweep(words[:-1])
    assert {job.config.data.root for job in sweep.jobs} == {"runs/smollm2_cpu/data"}


def test_a_jobs_words_give_its_configuration_again(two: list[str]) -> None:
    job = open_sweep([*two, "loss.kl_kind=choice(truncated,tail_bucket)"]).jobs[0]
    command = [sys.executable, "-W", "ignore", "-m", "dflash2_train.train", *job.words, "--cfg", "job", "--resolve"]
    source = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in ("root: cache", f"run_dir: {job.folder}", "kl_kind: truncated", "gamma: 3"):
        assert line in done.stdout


def test_the_package_lists_of_a_folder_of_ones_own_are_swept_too(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine" / "loss_grid").mkdir(parents=True)
    (tmp_path / "mine" / "loss_grid" / "gammas.yaml").write_text(
        "# @package _global_\nhydra: {sweep: {dir: elsewhere}, sweeper: {params: {loss.gamma: '2,4,8'}}}\n"
    )
    sweep = open_sweep(["-m", "--config-dir", "mine", "+experiment=smollm2_cpu", "+loss_grid=gammas"])
    assert [job.config.loss.gamma for job in sweep.jobs] == [2.0, 4.0, 8.0]
    assert sweep.folder == tmp_path / "elsewhere"
    assert sweep.jobs[0].words[:2] == ("--config-dir", str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["loss.gamma=1"], "nothing to sweep over"),
        (["name=a,b"], "cannot go over name"),
        (["train.output_dir=a,b"], "cannot go over train.output_dir"),
        (["train.output_dir=shared"], "lies outside the job's folder"),
        (["train.lr=interval(0,1)"], "an interval has no end of values"),
        (["train.lr=1e-3,7"], "job loss.gamma-3+train.lr-7: train.lr=7.0: must lie in (0, 1)"),
        (["train.lrr=1,2"], "lrr"),
        (["loss.gamma=3,3"], "stands there twice"),
        (["data.mode=stream"], "used once"),
        (["launch=slurm"], "only hands a job over"),
        (["--resolve"], "unrecognized arguments: --resolve"),
        (["--config-dir", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_first_job(two: list[str], more: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_sweep([*two, *more], command=FakeTrainer())
    assert said in str(caught.value)
    assert not Path("runs").exists()


def test_a_sweep_without_an_experiment_captures_or_as_a_rank_is_refused(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="Name one, as in"):
        open_sweep(["-m", "train.lr=1e-3,2e-3"])
    with pytest.raises(UserError, match="no captured samples there"):
        run_sweep([*two, "data.root=nowhere"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="one rank of several"):
        run_sweep(two)


def test_a_failing_job_costs_no_other_one_and_only_it_is_tried_again(two: list[str]) -> None:
    folder = Path("runs/smollm2_cpu/sweep")
    assert run_sweep(two, command=FakeTrainer(gamma_3="fail")) == 1
    failed = JobRecord.read(folder / "loss.gamma-3")
    assert failed is not None
    assert (failed.state, failed.exit_code) == ("failed", 2)
    assert failed.cause == "train.lr=9: must lie in (0, 1). Use 6e-4."
    assert starts(folder) == {"loss.gamma-6.5": 1}
    assert run_sweep(two, command=FakeTrainer()) == 0
    assert starts(folder) == {"loss.gamma-3": 1, "loss.gamma-6.5": 1}, "what was done is left alone"


def test_further_values_find_what_is_done_and_another_setting_does_not_pass_for_it(two: list[str]) -> None:
    folder = Path("runs/smollm2_cpu/sweep")
    run_sweep(two, command=FakeTrainer())
    run_sweep([*two, "loss.gamma=6.5,9"], command=FakeTrainer())
    assert set(starts(folder).values()) == {1} and len(starts(folder)) == 3
    assert len(read_sweep(folder).rows) == 3, "jobs of the earlier start stay in the table"
    run_sweep([*two, "train.lr=1e-3"], command=FakeTrainer())
    assert starts(folder)["loss.gamma-3"] == 2


def test_sigterm_reaches_the_running_job_and_no_further_one_starts(words: list[str]) -> None:
    folder = Path("runs/smollm2_cpu/sweep")
    before = signal.getsignal(signal.SIGTERM)
    code = run_sweep(words, command=FakeTrainer(gamma_3="stop"))
    assert code == EXIT_STOPPED
    assert signal.getsignal(signal.SIGTERM) == before
    assert [row.state for row in read_sweep(folder).rows] == ["stopped", "waiting", "waiting", "waiting"]
    assert run_sweep(words, command=FakeTrainer()) == 0


@pytest.mark.parametrize("code", [EXIT_LOST_RANK, EXIT_STALLED])
def test_a_job_whose_ranks_lost_one_another_is_stopped_with_the_cause_and_continued_later(
    two: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("runs/smollm2_cpu/sweep")
    assert run_sweep(two, command=FakeTrainer(gamma_3=str(code))) == EXIT_STOPPED
    lost = JobRecord.read(folder / "loss.gamma-3")
    assert lost is not None
    assert (lost.state, lost.exit_code, lost.cause) == ("stopped", code, "rank 1 is gone without a word.")
    told = "stopped, the same command continues it: rank 1 is gone without a word."
    assert (folder / "sweep.md").read_text().count(told) == 1
    assert capsys.readouterr().out.count(told) == 1
    assert starts(folder) == {"loss.gamma-6.5": 1}, "the other job was trained"
    assert run_sweep(two, command=FakeTrainer()) == 0
    assert set(starts(folder).values()) == {1}
    assert "Not at their end" not in (folder / "sweep.md").read_text()


def test_a_request_that_comes_while_a_job_is_being_started_reaches_it() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signals.watch(process)
        assert process.wait(20) == -signal.SIGTERM


def test_a_job_that_ends_well_without_an_export_is_not_done(two: list[str]) -> None:
    folder = Path("runs/smollm2_cpu/sweep")
    trainer = FakeTrainer(gamma_3="hand on")
    assert run_sweep(two, command=trainer) == EXIT_STOPPED
    assert sorted(row.state for row in read_sweep(folder).rows) == ["done", "stopped"]
    assert run_sweep(two, command=FakeTrainer()) == 0
    assert starts(folder)["loss.gamma-3"] == 2


def test_two_sweeps_in_one_folder_are_refused(two: list[str]) -> None:
    from dflash2_train.run_control import only_run_in

    with only_run_in(Path("runs/smollm2_cpu/sweep")), pytest.raises(UserError, match="in use by another dflash2-train"):
        run_sweep(two, command=FakeTrainer())


def test_the_table_ranks_by_what_was_reached_and_is_written_with_a_picture(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(words, command=FakeTrainer(layers_2="fail"))
    folder = Path("runs/smollm2_cpu/sweep")
    result = read_sweep(folder)
    assert result.by == "selector_path"
    assert result.columns[:4] == ["loss.gamma", "drafter.num_layers", "state", "selector_path"]
    best, second = (result.cells(row)[:4] for row in result.rows[:2])
    assert (best, second) == (["6.5", "1", "done", "0.65"], ["3", "1", "done", "0.3"])
    assert {row.state for row in result.rows[2:]} == {"failed"}
    assert result.label(result.rows[0]) == "gamma=6.5 num_layers=1"
    text = (folder / "sweep.md").read_text()
    assert "dflash2-train -m +experiment=smollm2_cpu" in text and "must lie in (0, 1)" in text
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert run_command(["sweep", "runs/smollm2_cpu", "--by", "loss"]) == 0
    assert [row.changes["loss.gamma"] for row in read_sweep(folder, by="loss").rows[:2]] == ["6.5", "3"]
    assert run_command(["sweep", "runs/smollm2_cpu", "--by", "bleu"]) == 2
    assert "There are: loss, selector_path, step" in capsys.readouterr().err
    assert run_command(["sweep", "cache"]) == 2


def test_names_of_jobs_are_plain_and_tell_apart_what_is_unlike() -> None:
    assert job_name({"loss.gamma": "3.0", "loss.kl_kind": "truncated"}) == "loss.gamma-3.0+loss.kl_kind-truncated"
    one, two = job_name({"train.betas": "[0.9,0.95]"}), job_name({"train.betas": "[0.9;0.95]"})
    assert one != two and "[" not in one
    assert len(job_name({"drafter.target_layer_ids": str(list(range(200)))})) < 140


def test_other_commands_refuse_multirun_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train.app import run_app

    monkeypatch.setattr(sys, "argv", ["dflash2-eval", "+experiment=smollm2_cpu", "--multirun", "eval.num_drafted=3,7"])
    with pytest.raises(SystemExit) as end:
        run_app("dflash2-eval", lambda config: 0)
    assert end.value.code == 2
    assert "dflash2-eval takes no --multirun" in capsys.readouterr().err


def test_the_record_tells_how_to_repeat_the_sweep(two: list[str]) -> None:
    run_sweep(two, command=FakeTrainer())
    record = json.loads(Path("runs/smollm2_cpu/sweep/sweep.json").read_text())
    assert record["command"] == ["dflash2-train", *two]
    assert "commit" in record["git"] and "torch" in record["packages"]
    assert isinstance(open_sweep(record["command"][1:]), Sweep)
