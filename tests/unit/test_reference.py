"""The reference of keys is current, whole, and says of each what it means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash2_train.config import ConfigError, LossConfig, RunConfig, to_plain
from dflash2_train.config.reference import PAGE, Key, Section, main, render, sections
from dflash2_train.config.reference_meanings import meanings
from dflash2_train.config.reference_rules import Rule, read_rules
from tests.cases import tiny_run_config


@dataclass(kw_only=True)
class Sample:
    """Fields as the schema has them."""

    plain: int = 1  # a count; None = off
    # Said above
    # in two lines,
    both: list[int] = dataclasses.field(default_factory=list)  # and behind.

    # A line that stands apart says nothing about what follows it.

    bare: str = "#"


def by_path() -> dict[str, tuple[Section, str]]:
    """Section and name of every key, by its dotted path."""
    found = {}
    for part in sections():
        for place in part.paths:
            found.update({f"{place}.{key.name}".lstrip("."): (part, key.name) for key in part.keys})
    return found


def test_the_page_is_current(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    assert main(["--check"]) == 0, "run python -m dflash2_train.config.reference"


def test_every_key_of_a_whole_configuration_is_listed(tmp_path: Path) -> None:
    listed = by_path()

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and (not path or f"{path}.{next(iter(value), '')}" in listed):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}".lstrip("."))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            walk(value[0], f"{path}[]")
        else:
            assert path in listed

    walk(to_plain(tiny_run_config(tmp_path)), "")
    assert len(listed) > 200


def test_every_key_says_what_it_means() -> None:
    assert [path for path, (part, name) in by_path().items() if not key_of(part, name).meaning] == []


def key_of(part: Section, name: str) -> Key:
    (found,) = (key for key in part.keys if key.name == name)
    return found


def test_a_meaning_is_the_comment_above_and_behind_and_not_one_that_stands_apart() -> None:
    assert meanings(Sample) == {
        "plain": "a count; None = off",
        "both": "Said above in two lines, and behind.",
        "bare": "",
    }


def test_a_key_without_a_meaning_is_refused_by_name() -> None:
    parts = sections(Sample)
    with pytest.raises(ConfigError, match="bare: no meaning"):
        render(parts)


def test_rules_are_those_that_the_checks_raise() -> None:
    rules = read_rules([LossConfig])
    assert Rule("loss.chunk_mib", "must be positive", "LossConfig") in rules
    kinds = [rule.text for rule in rules if rule.key == "loss.kl_kind"]
    assert kinds[0].startswith("must be one of `tail_bucket`, `truncated`")
    config = LossConfig(dpace_alpha=2.0)
    with pytest.raises(ConfigError) as caught:
        config.check()
    (alpha,) = (rule.text for rule in rules if rule.key == "loss.dpace_alpha")
    assert alpha in str(caught.value)


def test_rules_of_lists_and_of_other_parts_reach_their_keys() -> None:
    listed = by_path()
    expected = {
        "data.train_prompts[].min_chars": "must not be negative",
        "data.servers.tries": "must be positive",
        "export.gguf.types": "must name a type",
        "eval.tasks": "must differ",
        "train.validate_every": "has nothing to validate on",
        "drafter.num_heads": "must be a multiple of drafter.num_kv_heads",
        "train.init_tap_weights": "needs one weight for each of len(drafter.target_layer_ids) taps",
    }
    for path, rule in expected.items():
        part, name = listed[path]
        assert rule in key_of(part, name).rules, path


def test_defaults_are_written_as_yaml() -> None:
    listed = by_path()
    for path, default in (
        ("train.betas", "`[0.9, 0.95]`"),
        ("train.max_seconds", "`null`"),
        ("data.drop_cut", "`false`"),
        ("train.steps", "*required*"),
        ("eval.server.url", '`""`'),
    ):
        part, name = listed[path]
        assert key_of(part, name).default == default


def test_outside_of_a_checkout_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert not PAGE.exists()


def test_the_schema_has_one_root() -> None:
    assert sections()[0].paths == ("",) and {key.name for key in sections()[0].keys} == set(vars(RunConfig()))
