"""Training and decoding mean the same slot, position and context: a drafter that knows a text by heart is accepted."""

from __future__ import annotations

import pytest
from torch import Tensor

from dflash2_train.runner import GenerationResult, generate, plain_decode
from tests.overfitted import Overfitted


def acceptance(result: GenerationResult) -> float:
    """Mean acceptance length of the rounds that the text's end did not cut."""
    whole = result.rounds[:-1]
    return sum(one.num_accepted + 1 for one in whole) / len(whole)


def test_a_text_known_by_heart_is_accepted_block_after_block(trained: Overfitted) -> None:
    model, drafter, settings = trained.model, trained.drafter, trained.settings
    result = generate(model, drafter, trained.prompt, settings)
    assert result.token_ids == plain_decode(model, trained.prompt, settings).token_ids
    assert acceptance(result) >= 0.9 * drafter.shape.block_size


def test_drafting_one_position_off_is_seen_at_once(trained: Overfitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate above would catch a shifted contract: the very same drafter falls when its slots move by one."""
    model, drafter, settings = trained.model, trained.drafter, trained.settings
    straight = drafter.decode_block

    def shifted(embeddings: Tensor, positions: Tensor, *rest: object) -> Tensor:
        return straight(embeddings, positions + 1, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "decode_block", shifted)
    result = generate(model, drafter, trained.prompt, settings)
    assert result.token_ids == plain_decode(model, trained.prompt, settings).token_ids  # lossless all the same
    assert acceptance(result) < 0.9 * drafter.shape.block_size
