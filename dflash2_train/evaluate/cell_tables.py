"""Tables that only the built-in runner's cells can fill: both means, conditional rates, the time of a cycle."""

from __future__ import annotations

from collections.abc import Sequence

from dflash2_train.evaluate.intervals import Interval, length_interval, request_interval, request_lengths
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, Cell
from dflash2_train.evaluate.series import Series
from dflash2_train.evaluate.table import NONE, Table

PARTS = ("draft", "context", "verify", "sample")
PLAIN = "plain"  # stands where a K would


def cell_tables(series: Sequence[Series]) -> list[Table]:
    """All of them, over the cells that tell their time by part; empty tables where there are none."""
    cells = [cell for one in series for cell in one.cells if cell.seconds_by_part is not None]
    places = list(dict.fromkeys((cell.task, cell.category) for cell in cells))
    ordered = sorted(cells, key=lambda one: (places.index((one.task, one.category)), one.temperature or 0.0))
    return [means_table(ordered), conditional_table(ordered), cycle_table(ordered)]


def means_table(cells: Sequence[Cell]) -> Table:
    """Acceptance length pooled over rounds and as the mean over answers, each with its interval."""
    return Table(
        title="Acceptance length, pooled and per request",
        header=("task", "temperature", "K", "answers", "rounds", "pooled", "per request"),
        rows=[
            (
                *_place(cell),
                str(cell.requests.answered),
                str(cell.acceptance.rounds),
                _with_band(cell.acceptance.length, length_interval(cell)),
                _with_band(_mean(request_lengths(cell)), request_interval(cell)),
            )
            for cell in cells
            if cell.acceptance is not None
        ],
        notes=["in brackets: 95% interval, drawn over prompts with all their turns; with one prompt, over rounds"],
    )


def conditional_table(cells: Sequence[Cell]) -> Table:
    """Per cent of the rounds that reached a position which accepted it."""
    spoken = [(cell, cell.acceptance) for cell in cells if cell.acceptance is not None]
    width = max((len(counts.accepted_per_position) for _, counts in spoken), default=0)
    rows = []
    for cell, counts in spoken:
        accepted = counts.accepted_per_position
        rates = [_percent(k, before) for k, before in zip(accepted, [counts.rounds, *accepted], strict=False)]
        rows.append((*_place(cell), *rates, *([NONE] * (width - len(rates)))))
    return Table(
        title="Accepted by position, % of the rounds that accepted all before it",
        header=("task", "temperature", "K", *(str(k + 1) for k in range(width))),
        rows=rows,
    )


def cycle_table(cells: Sequence[Cell]) -> Table:
    """Milliseconds a cycle by part, and the pace of decoding."""
    rows = []
    for cell in cells:
        seconds = cell.seconds_by_part or {}
        after_first, decode = _decoded(cell)
        cycles = after_first if cell.acceptance is None else cell.acceptance.rounds
        rows.append(
            (
                *_place(cell),
                str(cycles),
                *(_per(1000 * seconds.get(part, 0.0), cycles) for part in PARTS),
                _per(1000 * decode, cycles),
                _per(after_first, decode),
                _per(cell.output_tokens, cell.seconds),
            )
        )
    return Table(
        title="Time of a cycle, ms",
        header=("task", "temperature", "K", "cycles", *PARTS, "cycle", "decode tokens/s", "tokens/s"),
        rows=rows,
        notes=[
            "a cycle is one draft and its verification, or one plain token; sample is acceptance, rollback and "
            "bookkeeping; tokens/s includes the prefill, decode tokens/s leaves it and each first token out",
            *_fastest(cells),
        ],
    )


def _decoded(cell: Cell) -> tuple[int, float]:
    """Tokens after each answer's first, and the seconds that they took."""
    seconds = cell.seconds_by_part or {}
    return cell.output_tokens - cell.requests.answered, sum(seconds.get(part, 0.0) for part in PARTS)


def _fastest(cells: Sequence[Cell]) -> list[str]:
    """The decoder that was fastest over all tasks, at each temperature with several K: more drafts can be slower."""
    sums: dict[str, dict[str, tuple[int, float]]] = {}
    for cell in cells:
        _, temperature, decoder = _place(cell)
        found = sums.setdefault(temperature, {})
        tokens, seconds = found.get(decoder, (0, 0.0))
        more_tokens, more_seconds = _decoded(cell)
        found[decoder] = tokens + more_tokens, seconds + more_seconds
    notes = []
    for temperature, found in sums.items():
        paces = {decoder: tokens / seconds for decoder, (tokens, seconds) in found.items() if seconds > 0}
        if len(paces.keys() - {PLAIN}) < 2:
            continue
        best = max(paces, key=lambda decoder: paces[decoder])
        name = best if best == PLAIN else f"K={best}"
        gain = f", {paces[best] / paces[PLAIN]:.2f}x plain decoding" if best != PLAIN and PLAIN in paces else ""
        notes.append(f"temperature {temperature}: {name} decodes fastest here, {paces[best]:.1f} tokens/s{gain}")
    return notes


def _place(cell: Cell) -> tuple[str, str, str]:
    task = " / ".join(part for part in (cell.task, cell.category) if part)
    temperature = NONE if cell.temperature is None else f"{cell.temperature:g}"
    return task, temperature, PLAIN if cell.method == AUTOREGRESSIVE else str(cell.num_drafted)


def _with_band(value: float | None, band: Interval | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3f}" if band is None else f"{value:.3f} [{band.low:.3f}, {band.high:.3f}]"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else NONE


def _per(value: float, by: float) -> str:
    return f"{value / by:.1f}" if by else NONE
