"""From the records of all units to cells: one a task, temperature and decoder. Every figure is a sum of raw counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash2_train.evaluate.grid.plan import PLAIN, ScriptedTask, unit_key
from dflash2_train.evaluate.grid.records import TurnRecord, UnitRecord
from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord
from dflash2_train.evaluate.report import count, measure_speed
from dflash2_train.evaluate.room import Room
from dflash2_train.evaluate.runs import AUTOREGRESSIVE, Acceptance, Cell, RequestCounts


def cells_of(
    scripted: Sequence[ScriptedTask],
    records: Mapping[str, UnitRecord],
    *,
    temperatures: Sequence[float],
    decoders: Sequence[int],
    room: Room,
) -> list[Cell]:
    """All cells, task by task, from the records of every unit by key; a decoder is a K or :data:`PLAIN`."""
    return [
        build_cell(one, [records[key] for key in _keys(one, temperature)], temperature, drafted, room)
        for one in scripted
        for temperature in temperatures
        for drafted in decoders
    ]


def _keys(scripted: ScriptedTask, temperature: float) -> list[str]:
    return [unit_key(scripted.name, index, temperature) for index in range(len(scripted.scripts))]


def build_cell(
    scripted: ScriptedTask, records: Sequence[UnitRecord], temperature: float, drafted: int, room: Room
) -> Cell:
    """One cell. Turns that did not fit the context are counted, and are in no mean."""
    answered: list[tuple[int, TurnRecord, DecodeRecord]] = []
    for record in records:
        answered += [(record.index, turn, turn.decoded) for turn in record.of(drafted) if turn.decoded is not None]
    too_long = sum(script.num_turns for script in scripted.scripts) - len(answered)
    decoded = [one for _, _, one in answered]
    speed = measure_speed(decoded)
    counts = count(decoded, drafted)
    labels = room.labels(too_long)
    if temperature == 0 and drafted != PLAIN:
        labels += _departures([turn.equality for _, turn, _ in answered if turn.equality is not None])
    return Cell(
        task=scripted.task.name,
        category=scripted.task.category,
        method=AUTOREGRESSIVE if drafted == PLAIN else "drafter",
        num_drafted=None if drafted == PLAIN else drafted,
        concurrency=1,
        temperature=temperature,
        acceptance=None
        if drafted == PLAIN
        else Acceptance(
            rounds=counts.rounds,
            proposed=counts.proposed,
            accepted=counts.accepted,
            accepted_per_position=counts.accepted_per_position,
        ),
        requests=RequestCounts(asked=len(answered), answered=len(answered), too_long=too_long),
        prompt_tokens=sum(turn.num_prompt_tokens for _, turn, _ in answered),
        output_tokens=counts.output_tokens,
        seconds=sum(speed.seconds.values()),
        seconds_by_part=speed.seconds,
        prompts_sha256=scripted.task.prompts_sha256,
        per_request=None
        if drafted == PLAIN
        else [
            [index, len(one.rounds), sum(num_accepted for _, num_accepted, _ in one.rounds), turn.num_prompt_tokens]
            for index, turn, one in answered
        ],
        labels=labels,
    )


def _departures(checks: Sequence[EqualityRecord]) -> list[str]:
    unequal = sum(not one.equal for one in checks)
    return [f"{unequal} of {len(checks)} answers are not plain greedy decoding's, token for token"] if unequal else []


def equality_checks(records: Sequence[UnitRecord]) -> list[tuple[str, EqualityRecord]]:
    """Every greedy answer that was held against plain decoding: its name in words, and what came of it."""
    return [
        (f"{record.task} {record.prompt_id}, turn {number + 1}, K={drafted}", turn.equality)
        for record in records
        for drafted, turns in record.turns.items()
        for number, turn in enumerate(turns)
        if turn.equality is not None
    ]
