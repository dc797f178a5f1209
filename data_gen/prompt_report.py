"""What became of every row of every prompt source: counts that add up, and the prompts removed for an overlap."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from data_gen.prompt_rows import RowRejectedError
from dflash2_train.config import ConfigError

FIRST_CAUSES = 5  # rejected rows that are named
EARLY_ROWS = 1000  # a source whose first rows are all rejected is not read to its end
NEAR_EXAMPLES = 20  # near-duplicates that are named


@dataclass(frozen=True, kw_only=True)
class RemovedPrompt:
    """A training prompt that overlaps with another set, the rule, and one prompt of that set that it meets."""

    prompt_id: str
    source: str
    rule: str
    reference: str  # "hold-out" or "evaluation prompts"
    reference_id: str


@dataclass(kw_only=True)
class SourceCounts:
    """What became of the rows of one source. Each row is counted under ``rows`` and under one other number."""

    label: str
    split: str
    revision: str | None = None  # commit that was read, of a Hub data set
    terms: str = ""
    rows: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # faulty rows by reason
    filtered: Counter[str] = field(default_factory=Counter)  # sound rows left out by a filter
    duplicates: int = 0  # further copies of a prompt that is kept here or was kept of an earlier source
    capped: int = 0  # beyond the source's max_prompts
    overlap: Counter[str] = field(default_factory=Counter)  # with hold-out or evaluation prompts, by rule
    near_duplicates: int = 0
    unused: int = 0  # beyond data.max_prompts
    kept: int = 0
    licenses: Counter[str] = field(default_factory=Counter)  # licence -> kept rows
    first_rejected: list[str] = field(default_factory=list)  # place and reason of the first rejected rows

    def reject(self, place: str, error: RowRejectedError) -> None:
        """Count a faulty row."""
        self.rejected[error.reason] += 1
        if len(self.first_rejected) < FIRST_CAUSES:
            self.first_rejected.append(f"{place}: {error}")

    def check_sum(self) -> None:
        """Every row must have been counted once."""
        parts = [self.rejected.total(), self.filtered.total(), self.duplicates, self.capped]
        parts += [self.overlap.total(), self.near_duplicates, self.unused, self.kept]
        assert self.rows == sum(parts), f"{self.label}: {self.rows} rows, but {parts} add up to {sum(parts)}"

    def check_rejected(self, key: str, limit: float) -> None:
        """Refuse a source with too many faulty rows.

        Raises:
            ConfigError: it has no rows, or the rejected share exceeds ``limit``, with the first causes.
        """
        rejected = self.rejected.total()
        if self.rows == 0:
            raise ConfigError(f"{key} ({self.label}): has no rows. Check its path and split.")
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.rejected.most_common())
        first = "; ".join(self.first_rejected)
        if rejected == self.rows:
            raise ConfigError(
                f"{key} ({self.label}): all {self.rows} rows were rejected ({reasons}). First: {first}. "
                "Check the columns and roles that are configured."
            )
        if rejected > limit * self.rows:
            raise ConfigError(
                f"{key} ({self.label}): {rejected} of {self.rows} rows were rejected ({reasons}), more than "
                f"data.max_rejected_share={limit:g} allows. First: {first}. Repair the source, or raise the share."
            )

    def line(self) -> str:
        """The counts as one line of text."""
        parts = [f"{self.rows} rows", f"{self.kept} kept", f"{self.duplicates} duplicates"]
        rare = {
            "near-duplicates": self.near_duplicates,
            "beyond its max_prompts": self.capped,
            "beyond data.max_prompts": self.unused,
            **{f"overlapping ({rule})": number for rule, number in sorted(self.overlap.items())},
            **{f"filtered ({reason})": number for reason, number in sorted(self.filtered.items())},
            **{f"rejected ({reason})": number for reason, number in sorted(self.rejected.items())},
        }
        parts += [f"{number} {name}" for name, number in rare.items() if number]
        return f"{self.split} prompts from {self.label}: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """The counts as a JSON value."""
        return {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SourceCounts:
        """The counts that :meth:`to_dict` gave."""
        fields: dict[str, Any] = {key: Counter(part) if isinstance(part, dict) else part for key, part in value.items()}
        return cls(**fields)


@dataclass(kw_only=True)
class PromptReport:
    """Counts per source and reason, and the training prompts removed for an overlap."""

    sources: list[SourceCounts] = field(default_factory=list)
    removed: list[RemovedPrompt] = field(default_factory=list)
    near_duplicates: list[tuple[str, str]] = field(default_factory=list)  # first few: dropped id, kept id

    def totals(self) -> dict[str, int]:
        """Prompts of each split that remain in the end."""
        totals: Counter[str] = Counter()
        for counts in self.sources:
            totals[counts.split] += counts.kept
        return dict(totals)

    def lines(self) -> list[str]:
        """The report as text: a line for each source, for each rule that removed prompts, and for the totals."""
        rules = Counter((entry.reference, entry.rule) for entry in self.removed)
        totals = ", ".join(f"{number} {split}" for split, number in self.totals().items())
        return [
            *(counts.line() for counts in self.sources),
            *(f"overlap with the {name}, {rule}: {number} removed" for (name, rule), number in sorted(rules.items())),
            f"prompts in all: {totals}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON value; every prompt removed for an overlap is listed by its id."""
        return {
            "totals": self.totals(),
            "sources": [counts.to_dict() for counts in self.sources],
            "removed": [dict(vars(entry)) for entry in self.removed],
            "near_duplicates": [{"prompt_id": gone, "kept_id": kept} for gone, kept in self.near_duplicates],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PromptReport:
        """The report that :meth:`to_dict` gave."""
        return cls(
            sources=[SourceCounts.from_dict(counts) for counts in value["sources"]],
            removed=[RemovedPrompt(**entry) for entry in value["removed"]],
            near_duplicates=[(entry["prompt_id"], entry["kept_id"]) for entry in value["near_duplicates"]],
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())
