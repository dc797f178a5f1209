"""The front of ``dflash2-export``: which words are sub-commands, and that asking for one loads nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from dflash2_train.app import EXIT_FAULT
from dflash2_train.config import UserError
from dflash2_train.export import commands
from dflash2_train.export.commands import COMMANDS, Command, dispatch

HERE = "tests.unit.test_commands"


def answer_seven(argv: Sequence[str]) -> int:
    return 7 if list(argv) == ["a", "--b"] else 0


def refuse(argv: Sequence[str]) -> int:
    raise UserError(f"{argv[0]}: is no drafter. Name another.")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands of this module in the place of the real ones."""
    stub = {
        "seven": Command(module=HERE, function="answer_seven", summary="seven"),
        "refuse": Command(module=HERE, function="refuse", summary="no"),
    }
    monkeypatch.setattr(commands, "COMMANDS", stub)


@pytest.mark.usefixtures("table")
def test_a_sub_command_gets_the_words_after_its_name_and_gives_the_exit_code() -> None:
    assert dispatch(["seven", "a", "--b"]) == 7
    assert dispatch(["seven"]) == 0


@pytest.mark.usefixtures("table")
def test_a_users_fault_in_a_sub_command_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["refuse", "x"]) == EXIT_FAULT
    assert capsys.readouterr().err == "error: x: is no drafter. Name another.\n"


@pytest.mark.parametrize("argv", [[], ["+experiment=x"], ["--cfg", "job"], ["export.dtype=float32"], ["~data"]])
def test_what_hydra_takes_is_left_to_hydra(argv: list[str]) -> None:
    assert dispatch(argv) is None


def test_an_unknown_word_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["doctr", "folder"]) == EXIT_FAULT
    error = capsys.readouterr().err
    assert "'doctr'" in error
    assert all(name in error for name in COMMANDS)


def test_help_names_the_sub_commands_before_hydras_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--help"]) is None
    assert "dflash2-export doctor" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_sub_command_answers_help_without_loading_torch(name: str) -> None:
    code = (
        "import sys\n"
        "from dflash2_train.export.commands import dispatch\n"
        "try:\n"
        f"    dispatch([{name!r}, '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
