"""An :class:`EvalReport` as Markdown and as console tables. Both show formulas and raw counts beside every rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from dflash2_train.evaluate.report import EqualityReport, EvalReport, PassReport, Speed

Row = tuple[str, ...]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def passes(report: EvalReport) -> Iterator[tuple[str, PassReport]]:
    """Name and content of each pass that was run."""
    yield "greedy", report.greedy
    if report.sampled is not None:
        yield f"sampled at temperature {report.protocol['temperature']}", report.sampled


def acceptance_rows(part: PassReport) -> list[Row]:
    """Measure, value, how it comes from the counts."""
    counts, rates = part.counts, part.rates
    requests = counts.prompts - counts.prompts_without_rounds
    return [
        (
            "acceptance length (pooled)",
            _number(rates.acceptance_length_pooled),
            f"{counts.committed} committed / {counts.rounds} rounds, prefill token excluded",
        ),
        (
            "acceptance length (per request)",
            _number(rates.acceptance_length_per_request),
            f"mean over {requests} prompts",
        ),
        (
            "emitted length (pooled)",
            _number(rates.emitted_length_pooled),
            f"{counts.emitted} emitted / {counts.rounds} rounds, after the stop cut",
        ),
        (
            "accepted per round",
            _number(rates.accepted_per_round),
            f"{counts.accepted} accepted / {counts.rounds} rounds",
        ),
        (
            "acceptance rate",
            _percent(rates.acceptance_rate),
            f"{counts.accepted} accepted / {counts.proposed} proposed",
        ),
    ]


def position_rows(part: PassReport) -> list[Row]:
    """Position, accepted, reached, proposed, conditional rate, plain rate."""
    counts, rates = part.counts, part.rates
    return [
        (
            str(k + 1),
            str(counts.accepted_per_position[k]),
            str(counts.reached_per_position[k]),
            str(counts.proposed_per_position[k]),
            _percent(rates.conditional_rates[k]),
            _percent(rates.plain_rates[k]),
        )
        for k in range(len(counts.accepted_per_position))
    ]


def bucket_rows(part: PassReport) -> list[Row]:
    """Prompt length, prompts, rounds, pooled acceptance length."""
    return [
        (
            f"{bucket.min_tokens} to {bucket.max_tokens - 1}",
            str(bucket.counts.prompts),
            str(bucket.counts.rounds),
            _number(bucket.rates.acceptance_length_pooled),
        )
        for bucket in part.buckets
    ]


def speed_rows(report: EvalReport) -> list[Row]:
    """Decoder, output tokens, tokens/s of all and of decoding, ms a step, seconds by part."""
    named: list[tuple[str, Speed | None]] = [("plain", report.baseline)]
    named += [(f"speculative, {name}", part.speed) for name, part in passes(report)]
    return [
        (
            name,
            str(speed.output_tokens),
            _number(speed.tokens_per_second, 1),
            _number(speed.decode_tokens_per_second, 1),
            _number(speed.ms_per_step, 1),
            ", ".join(f"{part} {value:.1f}" for part, value in speed.seconds.items() if value > 0),
        )
        for name, speed in named
        if speed is not None
    ]


def equality_lines(report: EvalReport) -> list[str]:
    """The verdict of the greedy check in words, failures one a line."""
    return lines_of_equality(report.equality)


def lines_of_equality(equality: EqualityReport | None, *, what: str = "prompts") -> list[str]:
    """As :func:`equality_lines`; ``what`` was checked."""
    if equality is None:
        return ["Not checked: eval.baseline is off."]
    lines = [
        f"{equality.prompts_equal} of {equality.prompts_checked} {what} equal plain greedy decoding token for token; "
        f"rule: {equality.rule}; {len(equality.failures)} failed."
    ]
    if equality.num_departures:
        lines.append(
            f"{equality.num_departures} emitted tokens depart from the teacher-forced argmax, largest gap "
            f"{equality.largest_gap:.4f} logits."
        )
    lines += [
        f"FAILED {failure.prompt_id}: first difference at output token {failure.first_difference}, "
        f"{failure.num_departures} departures, largest gap {_number(failure.largest_gap, 4)} logits."
        for failure in equality.failures
    ]
    return lines


ACCEPTANCE_HEADER = ("measure", "value", "from")
POSITION_HEADER = ("position", "accepted", "reached", "proposed", "conditional", "plain")
BUCKET_HEADER = ("prompt tokens", "prompts", "rounds", "acceptance length (pooled)")
SPEED_HEADER = ("decoder", "output tokens", "tokens/s", "decode tokens/s", "ms a step", "seconds by part")


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def to_markdown(report: EvalReport, *, plot_name: str | None = None) -> str:
    """The whole report as one Markdown document."""
    parts = ["# Evaluation with the built-in runner", ""]
    parts += [f"- {key}: {value}" for key, value in report.protocol.items()]
    parts += [f"- **{label}**" for label in report.labels]
    for name, part in passes(report):
        parts += [
            f"\n## Acceptance, {name}\n",
            markdown_table(ACCEPTANCE_HEADER, acceptance_rows(part)),
            "\nBy drafted position:\n",
            markdown_table(POSITION_HEADER, position_rows(part)),
            "\nBy prompt length:\n",
            markdown_table(BUCKET_HEADER, bucket_rows(part)),
        ]
    if plot_name is not None:
        parts.append(f"\n![Acceptance by position and accepted drafts a round]({plot_name})")
    parts += ["\n## Greedy equality\n", *(f"- {line}" for line in equality_lines(report))]
    parts += ["\n## Speed\n", markdown_table(SPEED_HEADER, speed_rows(report))]
    if report.speedup is not None:
        parts.append(f"\nSpeed-up of greedy decoding: {report.speedup:.2f}x (decode tokens/s, prefill excluded).")
    parts += ["\n## Formulas\n", *(f"- `{name}` = {formula}" for name, formula in report.formulas.items()), ""]
    return "\n".join(parts)


def rich_table(title: str, header: Row, rows: Sequence[Row]) -> Table:
    """A table for the console; words to the left, figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 or name in ("from", "seconds by part") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_report(report: EvalReport, console: Console) -> None:
    """The report on a console."""
    for name, part in passes(report):
        console.print(rich_table(f"acceptance, {name}", ACCEPTANCE_HEADER, acceptance_rows(part)))
        console.print(rich_table(f"by drafted position, {name}", POSITION_HEADER, position_rows(part)))
        if len(part.buckets) > 1:
            console.print(rich_table(f"by prompt length, {name}", BUCKET_HEADER, bucket_rows(part)))
    console.print(rich_table("speed", SPEED_HEADER, speed_rows(report)))
    if report.speedup is not None:
        console.print(f"speed-up of greedy decoding: {report.speedup:.2f}x (decode tokens/s)", highlight=False)
    for label in report.labels:
        console.print(label, style="yellow", highlight=False, markup=False)
    failed = report.equality is not None and bool(report.equality.failures)
    for line in equality_lines(report):
        console.print(
            f"greedy equality: {line}", style="bold red" if failed else "green", highlight=False, markup=False
        )
