"""Commands end with one clear line and a fixed exit code for every fault that a user can mend."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from omegaconf import DictConfig, OmegaConf

from dflash2_train.app import EXIT_FAULT, EXIT_INTERRUPTED, run_app, run_guarded
from dflash2_train.config import RunConfig, UserError
from tests.unit.test_config import COMPLETE
from tests.unit.test_imports import HEAVY


def composed() -> DictConfig:
    return OmegaConf.create(COMPLETE)


def raising(error: BaseException) -> int:
    def main(_: RunConfig) -> int:
        raise error

    return run_guarded(main, composed())


def test_the_commands_own_exit_code_is_passed_on() -> None:
    assert run_guarded(lambda config: 7 if config.name == "tiny" else 0, composed()) == 7


def test_a_users_fault_is_one_line_on_stderr_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(UserError("data.root=x: is empty. Fill it.")) == EXIT_FAULT
    assert capsys.readouterr().err == "error: data.root=x: is empty. Fill it.\n"


def test_a_fault_behind_which_one_starts_again_has_an_exit_code_of_its_own() -> None:
    class LostError(UserError):
        exit_code = 75

    assert raising(LostError("rank 1 is gone.")) == 75
    LostError.exit_code = 1  # for a bug of another rank; its traceback is shown there
    assert raising(LostError("rank 1 ended.")) == 1


def test_a_full_disk_is_a_users_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(OSError(errno.ENOSPC, "No space left on device", "shard-00001")) == EXIT_FAULT
    assert "No space left on device" in capsys.readouterr().err


def test_ctrl_c_leaves_with_130() -> None:
    assert raising(KeyboardInterrupt()) == EXIT_INTERRUPTED


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.lrr=1e-3", "train.lrr"),
        ("launch.ranks=eight", "could not be converted to Integer"),
        ("+experiment=nothing", "smollm2_cpu"),
        ("train.lr=[", "no viable alternative at input '['"),
    ],
)
def test_what_hydra_cannot_compose_is_a_fault_to_mend(
    word: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "+experiment=smollm2_cpu", word])
    with pytest.raises(SystemExit) as end:
        run_app("dflash2-train", lambda config: 0)
    assert end.value.code == EXIT_FAULT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["+experiment=smollm2_cpu", "--cfg", "job"]], ids=["help", "cfg"])
@pytest.mark.parametrize(
    "module", ["dflash2_train.train", "dflash2_train.export.cli", "dflash2_train.evaluate.cli", "data_gen.cli"]
)
def test_help_and_config_answer_without_loading_a_heavy_library(module: str, words: list[str]) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', *{words!r}]\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        f"loaded = set({HEAVY!r}) & set(sys.modules)\n"
        "assert not loaded, f'{loaded} were imported'\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("name: smollm2_cpu" if "--cfg" in words else "+experiment=smollm2_cpu") in done.stdout
