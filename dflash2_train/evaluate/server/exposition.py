"""The Prometheus text format, as far as a server's ``/metrics`` uses it: lines of name, labels and value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)\s*=\s*"(?P<value>(?:\\.|[^"\\])*)"\s*,?')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line."""

    name: str
    labels: dict[str, str]
    value: float


def parse_samples(text: str) -> Iterator[Sample]:
    """The samples of a page; comments are skipped.

    Raises:
        ValueError: a line that is none.
    """
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a line of Prometheus metrics: {line[:80]!r}")
        yield Sample(name=match["name"], labels=_labels(match["labels"] or ""), value=float(match["value"]))


def _labels(text: str) -> dict[str, str]:
    found, end = {}, 0
    for match in _LABEL.finditer(text):
        if match.start() != end:
            break
        found[match["name"]] = re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), match["value"])
        end = match.end()
    if text[end:].strip():
        raise ValueError(f"not a list of labels: {text[:80]!r}")
    return found
