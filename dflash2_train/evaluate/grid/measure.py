"""Decode every unit that has no record yet.

In a unit every decoder answers the whole conversation, plainly or with its K, and another one begins each time.
Sampling is seeded by conversation and turn alone. Every decoder answers a short prompt at each temperature beforehand;
that warm-up is thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from dflash2_train.evaluate.grid.plan import PLAIN, Script, Unit
from dflash2_train.evaluate.grid.records import TurnRecord, UnitRecord
from dflash2_train.evaluate.measure import WARM_UP_TOKENS, check_equality, prompt_seed, to_record
from dflash2_train.evaluate.records import RecordsFile
from dflash2_train.evaluate.room import Room
from dflash2_train.model.drafter import Drafter
from dflash2_train.progress import ProgressReporter
from dflash2_train.runner import DecodeSettings, GenerationResult, generate, plain_decode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What decodes, and how."""

    target_model: PreTrainedModel
    drafter: Drafter
    settings: Callable[[int, float], DecodeSettings]  # of a K and a temperature
    drafted: Sequence[int]  # every K
    baseline: bool
    room: Room
    seed: int

    @property
    def decoders(self) -> list[int]:
        """Every K, and before them plain decoding where it is wanted."""
        return [PLAIN, *self.drafted] if self.baseline else list(self.drafted)

    def decode(self, prompt_ids: list[int], drafted: int, settings: DecodeSettings, seed: int) -> GenerationResult:
        """One answer."""
        generator = None
        if settings.temperature > 0:
            generator = torch.Generator(device=self.target_model.device).manual_seed(seed)
        if drafted == PLAIN:
            return plain_decode(self.target_model, prompt_ids, settings, generator)
        return generate(self.target_model, self.drafter, prompt_ids, settings, generator)


def measure_units(grid: Grid, units: Sequence[Unit], results: RecordsFile[UnitRecord]) -> None:
    """Fill ``results`` with every unit that it lacks."""
    waiting = [unit for unit in units if unit.key not in results.records]
    if len(waiting) < len(units):
        logger.info("%d of %d conversations are already measured", len(units) - len(waiting), len(units))
    warm_up(grid, waiting)
    done = len(units) - len(waiting)
    with ProgressReporter("conversations", len(units), done=done) as progress:
        for unit in waiting:
            results.append(measure_unit(grid, unit))
            done += 1
            progress.update(done, f"{unit.scripted.name}, temperature {unit.temperature:g}")


def warm_up(grid: Grid, units: Sequence[Unit]) -> None:
    """A few tokens with every decoder at every temperature, so that first-use costs fall outside the measurement."""
    first: dict[float, Unit] = {}
    for unit in units:
        if grid.room.fits(len(unit.script.prompt_ids)):
            first.setdefault(unit.temperature, unit)
    for temperature, unit in first.items():
        for drafted in grid.decoders:
            settings = grid.settings(drafted, temperature)
            short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
            grid.decode(unit.script.prompt_ids, drafted, short, grid.seed)


def measure_unit(grid: Grid, unit: Unit) -> UnitRecord:
    """All decoders' answers to one conversation, greedy ones held against plain decoding."""
    answered = {drafted: answer(grid, unit.script, drafted, unit.temperature) for drafted in unit.order(grid.decoders)}
    turns = {
        str(drafted): [
            TurnRecord(num_prompt_tokens=len(one.prompt_ids), decoded=to_record(one.result) if one.result else None)
            for one in answers
        ]
        for drafted, answers in answered.items()
    }
    if unit.temperature == 0 and grid.baseline:
        for drafted in grid.drafted:
            turns[str(drafted)] = _checked(grid, turns[str(drafted)], answered[drafted], answered[PLAIN])
    return UnitRecord(
        task=unit.scripted.name,
        index=unit.index,
        prompt_id=unit.script.prompt_id,
        temperature=unit.temperature,
        turns={str(drafted): turns[str(drafted)] for drafted in grid.decoders},
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn: what was asked in tokens, and what came; None where it does not fit the context."""

    prompt_ids: list[int]
    result: GenerationResult | None


def answer(grid: Grid, script: Script, drafted: int, temperature: float) -> list[Answer]:
    """The turns of a conversation in order, each asked with the tokens of this decoder's own answers before it."""
    settings = grid.settings(drafted, temperature)
    prompt_ids, answers = list(script.prompt_ids), list[Answer]()
    for turn in range(script.num_turns):
        if not grid.room.fits(len(prompt_ids)):
            answers.append(Answer(prompt_ids=prompt_ids, result=None))
            break
        seed = prompt_seed(grid.seed, f"{script.prompt_id}:{turn}")
        result = grid.decode(prompt_ids, drafted, settings, seed)
        answers.append(Answer(prompt_ids=prompt_ids, result=result))
        if turn < len(script.follow_ups):
            kept = result.token_ids[:-1] if result.token_ids[-1] in settings.stop_ids else result.token_ids
            prompt_ids = [*prompt_ids, *kept, *script.follow_ups[turn]]  # which begins with the template's own end
    return answers


def _checked(
    grid: Grid, turns: Sequence[TurnRecord], speculative: Sequence[Answer], plain: Sequence[Answer]
) -> list[TurnRecord]:
    """The turns with their equality; a turn that only one of the two could be asked has none."""
    checked = list(turns)
    for turn, (ours, theirs) in enumerate(zip(speculative, plain, strict=False)):
        if ours.result is not None and theirs.result is not None:
            equality = check_equality(
                grid.target_model, ours.prompt_ids, ours.result.token_ids, theirs.result.token_ids
            )
            checked[turn] = replace(turns[turn], equality=equality)
    return checked
