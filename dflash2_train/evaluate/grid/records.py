"""What one unit leaves on the disk: the answers of every decoder, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash2_train.evaluate.grid.plan import unit_key
from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One answer of one decoder."""

    num_prompt_tokens: int
    decoded: DecodeRecord | None  # None = prompt, answer and a block do not fit the context
    equality: EqualityRecord | None = None  # of a greedy answer with drafts, against plain decoding

    @staticmethod
    def from_json(row: dict[str, Any]) -> TurnRecord:
        """The inverse of ``dataclasses.asdict``; KeyError or TypeError for another layout."""
        return TurnRecord(
            num_prompt_tokens=row["num_prompt_tokens"],
            decoded=DecodeRecord(**row["decoded"]) if row["decoded"] else None,
            equality=EqualityRecord(**row["equality"]) if row["equality"] else None,
        )


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """All answers to one conversation at one temperature. After a turn that does not fit, none is asked."""

    task: str
    index: int
    prompt_id: str
    temperature: float
    turns: dict[str, list[TurnRecord]]  # by K, as text; "0" is plain decoding

    @property
    def key(self) -> str:
        """As :attr:`Unit.key`."""
        return unit_key(self.task, self.index, self.temperature)

    def of(self, drafted: int) -> list[TurnRecord]:
        """The answers with this K; empty where it was not measured."""
        return self.turns.get(str(drafted), [])

    @staticmethod
    def from_json(row: dict[str, Any]) -> UnitRecord:
        """The inverse of ``dataclasses.asdict``; KeyError or TypeError for another layout."""
        turns = {name: [TurnRecord.from_json(turn) for turn in rows] for name, rows in row["turns"].items()}
        return UnitRecord(**{**row, "turns": turns})
