"""What the guides say that can be checked: commands, keys, links, quotes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted(
    path
    for pattern in ("*.md", "conf/**/*.md", "data_gen/**/*.md", "dflash2_train/**/*.md", "launch/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PROGRAM = re.compile(r"(?:.*/)?(dflash2-[a-z-]+)")


@dataclass(frozen=True)
class Command:
    """A command of a guide: program and words, placeholders filled in."""

    place: str
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {self.program} {' '.join(self.words)}"


def name_of(path: Path) -> str:
    """A guide's path in the tree."""
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return [body for kind, body in FENCE.findall(text) if kind == language]


def spans(text: str) -> list[str]:
    """Code in the running text and in tables."""
    return SPAN.findall(FENCE.sub("", text))


def commands(path: Path) -> list[Command]:
    """Commands of ours in a guide, each once."""
    text = path.read_text(encoding="utf-8")
    lines = [line for body in blocks(text, "bash") for line in body.replace("\\\n", " ").splitlines()]
    found = [one for line in [*lines, *spans(text)] for one in _commands_in(name_of(path), line)]
    return list(dict.fromkeys(found))


def _commands_in(place: str, line: str) -> Iterator[Command]:
    if "dflash2-" not in line and "launch/quickstart.sh" not in line:
        return
    words = [_filled(word) for word in shlex.split(line, comments=True) if "…" not in word]
    for number, word in enumerate(words):
        match = PROGRAM.fullmatch(word)
        if match is not None or word == "launch/quickstart.sh":
            program = "dflash2-train" if match is None else match.group(1)
            own = ["+experiment=smollm2_cpu"] if match is None else []
            rest = words[number + 1 :]
            rest = rest[: rest.index("&")] if "&" in rest else rest
            yield Command(place, program, tuple(own + rest))
            return


def _filled(word: str) -> str:
    """A word with the placeholders of the guides replaced, and without the brackets of what may be left out."""
    word = re.sub(r"(?<=experiment=)(X|NAME)$", "smollm2_cpu", word).replace("$SLURM_ARRAY_TASK_ID", "0")
    return word.lstrip("[") if word.startswith("[--") else word.removesuffix("]") if "[" not in word else word


def anchors(path: Path) -> set[str]:
    """Fragments of a guide's headings."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    kept = ("".join(one for one in head.lower() if one.isalnum() or one in "_ -") for head in heads)
    return {head.replace(" ", "-") for head in kept}


def links(path: Path) -> list[str]:
    """Link targets within the tree."""
    found = LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:", link)]
