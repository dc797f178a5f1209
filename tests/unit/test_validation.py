"""Which answers are validated, when forecast and real decoding disagree, and that training does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.row_plan import Document
from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.metrics import MetricSums
from dflash2_train.run_state import Progress
from dflash2_train.runner.outcome import LENGTH, STOP, GenerationResult, Round, Timings
from dflash2_train.training_data import CachedData, open_training_data
from dflash2_train.validation.captures import Captures, open_captures
from dflash2_train.validation.decode import (
    FORECAST,
    REAL,
    RealDecoding,
    add_rounds,
    counted_rounds,
    decode_settings,
    read_prompt,
)
from dflash2_train.validation.figures import no_rows
from dflash2_train.validation.outcome import Outcome
from dflash2_train.validation.validator import unnoticed
from tests.tiny_target import save_tiny_llama, write_cache

SAMPLES, TOKENS, PROMPT = 12, 24, 4
RECORDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "stop_ids": [2]}


@pytest.fixture
def config(tiny_config: RunConfig, tmp_path: Path) -> RunConfig:
    """A tiny target, and a cache of which a third is held back."""
    tiny_config.target.name = str(tmp_path / "target")
    tiny_config.data.teacher_top_k = 8
    tiny_config.train.validate_every, tiny_config.train.validation.share = 2, 0.34
    write_cache(save_tiny_llama(tmp_path / "target", tiny_config), tiny_config, samples=SAMPLES, length=TOKENS)
    return tiny_config


def data_of(config: RunConfig) -> CachedData:
    data = open_training_data(config, rank=0, verify_checksums=False, give_up=lambda: False)
    assert isinstance(data, CachedData)
    return data


def ids_of(captures: Captures, world_size: int) -> list[str]:
    batches = [batch for rank in range(world_size) for batch in captures.batches(rank, world_size)]
    return sorted(name for batch in batches for row in batch.sample_ids for name in row)


def test_what_is_held_back_is_in_no_training_row_and_in_every_validation_once(config: RunConfig) -> None:
    data = data_of(config)
    trained = {document.sample_id for number in range(40) for document in data.plan.row(number).documents}
    captures = open_captures(config, data)
    held = ids_of(captures, 1)
    assert len(held) == len(set(held)) == len(data.held_back().documents) > 0
    assert not trained & set(held)
    assert len(trained) + len(held) == SAMPLES
    assert ids_of(captures, 2) == ids_of(captures, 3) == held


def test_every_position_of_an_answer_is_an_anchor_and_nothing_is_drawn(config: RunConfig) -> None:
    for batch in open_captures(config, data_of(config)).batches(0, 1):
        inside = batch.loss_mask[0, :-1] & batch.loss_mask[0, 1:]
        same = batch.document_ids[0, :-1] == batch.document_ids[0, 1:]
        anchors = batch.anchor_positions[0][batch.anchor_valid[0]]
        assert anchors.tolist() == (inside & same).nonzero().squeeze(-1).tolist()


def test_the_first_answers_are_the_same_whatever_the_limit(config: RunConfig) -> None:
    data = data_of(config)
    everything = open_captures(config, data).documents
    config.train.validation.max_documents = 2
    assert open_captures(config, data).documents == everything[:2]


def test_captures_of_their_own_are_validated_on_and_refused_when_they_are_trained_on(config: RunConfig) -> None:
    config.train.validation.root, config.train.validation.share = config.data.root, 0.0
    other = [Document(sample_id="another", num_tokens=9, num_supervised=4)]
    elsewhere: Any = SimpleNamespace(plan=SimpleNamespace(documents=other))
    assert len(ids_of(open_captures(config, elsewhere), 2)) == SAMPLES
    with pytest.raises(CacheIntegrityError, match=r"validation\.root=.*: 12 of its conversations.* are trained on"):
        open_captures(config, data_of(config))


def test_prompts_to_decode_are_of_different_conversations() -> None:
    names = ["aa-0-0", "aa-1-0", "bb-0-0", "aa-0-1", "cc-2-0"]
    documents = [Document(sample_id=name, num_tokens=9, num_supervised=4) for name in names]
    source: Any = SimpleNamespace(width=1)
    captures = Captures(source, SimpleNamespace(), documents, limit=5, row_tokens=64)  # type: ignore[arg-type]
    assert [one.sample_id for one in captures.one_a_conversation(2)] == ["aa-0-0", "bb-0-0"]
    assert [one.sample_id for one in captures.one_a_conversation(9)] == ["aa-0-0", "bb-0-0", "cc-2-0"]


def test_the_prompt_of_an_answer_is_what_stands_before_it(config: RunConfig) -> None:
    data = data_of(config)
    sample = data.source.sample(data.held_back().documents[0].sample_id)
    prompt = read_prompt(sample)
    assert prompt.prompt_ids == sample.input_ids[:PROMPT].tolist()
    assert prompt.answer_tokens == len(sample) - PROMPT
    mask = sample.loss_mask.clone()
    mask[PROMPT + 5 : PROMPT + 7] = False  # another turn of the user
    assert read_prompt(replace(sample, loss_mask=mask)).answer_tokens == 5


def test_decoding_samples_as_the_captured_answers_were_whatever_the_configuration_says_now(config: RunConfig) -> None:
    settings = decode_settings(config, RECORDED)
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.6, 0.9, 7)
    assert (settings.stop_ids, settings.num_drafted) == (frozenset({2}), config.drafter.num_drafted)
    assert decode_settings(config, {**RECORDED, "min_p": 0.1}).min_p == 0.1
    assert decode_settings(config, {}).temperature == config.data.sampling.temperature


@pytest.mark.parametrize("option", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}])
def test_answers_sampled_as_the_runner_cannot_are_not_decoded(config: RunConfig, option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        decode_settings(config, {**RECORDED, **option})


def test_a_prompt_past_the_drafters_positions_is_refused_before_the_first_step(config: RunConfig) -> None:
    config.train.validation.decode_prompts, config.train.validation.decode_tokens = 1, 1000
    captures = open_captures(config, data_of(config))
    with pytest.raises(ConfigError, match=r"decode_tokens=1000.*max_position_embeddings=128"):
        RealDecoding(config, captures, device=torch.device("cpu"), rank=0, world_size=1)


def decoded(accepted: list[int], finish_reason: str, last_emitted: int | None = None) -> GenerationResult:
    rounds = [Round(3, count, count + 1) for count in accepted]
    if last_emitted is not None:
        rounds[-1] = rounds[-1]._replace(num_emitted=last_emitted)
    return GenerationResult(token_ids=[], finish_reason=finish_reason, rounds=rounds, timings=Timings())


def test_drafts_behind_a_stop_token_do_not_count_against_a_text_that_ends_with_it() -> None:
    assert counted_rounds(decoded([2, 3], STOP, last_emitted=1)).tolist() == [2, 1]
    assert counted_rounds(decoded([2, 3], STOP)).tolist() == [2, 3]  # the target's own token was the stop
    assert counted_rounds(decoded([2, 3], LENGTH, last_emitted=1)).tolist() == [2, 3]
    assert counted_rounds(decoded([], STOP)).tolist() == []


def outcome(forecast: list[int] | None, real: list[int] | None, *, tolerance: float = 0.25) -> Outcome:
    sums = no_rows(3)
    sums.add("acceptance_length", 30.0, 20.0)
    for name, accepted in ((FORECAST, forecast), (REAL, real)):
        if accepted is not None:
            add_rounds(sums, name, torch.tensor(accepted, dtype=torch.int64))
    return Outcome(step=7, sums=sums, num_drafted=3, weights="last", tolerance=tolerance, seconds=1.0)


def test_the_alarm_goes_off_when_real_drafts_fall_and_not_for_the_noise_of_a_few_rounds() -> None:
    good = [0, 1, 2, 3] * 30
    assert outcome(good, good).alarm() is None
    assert outcome(good, [0, 1, 2, 2] * 30).alarm() is None  # a sixth less
    text = outcome(good, [0] * 120).alarm()
    assert text is not None and "ALARM" in text and "real decoding accepts 0.00" in text and "1.50" in text
    assert outcome(good, [0] * 120).values()["validation/alarm"] == 1.0
    assert outcome(good[:4], [0, 1, 0, 0]).alarm() is None  # four rounds prove nothing
    assert outcome([0] * 120, good).alarm() is not None  # nor may it be better than it could be
    assert outcome([0] * 9, [0] * 9).alarm() is None
    assert outcome(good, [0, 1, 1, 2] * 30, tolerance=0.0).alarm() is not None


def test_the_best_checkpoint_is_told_by_real_decoding_where_there_is_any() -> None:
    forecast = outcome(None, None)
    assert (forecast.metric, forecast.best_by) == ("validation/acceptance_length", 1.5)
    real = outcome([1, 1], [2, 1])
    assert (real.metric, real.best_by) == ("validation/acceptance_length_real", 2.5)
    silent = outcome([1], [])  # every answer ended with its first token
    assert (silent.metric, silent.best_by, silent.alarm()) == ("validation/acceptance_length_real", None, None)


def test_values_are_finite_and_named_under_validation_and_the_table_has_a_line_a_slot() -> None:
    from rich.console import Console

    found = outcome([1, 1], [2, 1])
    values = found.values()
    assert all(name.startswith("validation/") and value == value for name, value in values.items())
    assert values["validation/rounds"] == 20.0
    assert not any("squares" in name for name in values)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found.table())
    text = console.export_text()
    console.file.close()
    assert "validation at step 7: acceptance length 1.500" in text
    assert "really decoded 2.500 (forecast for these 2.000)" in text
    assert found.table().row_count == 3


def test_the_best_is_remembered_with_its_step_and_another_metric_starts_anew() -> None:
    progress = Progress(step=2)
    assert progress.takes_for_best("forecast", 1.5)
    progress.step = 4
    assert not progress.takes_for_best("forecast", 1.5)
    assert not progress.takes_for_best("forecast", None)
    assert (progress.best_value, progress.best_step) == (1.5, 2)
    assert progress.takes_for_best("real", 1.2)
    assert (progress.best_metric, progress.best_step) == ("real", 4)


def test_modes_and_generators_are_put_back_even_when_a_validation_fails() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[1].eval()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), unnoticed(module, torch.device("cpu")):
        assert not module.training
        torch.rand(3)
        raise ZeroDivisionError
    assert (module.training, module[0].training, module[1].training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"validate_every": -1}, r"train\.validate_every=-1"),
        ({"validate_every": 5}, r"train\.validate_every=5: has nothing to validate on"),
        ({"share": 1.0}, r"train\.validation\.share=1\.0"),
        ({"share": 0.1, "root": "elsewhere"}, r"train\.validation\.root='elsewhere'"),
        ({"share": 0.1, "decode_prompts": 300}, r"train\.validation\.decode_prompts=300"),
        ({"share": 0.1, "max_documents": 0}, r"train\.validation\.max_documents=0"),
        ({"share": 0.1, "decode_tokens": 0}, r"train\.validation\.decode_tokens=0"),
        ({"share": 0.1, "tolerance": -0.1}, r"train\.validation\.tolerance=-0\.1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(
    tiny_config: RunConfig, changes: dict[str, Any], key: str
) -> None:
    tiny_config.train.validate_every = changes.pop("validate_every", 0)
    for name, value in changes.items():
        setattr(tiny_config.train.validation, name, value)
    with pytest.raises(ConfigError, match=key):
        tiny_config.check()


def test_the_share_is_part_of_what_a_resume_must_share_and_the_rest_is_free(config: RunConfig) -> None:
    data = data_of(config)
    assert data.order()["held_back"] == {"share": 0.34, "seed": 0}
    config.train.validation.share = 0.0
    assert "held_back" not in data_of(config).order()


def test_sums_of_two_ranks_add_up_to_those_of_one() -> None:
    one, two = MetricSums(), MetricSums()
    for sums, accepted in ((one, [1, 2]), (two, [])):
        add_rounds(sums, REAL, torch.tensor(accepted, dtype=torch.int64))
    assert (one + two).sums() == one.sums()
