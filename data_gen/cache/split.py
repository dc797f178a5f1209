"""Which captured conversations are held back from training: a choice by hash, the same for every reader of a cache.

A conversation is all answers to one prompt: its repeats and its turns. They share most of their text, so they are held
back together or not at all. Each conversation has a place in [0, 1) that depends on the seed and its own name alone:
more data, another order or another number of ranks moves none from one side to the other, and a larger share holds
back what a smaller one did and more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from data_gen.cache.row_plan import Document
from dflash2_train.config import ConfigError

HELD_BACK_FOLDER = "held_back"  # of a ring, where its held-back answers lie
WHOLE_FILE = "whole.json"  # in that folder once all are there, with the share and the seed that chose them
_REPEAT_AND_TURN = re.compile(r"-\d+-\d+$")


def conversation_of(sample_id: str) -> str:
    """The conversation that a sample belongs to: its id without ``-repeat-turn``; an id of another form is its own."""
    return _REPEAT_AND_TURN.sub("", sample_id)


def place(conversation: str, seed: int) -> float:
    """Where a conversation stands between 0 and 1."""
    digest = hashlib.sha256(f"held back/{seed}/{conversation}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def by_place(documents: Iterable[Document], seed: int) -> list[Document]:
    """Documents by the place of their conversation: the first n are the same however many follow."""
    return sorted(documents, key=lambda one: (place(conversation_of(one.sample_id), seed), one.sample_id))


def split_documents(
    documents: Sequence[Document], *, share: float, seed: int
) -> tuple[Sequence[Document], list[Document]]:
    """Documents to train on, in their order, and those held back, by place.

    Args:
        documents: of a cache.
        share: of the conversations that is held back; 0 gives all documents back as they came.
        seed: of the choice.

    Raises:
        ConfigError: nothing is left on one of the two sides.
    """
    if share == 0:
        return documents, []
    held = {document.sample_id: place(conversation_of(document.sample_id), seed) < share for document in documents}
    kept = [document for document in documents if not held[document.sample_id]]
    back = by_place((document for document in documents if held[document.sample_id]), seed)
    if not kept or not back:
        number = len({conversation_of(document.sample_id) for document in documents})
        side = "training" if back else "validation"
        raise ConfigError(
            f"train.validation.share={share}: of {number} captured conversations none is left for {side}. "
            f"{'Lower' if back else 'Raise'} it, or change train.validation.seed."
        )
    return kept, back
