"""The forecast equals the runner: same text, same rounds, same drafts; a broken contract sets off the alarm."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.config import LossConfig
from dflash2_train.data import collate
from dflash2_train.model.drafter import Drafter
from dflash2_train.objective import Objective
from dflash2_train.runner.loop import generate, plain_decode
from dflash2_train.target import FrozenHead
from dflash2_train.validation.decode import FORECAST, REAL, RealDecoding, add_rounds, counted_rounds, read_prompt
from dflash2_train.validation.figures import accepted_drafts, no_rows, row_figures
from dflash2_train.validation.outcome import Outcome
from dflash2_train.validation.slots import read_blocks
from tests.overfitted import Overfitted

DECODED = 28  # tokens decoded of each answer; the captured text goes on for a block and more


@pytest.fixture
def unsure(trained: Overfitted) -> Overfitted:
    """The drafter with noise on its weights: it knows some of the text."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained.drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.std(unbiased=False))
    return trained


@torch.inference_mode()
def captured_answer(trained: Overfitted) -> CapturedSample:
    """The target's greedy answer as a capture would hold it, states in fp32 as the runner sees them."""
    model, drafter, prompt = trained.model, trained.drafter, trained.prompt
    text = plain_decode(model, prompt, trained.settings).token_ids
    ids = torch.tensor([*prompt, *text])
    states = model(ids[None], output_hidden_states=True)
    taps = [states.hidden_states[tap + 1][0] for tap in drafter.shape.target_layer_ids]
    logprobs, best = states.logits[0].log_softmax(-1).topk(4)
    return CapturedSample(
        sample_id="answer",
        input_ids=ids.int(),
        loss_mask=torch.arange(len(ids)) >= len(prompt),
        tap_hidden=torch.cat(taps, -1).clone(),
        teacher_ids=best.int(),
        teacher_logprobs=logprobs.half(),
        teacher_log_normaliser=torch.zeros(len(ids)),
    )


def forecast(trained: Overfitted, tokens: int) -> Tensor:
    """Accepted drafts of each round that the forecast sees among the first ``tokens`` tokens of the answer."""
    sample, settings = captured_answer(trained), replace(trained.settings, max_new_tokens=tokens)
    embedding = trained.model.get_input_embeddings().weight.detach()
    objective = Objective(trained.drafter, FrozenHead(embedding, embedding), LossConfig())
    batch = collate([[sample]], anchors_per_document=1000, seed=0, epochs=[0])
    table = read_blocks(objective, batch)
    _, served = row_figures(table)
    decoding: Any = SimpleNamespace(prompts=[read_prompt(sample)], settings=settings)
    chosen = served & RealDecoding.compared(decoding, batch, table.anchors)
    return accepted_drafts(table.selector[chosen])


def decoded(trained: Overfitted) -> Tensor:
    """Accepted drafts of each round of the runner."""
    settings = replace(trained.settings, max_new_tokens=DECODED)
    return counted_rounds(generate(trained.model, trained.drafter, trained.prompt, settings))


def outcome(forecast_rounds: Tensor, real_rounds: Tensor, drafter: Drafter) -> Outcome:
    sums = no_rows(drafter.shape.block_size - 1)
    add_rounds(sums, FORECAST, forecast_rounds)
    add_rounds(sums, REAL, real_rounds)
    return Outcome(step=1, sums=sums, num_drafted=3, weights="last", tolerance=0.25, seconds=0.0)


def test_every_round_of_the_forecast_is_a_round_of_the_runner(unsure: Overfitted) -> None:
    real = decoded(unsure)
    assert len(set(real.tolist())) > 2, "a case in which nothing or everything is accepted shows little"
    seen = forecast(unsure, DECODED)
    assert seen.tolist() == real.tolist()
    assert outcome(seen, real, unsure.drafter).alarm() is None


def test_a_block_of_the_runner_that_is_off_by_one_sets_off_the_alarm(
    trained: Overfitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = trained.drafter
    seen, sound, straight = forecast(trained, DECODED), decoded(trained), drafter.decode_block

    def shifted(embeddings: Tensor, positions: Tensor, *rest: object) -> Tensor:
        return straight(embeddings, positions + 1, *rest)  # type: ignore[arg-type]

    assert outcome(seen, sound, drafter).alarm() is None
    monkeypatch.setattr(drafter, "decode_block", shifted)
    broken = decoded(trained)
    assert float(broken.double().mean()) < float(sound.double().mean())
    assert outcome(seen.repeat(5), broken.repeat(5), drafter).alarm() is not None
