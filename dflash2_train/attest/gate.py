"""One gate's verdict, and all of them together: as a table, as a JSON value, as a refusal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from data_gen.cache.format import CacheIntegrityError

if TYPE_CHECKING:
    from rich.table import Table

PASS, FAIL, UNKNOWN = "pass", "fail", "not checked"
STYLES = {PASS: "green", FAIL: "bold red", UNKNOWN: "yellow"}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What one gate found."""

    name: str
    verdict: str  # PASS | FAIL | UNKNOWN (switched off, or the cache does not record what it takes)
    found: str
    rule: str  # what would pass
    advice: str = ""  # what to do when it fails


def judge(name: str, passed: bool, found: str, rule: str, advice: str) -> Gate:
    """A gate that could be looked at."""
    return Gate(name=name, verdict=PASS if passed else FAIL, found=found, rule=rule, advice=advice)


def unknown(name: str, why: str, rule: str) -> Gate:
    """A gate that could not be looked at."""
    return Gate(name=name, verdict=UNKNOWN, found=why, rule=rule)


@dataclass(frozen=True, kw_only=True)
class Attestation:
    """All gates, and the few numbers that later readers of the run record want by name."""

    gates: list[Gate]
    tokens: int = 0  # compared with a plain forward
    relative_error: float = 0.0  # of the worst tap: median over tokens of |cached - fresh| / |fresh|
    in_top_k: float = 0.0  # share of the supervised tokens looked at that lie in the teacher's top-k
    argmax: float = 0.0  # share that are its first choice

    @property
    def passed(self) -> bool:
        """No gate failed."""
        return not self.failed()

    def failed(self) -> list[Gate]:
        """The gates that refuse the cache."""
        return [gate for gate in self.gates if gate.verdict == FAIL]

    def refuse(self) -> None:
        """Raise CacheIntegrityError with every failed gate, if there is one."""
        if self.passed:
            return
        lines = (f"{gate.name}: {gate.found}; must be: {gate.rule}. {gate.advice}" for gate in self.failed())
        raise CacheIntegrityError("the cache does not pass its gates, so nothing was trained:\n  " + "\n  ".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """As a JSON value, for ``attestation.json`` and the run record."""
        return {"passed": self.passed, **asdict(self)}

    def table(self) -> Table:
        """One line a gate."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Attestation of the cache", title_justify="left")
        for name in ("gate", "verdict", "found", "must be"):
            table.add_column(name)
        for gate in self.gates:
            style = STYLES[gate.verdict]
            table.add_row(gate.name, Text(gate.verdict, style=style), Text(gate.found), Text(gate.rule))
        return table
