"""The reference of every configuration key, written out of the schema: ``python -m dflash2_train.config.reference``.

It makes ``conf/README.md`` anew, in a checkout. Keys, types and defaults are those of the dataclasses, meanings their
comments (``reference_meanings``), rules what their checks demand (``reference_rules``). A key without a meaning is
refused, so that none is added undocumented.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from dflash2_train.config.reference_meanings import meanings
from dflash2_train.config.reference_rules import Rule, read_rules
from dflash2_train.config.rules import ConfigError
from dflash2_train.config.run import RunConfig

PAGE = Path("conf/README.md")
COMMAND = "python -m dflash2_train.config.reference"
TABLE = ("| key | type | default | meaning | refused with |", "|---|---|---|---|---|")
HEAD = f"""# Every configuration key

<!-- made by {COMMAND}; a test keeps it current -->

One configuration drives all commands. `conf/config.yaml` composes it from the groups in this folder, and
`dflash2_train/config/` types and checks it: a key that is not listed here is an error wherever it is written, and so is
a value that breaks a rule, before anything is read or started. Values are set in this order, the last one wins: the
default, the groups that an experiment names, the experiment, further groups such as `+scale=long`, the command line.

```bash
dflash2-train +experiment=smollm2_cpu --cfg job       # every value of an experiment
dflash2-train +experiment=smollm2_cpu train.lr=1e-3   # change one
```

*required*: no default, an experiment or its groups set it. `null` is no value. A path is taken from the folder that the
command was started in. Words are explained in the [glossary](../dflash2_train/README.md#glossary); how to write an
experiment of your own stands in [OWN_DRAFTER.md](OWN_DRAFTER.md).
"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the reference."""

    name: str
    type: str
    default: str
    meaning: str
    rules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Keys that stand together in the tree."""

    paths: tuple[str, ...]  # several where one class is used at several places; "" is the top
    about: str
    keys: tuple[Key, ...]


def sections(schema: type = RunConfig) -> list[Section]:
    """The whole schema, parents before their parts."""
    places: dict[type, list[str]] = {}
    for path, part in _parts(schema, ""):
        places.setdefault(part, []).append(path)
    rules = read_rules(list(places))
    anchors = {path: anchor(paths) for paths in places.values() for path in paths}
    return [_section(part, tuple(paths), rules, anchors) for part, paths in places.items()]


def _parts(schema: type, path: str) -> Iterator[tuple[str, type]]:
    yield path, schema
    for name, kind in typing.get_type_hints(schema).items():
        inner, mark = _dataclass_in(kind)
        if inner is not None:
            yield from _parts(inner, f"{path}.{name}{mark}" if path else f"{name}{mark}")


def _dataclass_in(kind: object) -> tuple[type | None, str]:
    """The dataclass that a field holds, alone or in a list, and the mark of a list."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind, ""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list and isinstance(arguments[0], type) and dataclasses.is_dataclass(arguments[0]):
        return arguments[0], "[]"
    return None, ""


def _section(schema: type, paths: tuple[str, ...], rules: Sequence[Rule], anchors: Mapping[str, str]) -> Section:
    said, hints = meanings(schema), typing.get_type_hints(schema)
    owners = {part.__name__ for part in schema.__mro__}
    keys = []
    for field in dataclasses.fields(schema):
        inner, mark = _dataclass_in(hints[field.name])
        places = [f"{path}.{field.name}" if path else field.name for path in paths]
        bound = [rule.text for rule in rules if any(rule.about(place, owners, field.name) for place in places)]
        part = f"see [{places[0]}{mark}](#{anchors[places[0] + mark]})" if inner is not None else ""
        keys.append(
            Key(
                name=field.name,
                type="" if inner is not None and not mark else _type_name(hints[field.name]),
                default="" if inner is not None and not mark else _default(field),
                meaning="; ".join(text for text in (_yaml_words(said[field.name]), part) if text),
                rules=tuple(dict.fromkeys(bound)),
            )
        )
    about = " ".join(re.sub(r":\w+:(?=`)", "", inspect.getdoc(schema) or "").replace("``", "`").split())
    return Section(paths=paths, about=about, keys=tuple(keys))


def _yaml_words(text: str) -> str:
    """A comment with Python's words for constants as YAML has them."""
    for python, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", f"`{yaml}`", text)
    return text


def _type_name(kind: object) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return "null" if kind is type(None) else "list" if dataclasses.is_dataclass(kind) else kind.__name__
    inner, _ = _dataclass_in(kind)
    if inner is not None:
        return "list"
    arguments = [_type_name(one) for one in typing.get_args(kind)]
    origin = typing.get_origin(kind)
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(arguments)}]"
    return " or ".join(arguments)


def _default(field: dataclasses.Field[object]) -> str:
    """A default as YAML would have it."""
    if field.default_factory is not dataclasses.MISSING:
        value: object = field.default_factory()
    else:
        value = field.default
    if value is dataclasses.MISSING or value == MISSING:
        return "*required*"
    if isinstance(value, list):
        return f"`[{', '.join(str(one) for one in value)}]`"
    texts = {None: "null", True: "true", False: "false", "": '""'}
    known = value is None or isinstance(value, bool) or value == ""
    return f"`{texts[value] if known else value}`"  # type: ignore[index]


def anchor(paths: Sequence[str]) -> str:
    """The fragment under which a page finds a section's heading."""
    kept = "".join(one for one in " ".join(paths) if one.isalnum() or one in "_ -").lower()
    return kept.replace(" ", "-")


def render(parts: Sequence[Section]) -> str:
    """The page.

    Raises:
        ConfigError: a key has no meaning.
    """
    lines = [HEAD]
    for part in parts:
        lines += [f"## {heading(part)}", "", part.about, "", *TABLE]
        for key in part.keys:
            if not key.meaning:
                place = f"{part.paths[0]}.{key.name}".lstrip(".")
                raise ConfigError(
                    f"{place}: no meaning. Write a comment behind the field in dflash2_train/config, with the unit of "
                    f"a number and what null or 0 means; then run {COMMAND}."
                )
            cells = (f"`{key.name}`", key.type, key.default, key.meaning, "; ".join(key.rules))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def heading(part: Section) -> str:
    """Title of a section: where its keys stand."""
    return ", ".join(part.paths) or "Top"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=f"Writes {PAGE} out of the schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not current")
    options = parser.parse_args(arguments)
    if not (PAGE.parent / "config.yaml").exists():
        sys.stderr.write(f"error: {PAGE.parent}: not here. Start this in the root of a checkout.\n")
        return 2
    try:
        page = render(sections())
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
