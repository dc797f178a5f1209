"""A table of plain text, so that Markdown, HTML and the console show the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table: every row has as many cells as the header."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
