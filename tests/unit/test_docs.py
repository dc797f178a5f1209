"""The guides are true: their commands compose, keys exist, links lead somewhere, quotes stand in the sources."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash2_train.app import register_schema
from dflash2_train.config import load_config
from dflash2_train.config.reference import sections
from dflash2_train.evaluate import commands as evaluate_commands
from dflash2_train.export.commands import COMMANDS
from dflash2_train.runs import cli as runs_cli
from dflash2_train.sweep.grid import open_sweep
from tests.documents import GUIDES, ROOT, Command, anchors, blocks, commands, links, name_of, spans

ALL = [command for path in GUIDES for command in commands(path)]
OWN = ROOT / "conf" / "OWN_DRAFTER.md"
TROUBLE = ROOT / "dflash2_train" / "TROUBLESHOOTING.md"
GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
PLACEHOLDER_KEYS = ("name", "run_dir", "stage", "plan")
NO_KEY = (".py", ".json", ".jsonl", ".yaml", ".md", ".sh", ".png", ".log", ".pt", ".txt")


class ParsedError(Exception):
    """Raised in place of running a command whose options were understood."""


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML files that the guide for own drafters shows, as a reader would save them."""
    root = tmp_path_factory.mktemp("own")
    for body in blocks(OWN.read_text(), "yaml"):
        match = re.search(r"^# (mine/\S+\.yaml)$", body, re.MULTILINE)
        assert match is not None, body
        path = root / match.group(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return root / "mine"


def is_configured(command: Command) -> bool:
    """Whether Hydra reads its words, and not a parser of options."""
    if command.program == "dflash2-runs":
        return False
    return not command.words or command.words[0].startswith(("-", "+")) or "=" in command.words[0]


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers of options end the command when they have understood them."""
    whole = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: list[str] | None = None) -> None:
        whole(self, args)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


def test_the_guides_are_found_and_have_commands_to_check() -> None:
    names = {name_of(path) for path in GUIDES}
    assert {"README.md", "conf/README.md", "conf/OWN_DRAFTER.md", "data_gen/README.md", "launch/README.md"} <= names
    assert {"dflash2_train/TROUBLESHOOTING.md", "dflash2_train/evaluate/README.md"} <= names
    assert len(ALL) > 60
    assert {command.program for command in ALL} >= {f"dflash2-{end}" for end in ("gen-data", "train", "export", "eval")}


def configured() -> list[Command]:
    """Commands that Hydra reads, each composition once; one without a value is only named."""
    kept = {one.words: one for one in ALL if is_configured(one) and any("=" in word for word in one.words)}
    return list(kept.values())


def test_every_configured_command_composes_and_passes_the_rules(own_folder: Path) -> None:
    register_schema()
    for command in configured():
        words = [str(own_folder) if word == "mine" else word for word in command.words]
        try:
            if "--multirun" in words or "-m" in words:
                assert len(open_sweep(words).jobs) > 1
                continue
            with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                load_config(compose("config", overrides_of(words)))
        except Exception as error:
            error.add_note(str(command))
            raise


def overrides_of(words: list[str]) -> list[str]:
    """Hydra's overrides in a command line; an experiment is added where a phrase names none."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("--cfg", "--config-dir"):
            value = next(rest)
            kept += [f"hydra.searchpath=[file://{value}]"] if word == "--config-dir" else []
        elif not word.startswith("--"):
            kept.append("train.plan=true" if word == "plan=true" else word)
    return kept if any(word.startswith("+experiment=") for word in kept) else ["+experiment=smollm2_cpu", *kept]


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("command", [one for one in ALL if not is_configured(one)], ids=str)
def test_every_sub_command_of_the_guides_takes_the_options_shown(command: Command) -> None:
    name, words = command.words[0] if command.words else "", list(command.words[1:])
    known = {"dflash2-export": tuple(COMMANDS), "dflash2-eval": evaluate_commands.NAMES}
    assert command.program == "dflash2-runs" or name in known[command.program]
    if not words:
        return  # only named
    with pytest.raises(ParsedError):
        if command.program == "dflash2-export":
            COMMANDS[name].load()(words)
        elif command.program == "dflash2-eval":
            evaluate_commands.run_command([name, *words])
        else:
            runs_cli.run_command([name, *words])


@cache
def known_keys() -> set[str]:
    """Every key and every part of the schema."""
    keys = {place for part in sections() for place in part.paths}
    for part in sections():
        keys |= {f"{place}.{key.name}".lstrip(".") for place in part.paths for key in part.keys}
    return keys | {key.replace("[]", "") for key in keys}


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_every_key_that_a_guide_names_is_one_of_the_schema(path: Path) -> None:
    named = {word.split("=")[0].lstrip("+~") for span in spans(path.read_text()) for word in span.split()}
    groups = "|".join(sorted(GROUPS | {"loss"}))
    keys = {one for one in named if re.fullmatch(rf"({groups})(\.[a-z][a-z0-9_]*)+", one)}
    keys = {one for one in keys if not one.endswith(NO_KEY)}
    assert keys - known_keys() == set()


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for link in links(path):
        place, _, fragment = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), link


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_every_module_that_a_guide_runs_exists(path: Path) -> None:
    for module in re.findall(r"python -m ((?:tests|dflash2_train|data_gen)[\w.]*)", path.read_text()):
        assert importlib.util.find_spec(module) is not None, module


def messages() -> Iterator[str]:
    """Every text of the sources, with … for what is filled in, white space as one space."""
    for folder in ("dflash2_train", "data_gen"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield " ".join(node.value.split())
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    yield " ".join("".join(map(str, parts)).split())


def test_every_message_that_the_symptoms_quote_is_one_of_ours() -> None:
    quotes = re.findall(r"^> (.+)$", TROUBLE.read_text(), re.MULTILINE)
    assert len(quotes) > 30
    texts = list(messages())
    wanted = [" ".join(quote.split()) for quote in quotes]
    assert [quote for quote in wanted if not any(quote in text for text in texts)] == []


def test_every_symptom_tells_what_to_do() -> None:
    parts = re.split(r"^### ", TROUBLE.read_text(), flags=re.MULTILINE)[1:]
    assert len(parts) > 25
    for part in parts:
        title, _, body = part.partition("\n")
        prose = [line for line in body.splitlines() if line and not line.startswith((">", "#", "|"))]
        assert sum(map(len, prose)) > 60, title
