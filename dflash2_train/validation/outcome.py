"""What a validation found: values for the record, a table, the figure that picks the best checkpoint, the alarm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dflash2_train.metrics import MetricSums
from dflash2_train.validation.decode import FORECAST, REAL, SQUARES
from dflash2_train.validation.figures import LENGTH, at_slot

if TYPE_CHECKING:
    from rich.table import Table

STANDARD_ERRORS = 3.0  # that forecast and real decoding may differ by whatever the tolerance

# Heading, format and figures of each column but the first.
COLUMNS = (
    ("accepted", "{:.1%}", ("accepted",)),
    ("if reached", "{:.1%}", ("conditional",)),
    ("lost: top-1 right", "{:.1%}", ("lost_top1",)),
    ("lost: candidate", "{:.1%}", ("lost_ranked",)),
    ("lost: missed", "{:.1%}", ("lost_missed",)),
    ("recall", "{:.1%}", ("recall",)),
    ("top-1", "{:.1%}", ("top1",)),
    ("confidence gap", "{:+.1%}", ("confidence_gap",)),
    ("sum min(p, q)", "{:.3f} to {:.3f}", ("overlap", "overlap_bound")),
)
CAPTION = "accepted to lost: rounds of the served chain; recall to sum: every position"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Forecast and real decoding of the same prompts; accepted drafts a round."""

    forecast: float
    real: float
    allowed: float  # difference that is no alarm

    @property
    def alarm(self) -> bool:
        """Whether they disagree."""
        return abs(self.real - self.forecast) > self.allowed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One validation, the same on every rank."""

    step: int  # steps done
    sums: MetricSums  # of all rows and prompts of all ranks
    num_drafted: int  # K
    weights: str  # that were validated: last | ema
    tolerance: float  # share of the forecast's accepted drafts by which the real ones may differ
    seconds: float  # that it took on this rank

    @cached_property
    def rates(self) -> dict[str, float]:
        """Every figure of which something was counted."""
        return self.sums.rates()

    @cached_property
    def comparison(self) -> Comparison | None:
        """None where nothing was decoded.

        Allowed is the tolerance and three standard errors of the difference. Rounds of one text are no independent
        draws, but both sides are of the same prompts, which outweighs it.
        """
        if REAL not in self.rates or FORECAST not in self.rates:
            return None
        counts = self.sums.sums()
        forecast, real = self.rates[FORECAST] - 1, self.rates[REAL] - 1
        variance = 0.0
        for name, mean in ((FORECAST, forecast), (REAL, real)):
            squares, rounds = counts[SQUARES[name]]
            variance += max(0.0, squares / rounds - mean * mean) / rounds
        allowed = self.tolerance * forecast + STANDARD_ERRORS * math.sqrt(variance)
        return Comparison(forecast=forecast, real=real, allowed=allowed)

    @property
    def metric(self) -> str:
        """Name of the figure that says which checkpoint is best: real acceptance length if it was looked for."""
        return f"validation/{REAL if REAL in self.sums.pairs else LENGTH}"

    @property
    def best_by(self) -> float | None:
        """Its value; None if no round was counted."""
        return self.rates.get(self.metric.removeprefix("validation/"))

    def values(self) -> dict[str, float]:
        """What is logged, by name."""
        counts = self.sums.sums()
        shown = {name: value for name, value in self.rates.items() if name not in SQUARES.values()}
        shown["rounds"] = counts[LENGTH][1]
        shown["blocks"] = counts[f"{LENGTH}_uniform"][1]
        shown["seconds"] = round(self.seconds, 3)
        if self.comparison is not None:
            shown["alarm"] = float(self.comparison.alarm)
        return {f"validation/{name}": value for name, value in shown.items()}

    def alarm(self) -> str | None:
        """A warning if forecast and real decoding disagree."""
        found = self.comparison
        if found is None or not found.alarm:
            return None
        return (
            f"validation at step {self.step}: ALARM: real decoding accepts {found.real:.2f} drafts a round, the "
            f"forecast for the same prompts is {found.forecast:.2f}, and {found.allowed:.2f} of difference are allowed "
            "(train.validation.tolerance). What is trained is not what is served: compare taps, template, dtype and "
            "target of the captures with those of decoding (dflash2-gen-data stage=verify, attestation.json)."
        )

    def summary(self) -> str:
        """The lengths in a line."""
        parts = [f"acceptance length {self._number(LENGTH)}"]
        parts += [f"{name} {self._number(f'{LENGTH}_{name}')}" for name in ("unary", "oracle", "uniform")]
        if REAL in self.sums.pairs:
            parts.append(f"really decoded {self._number(REAL)} (forecast for these {self._number(FORECAST)})")
        weights = ", averaged weights" if self.weights == "ema" else ""
        return f"validation at step {self.step}{weights}: {', '.join(parts)}; {self.seconds:.1f} s"

    def table(self) -> Table:
        """The slots of a block, one a line."""
        from rich.table import Table

        table = Table(title=self.summary(), title_justify="left", caption=CAPTION, caption_justify="left")
        for heading in ("slot", *(heading for heading, _, _ in COLUMNS)):
            table.add_column(heading, justify="right")
        for k in range(1, self.num_drafted + 1):
            table.add_row(str(k), *(form.format(*self._at(names, k)) for _, form, names in COLUMNS))
        return table

    def _at(self, names: Iterable[str], k: int) -> list[float]:
        """Figures at slot k; no number where nothing was counted."""
        return [self.rates.get(at_slot(name, k), math.nan) for name in names]

    def _number(self, name: str) -> str:
        return f"{self.rates[name]:.3f}" if name in self.rates else "-"
