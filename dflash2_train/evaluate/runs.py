"""One measured run in one form, whoever measured it: the built-in runner, a server, or a published result.

A run is a list of *cells*, each one task (or one category of it) at one concurrency, with raw counts. Rates are always
derived from counts. ``report.json`` of both modes of ``dflash2-eval`` holds these fields; README.md beside this file
documents them, :mod:`dflash2_train.evaluate.readers` reads them and older forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any

from dflash2_train.evaluate.report import FORMULAS, SCHEMA_VERSION, EvalReport, PassReport, Speed

RUNNER, SERVER, PUBLISHED = "runner", "server", "published"
AUTOREGRESSIVE = "autoregressive"
HOLDOUT_TASK = "hold-out"
# Of a row of Cell.per_request.
PROMPT, ROUNDS, ACCEPTED, PROMPT_TOKENS = range(4)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Raw counts of speculation. Lists have one entry a drafted position, 1..K; empty if the source told none."""

    rounds: int
    proposed: int
    accepted: int
    accepted_per_position: list[int]

    @property
    def length(self) -> float | None:
        """Pooled acceptance length, (accepted + rounds) / rounds; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def rate(self) -> float | None:
        """Accepted by proposed; None if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def plain_rates(self) -> list[float]:
        """Share of rounds that accepted position k; servers propose all K in nearly every round."""
        return [count / self.rounds for count in self.accepted_per_position] if self.rounds else []

    @property
    def histogram(self) -> list[int] | None:
        """Rounds with 0, 1, .., K accepted; None where positions are unknown."""
        if not self.accepted_per_position:
            return None
        reached = [self.rounds, *self.accepted_per_position, 0]
        return [this - following for this, following in zip(reached, reached[1:], strict=False)]

    def __add__(self, other: Acceptance) -> Acceptance:
        same = len(self.accepted_per_position) == len(other.accepted_per_position)
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=False)
        return Acceptance(
            rounds=self.rounds + other.rounds,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            accepted_per_position=[one + two for one, two in pairs] if same else [],
        )


@dataclass(frozen=True, kw_only=True)
class RequestCounts:
    """What became of the requests of a cell."""

    asked: int  # sent at least once
    answered: int
    too_long: int = 0  # prompt and answer do not fit the context; never sent or decoded
    retried: int = 0  # further tries
    failed: dict[str, int] = field(default_factory=dict)  # cause -> requests without an answer

    @property
    def num_failed(self) -> int:
        """Requests without an answer."""
        return sum(self.failed.values())

    def __add__(self, other: RequestCounts) -> RequestCounts:
        causes = {*self.failed, *other.failed}
        return RequestCounts(
            asked=self.asked + other.asked,
            answered=self.answered + other.answered,
            too_long=self.too_long + other.too_long,
            retried=self.retried + other.retried,
            failed={cause: self.failed.get(cause, 0) + other.failed.get(cause, 0) for cause in sorted(causes)},
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One task, or one category of it, at one concurrency."""

    task: str
    category: str | None = None
    method: str  # drafter | mtp | autoregressive | speculative (published, kind not told)
    num_drafted: int | None = None  # K, where the cells of a run differ in it; None = that of the protocol
    concurrency: int
    temperature: float | None  # None = not told
    acceptance: Acceptance | None  # None = no speculation
    requests: RequestCounts
    prompt_tokens: int | None = None
    output_tokens: int
    seconds: float  # wall time of the measurement; runner: decoding and prefill of all prompts
    seconds_by_part: dict[str, float] | None = None  # runner: prefill, context, draft, verify, sample
    prompts_sha256: str | None = None  # None = not told
    prefix_hit_rate: float | None = None  # share of prompt tokens found in the prefix cache
    # One row a request: index of its prompt in the task, rounds, accepted, prompt tokens. None where not told.
    per_request: list[list[int]] | None = None
    labels: list[str] = field(default_factory=list)  # what a reader must know about these figures

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens a second over all requests."""
        return self.output_tokens / self.seconds if self.seconds > 0 else None

    @staticmethod
    def from_json(value: dict[str, Any]) -> Cell:
        """The inverse of ``dataclasses.asdict``; TypeError for another layout."""
        acceptance = Acceptance(**value["acceptance"]) if value["acceptance"] else None
        requests = RequestCounts(**value["requests"])
        return Cell(**{**value, "acceptance": acceptance, "requests": requests})


@dataclass(frozen=True, kw_only=True)
class EvalRun:
    """A whole run."""

    kind: str  # runner | server | published
    label: str
    # How it was measured. Comparisons read hardware, target, num_drafted, max_new_tokens, top_p, enable_thinking.
    protocol: dict[str, Any]
    cells: list[Cell]
    labels: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)  # records of this evaluation and of the drafter

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the fields that every report.json has."""
        return {"schema_version": SCHEMA_VERSION, "formulas": FORMULAS, **asdict(self)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> EvalRun:
        """The inverse of :meth:`to_json`; further keys are left alone. KeyError or TypeError for another layout."""
        return EvalRun(
            kind=value["kind"],
            label=value["label"],
            protocol=value["protocol"],
            cells=[Cell.from_json(cell) for cell in value["cells"]],
            labels=value["labels"],
            run=value["run"],
        )

    def task_names(self) -> list[str]:
        """Tasks in the order of their first cells."""
        return list(dict.fromkeys(cell.task for cell in self.cells))


def pool(cells: Sequence[Cell]) -> Cell:
    """Cells of one task, method, K and concurrency as one: counts and times added, prompts numbered on.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError("no cells to pool")
    if len(cells) == 1:
        return cells[0]
    first = cells[0]
    spoken = [cell.acceptance for cell in cells if cell.acceptance is not None]
    hashes = [cell.prompts_sha256 for cell in cells]
    known = [cell.prompt_tokens for cell in cells if cell.prompt_tokens is not None]
    return Cell(
        task=first.task,
        method=first.method,
        num_drafted=first.num_drafted,
        concurrency=first.concurrency,
        temperature=first.temperature,
        acceptance=reduce(add, spoken) if spoken else None,
        requests=reduce(add, (cell.requests for cell in cells)),
        prompt_tokens=sum(known) if len(known) == len(cells) else None,
        output_tokens=sum(cell.output_tokens for cell in cells),
        seconds=sum(cell.seconds for cell in cells),
        seconds_by_part=_added([cell.seconds_by_part for cell in cells]),
        prompts_sha256=None if None in hashes else "+".join(str(one) for one in hashes),
        per_request=_number_on(cells),
        labels=list(dict.fromkeys(label for cell in cells for label in cell.labels)),
    )


def _added(parts: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """Seconds by part of all cells; None if a cell has none."""
    total: dict[str, float] = {}
    for one in parts:
        if one is None:
            return None
        for name, seconds in one.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _number_on(cells: Iterable[Cell]) -> list[list[int]] | None:
    """Rows of all cells, prompt indices made different between cells; None if a cell has none."""
    rows: list[list[int]] = []
    offset = 0
    for cell in cells:
        if cell.per_request is None:
            return None
        rows += [[offset + row[PROMPT], *row[ROUNDS:]] for row in cell.per_request]
        offset += 1 + max((row[PROMPT] for row in cell.per_request), default=-1)
    return rows


def run_of_report(report: EvalReport) -> EvalRun:
    """The runner's report as a run: the greedy pass, the sampled one, and plain decoding."""
    protocol = report.protocol
    decoders = [_pass_cell(report, report.greedy, temperature=0.0)]
    if report.sampled is not None:
        decoders.append(_pass_cell(report, report.sampled, temperature=float(protocol["temperature"])))
    if report.baseline is not None:
        decoders.append(_plain_cell(report, report.baseline))
    return EvalRun(
        kind=RUNNER,
        label="runner",
        protocol={"engine": "built-in runner", "hardware": _report_hardware(report), "ignore_eos": False, **protocol},
        cells=decoders,
        labels=report.labels,
        run=report.run,
    )


def _report_hardware(report: EvalReport) -> str | None:
    machine = (report.run.get("evaluation") or {}).get("machine")
    return runner_hardware(machine, report.protocol.get("device", "cpu"))


def runner_hardware(machine: dict[str, Any] | None, device: str) -> str | None:
    """What the runner ran on; None where its record does not say which accelerator that was."""
    if machine is None or device != "cpu":
        return None
    return f"{machine['cpu']}, {machine['cores']} cores"


def _pass_cell(report: EvalReport, part: PassReport, *, temperature: float) -> Cell:
    counts = part.counts
    return Cell(
        task=HOLDOUT_TASK,
        method="drafter",
        concurrency=int(report.protocol.get("concurrency", 1)),
        temperature=temperature,
        acceptance=Acceptance(
            rounds=counts.rounds,
            proposed=counts.proposed,
            accepted=counts.accepted,
            accepted_per_position=counts.accepted_per_position,
        ),
        requests=RequestCounts(asked=counts.prompts, answered=counts.prompts, too_long=report.too_long),
        output_tokens=counts.output_tokens,
        seconds=sum(part.speed.seconds.values()),
        prompts_sha256=report.protocol.get("prompts_sha256"),
        per_request=part.per_request or None,
    )


def _plain_cell(report: EvalReport, speed: Speed) -> Cell:
    prompts = report.greedy.counts.prompts
    return Cell(
        task=HOLDOUT_TASK,
        method=AUTOREGRESSIVE,
        concurrency=int(report.protocol.get("concurrency", 1)),
        temperature=0.0,
        acceptance=None,
        requests=RequestCounts(asked=prompts, answered=prompts, too_long=report.too_long),
        output_tokens=speed.output_tokens,
        seconds=sum(speed.seconds.values()),
        prompts_sha256=report.protocol.get("prompts_sha256"),
    )
