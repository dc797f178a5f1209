"""How far an acceptance length would move if the run were repeated on other prompts: bootstrap intervals.

Prompts are drawn with replacement where the counts of each request are known; two runs of the same prompts are drawn
in pairs, so that what the prompts share cancels. Where only pooled counts are known, rounds are drawn instead. Rounds
of one answer are alike, so that band is a lower bound of the noise, and it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash2_train.evaluate.runs import ACCEPTED, PROMPT, ROUNDS, Acceptance, Cell

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

DRAWS = 2000
SEED = 20240229
CHUNK = 200  # draws at a time: 200 x 1,000 prompts are 1.6 MB
PAIRED, PROMPTS, POOLED_ROUNDS = "prompts, paired", "prompts", "rounds (a lower bound)"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range and what was drawn for it."""

    low: float
    high: float
    basis: str


def length_interval(cell: Cell, confidence: float = 0.95) -> Interval | None:
    """The pooled acceptance length's interval; None without rounds, or where nothing but the mean is known."""
    import numpy as np

    if cell.acceptance is None or not cell.acceptance.rounds:
        return None
    basis, lengths = _draw(cell, np.random.default_rng(SEED))
    return None if lengths is None else _interval(lengths, confidence, basis)


def request_lengths(cell: Cell) -> list[float]:
    """Acceptance length of each request that had a round."""
    return [1 + row[ACCEPTED] / row[ROUNDS] for row in cell.per_request or [] if row[ROUNDS]]


def request_interval(cell: Cell, confidence: float = 0.95) -> Interval | None:
    """The interval of the mean over requests, prompts drawn with all their turns; None below two prompts."""
    import numpy as np

    sums: dict[int, list[float]] = {}
    for row in cell.per_request or []:
        if row[ROUNDS]:
            entry = sums.setdefault(row[PROMPT], [0.0, 0.0])
            entry[0] += 1
            entry[1] += row[ACCEPTED] / row[ROUNDS]
    if len(sums) < 2:
        return None
    return _interval(_lengths(np.array(list(sums.values())), np.random.default_rng(SEED)), confidence, PROMPTS)


def difference_interval(base: Cell, other: Cell, confidence: float = 0.95) -> Interval | None:
    """The interval of ``other``'s acceptance length minus ``base``'s; None where one of them has none."""
    import numpy as np

    if base.acceptance is None or other.acceptance is None:
        return None
    same_prompts = base.prompts_sha256 is not None and base.prompts_sha256 == other.prompts_sha256
    if same_prompts and base.per_request and other.per_request:
        one, two = _by_prompt(base.per_request), _by_prompt(other.per_request)
        shared = sorted(one.keys() & two.keys())
        if len(shared) > 1:
            rng = np.random.default_rng(SEED)
            tables = [np.array([rows[prompt] for prompt in shared], dtype=np.int64) for rows in (one, two)]
            return _interval(_paired(tables, rng), confidence, PAIRED)
    basis_one, lengths_one = _draw(base, np.random.default_rng(SEED))
    basis_two, lengths_two = _draw(other, np.random.default_rng(SEED + 1))
    if lengths_one is None or lengths_two is None:
        return None
    basis = PROMPTS if basis_one == basis_two == PROMPTS else POOLED_ROUNDS
    return _interval(lengths_two - lengths_one, confidence, basis)


def _by_prompt(rows: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Prompt -> [rounds, accepted] over all its turns."""
    sums: dict[int, list[int]] = {}
    for row in rows:
        entry = sums.setdefault(row[PROMPT], [0, 0])
        entry[0] += row[ROUNDS]
        entry[1] += row[ACCEPTED]
    return sums


def _draw(cell: Cell, rng: Generator) -> tuple[str, NDArray | None]:
    """What was drawn, and the acceptance length of each draw [DRAWS] float64."""
    import numpy as np

    assert cell.acceptance is not None
    by_prompt = _by_prompt(cell.per_request or [])
    if len(by_prompt) > 1:
        table = np.array(list(by_prompt.values()), dtype=np.int64)
        return PROMPTS, _lengths(table, rng)
    histogram = cell.acceptance.histogram
    if histogram is None or min(histogram) < 0:  # rates of four digits may cross by a count
        return POOLED_ROUNDS, None
    return POOLED_ROUNDS, _round_lengths(cell.acceptance, histogram, rng)


def _lengths(table: NDArray, rng: Generator) -> NDArray:
    """[prompts, 2] rounds and accepted -> one length a draw of prompts."""
    return _ratio_of_draws([table], rng)[0]


def _paired(tables: Sequence[NDArray], rng: Generator) -> NDArray:
    """Second minus first length, both of the same draw of prompts."""
    first, second = _ratio_of_draws(tables, rng)
    return second - first


def _ratio_of_draws(tables: Sequence[NDArray], rng: Generator) -> list[NDArray]:
    import numpy as np

    prompts = len(tables[0])
    parts: list[list[NDArray]] = [[] for _ in tables]
    for start in range(0, DRAWS, CHUNK):
        drawn = rng.integers(0, prompts, size=(min(CHUNK, DRAWS - start), prompts))
        for table, lengths in zip(tables, parts, strict=True):
            sums = table[drawn].sum(axis=1)  # [draws, 2]
            lengths.append(1 + sums[:, 1] / np.maximum(sums[:, 0], 1))
    return [np.concatenate(lengths) for lengths in parts]


def _round_lengths(acceptance: Acceptance, histogram: list[int], rng: Generator) -> NDArray:
    import numpy as np

    counts = rng.multinomial(acceptance.rounds, np.array(histogram) / sum(histogram), size=DRAWS)
    return 1 + counts @ np.arange(len(histogram)) / acceptance.rounds


def _interval(draws: NDArray, confidence: float, basis: str) -> Interval:
    import numpy as np

    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Interval(low=float(low), high=float(high), basis=basis)
