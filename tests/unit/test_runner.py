"""The decoding loop: output equal to plain decoding, exact stops, no state between calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.runner import DecodeSettings, GenerationResult, Round, generate, plain_decode
from dflash2_train.runner.target_session import open_session
from tests.decoding import Oracle, run_loop

NEW_TOKENS = 20
NUM_DRAFTED = 3
PROMPT = [3, 14, 15, 92, 65, 35]
LONG_PROMPT = [(7 * i) % 90 for i in range(40)]
TAPS = (0, 2, 4)
NO_STOP: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """A random target with much-varied greedy text."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def drafter(tiny_config: RunConfig) -> Drafter:
    torch.manual_seed(2)
    return Drafter(DrafterShape.from_config(tiny_config)).eval()


def settings(**changes: object) -> DecodeSettings:
    values: dict[str, object] = {"max_new_tokens": NEW_TOKENS, "num_drafted": NUM_DRAFTED, "stop_ids": NO_STOP}
    return DecodeSettings(**{**values, **changes})  # type: ignore[arg-type]


def cycle(values: list[int]) -> Iterator[int]:
    while True:
        yield from values


def decode_with_oracle(
    target: LlamaForCausalLM, truth: list[int], right: list[int], chosen: DecodeSettings
) -> tuple[GenerationResult, Oracle]:
    oracle = Oracle([truth], [len(PROMPT)], cycle(right), chosen.num_drafted, vocab_size=96)
    return run_loop(target, oracle, TAPS, [PROMPT], chosen)[0], oracle


@pytest.fixture(scope="module")
def truth(target: LlamaForCausalLM) -> list[int]:
    """The greedy text, longer than any test decodes, so that the oracle always knows what comes next."""
    ids = plain_decode(target, PROMPT, settings(max_new_tokens=NEW_TOKENS + 8)).token_ids
    assert len(set(ids[:NEW_TOKENS])) > NEW_TOKENS // 2, "greedy text that repeats itself would hide stale caches"
    return ids


def test_plain_decoding_equals_recomputing_every_token_from_scratch(target: LlamaForCausalLM, truth: list[int]) -> None:
    ids = list(PROMPT)
    with torch.inference_mode():
        for expected in truth[:NEW_TOKENS]:
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
            assert ids[-1] == expected


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_a_random_drafter_of_any_block_length_leaves_greedy_output_unchanged(
    target: LlamaForCausalLM, drafter: Drafter, truth: list[int], num_drafted: int
) -> None:
    result = generate(target, drafter, PROMPT, settings(num_drafted=num_drafted))
    assert result.token_ids == truth[:NEW_TOKENS]
    assert {one.num_proposed for one in result.rounds} == {num_drafted}


@pytest.mark.parametrize("right", [*([m] for m in range(8)), [0, 7, 3, 1, 6, 2]])
def test_any_number_of_right_drafts_leaves_greedy_output_unchanged_and_is_counted(
    target: LlamaForCausalLM, truth: list[int], right: list[int]
) -> None:
    result, _ = decode_with_oracle(target, truth, right, settings(num_drafted=7))
    assert result.token_ids == truth[:NEW_TOKENS]
    script = cycle(right)
    assert [one.num_accepted for one in result.rounds] == [next(script) for _ in result.rounds]
    assert sum(one.num_emitted for one in result.rounds) == NEW_TOKENS - 1


@pytest.mark.parametrize("limit", range(1, NEW_TOKENS + 1))
def test_never_more_than_max_new_tokens(target: LlamaForCausalLM, truth: list[int], limit: int) -> None:
    result, _ = decode_with_oracle(target, truth, [2, 7, 0], settings(max_new_tokens=limit, num_drafted=7))
    assert result.token_ids == truth[:limit]
    assert result.finish_reason == "length"
    assert sum(one.num_emitted for one in result.rounds) == limit - 1


@pytest.mark.parametrize("place", range(NEW_TOKENS))
def test_nothing_follows_the_first_stop_token_wherever_it_stands_in_a_block(
    target: LlamaForCausalLM, truth: list[int], place: int
) -> None:
    stops = frozenset({truth[place], 95})
    chosen = settings(stop_ids=stops, num_drafted=7)
    plain = plain_decode(target, PROMPT, chosen)
    result, _ = decode_with_oracle(target, truth, [2, 7, 0], chosen)
    assert result.token_ids == plain.token_ids == truth[: truth.index(truth[place]) + 1]
    assert result.finish_reason == plain.finish_reason == "stop"


def test_every_id_of_a_list_valued_eos_stops(target: LlamaForCausalLM, truth: list[int]) -> None:
    result, _ = decode_with_oracle(
        target, truth, [7], settings(stop_ids=frozenset({truth[9], truth[4]}), num_drafted=7)
    )
    assert result.token_ids == truth[:5]


def test_a_cut_round_counts_what_was_verified_and_what_was_emitted(target: LlamaForCausalLM, truth: list[int]) -> None:
    result, _ = decode_with_oracle(target, truth, [5], settings(max_new_tokens=3, num_drafted=7))
    assert result.rounds == [Round(num_proposed=7, num_accepted=5, num_emitted=2)]


def test_the_drafter_is_fed_the_hidden_states_of_committed_tokens_only(
    target: LlamaForCausalLM, truth: list[int]
) -> None:
    result, oracle = decode_with_oracle(target, truth, [2, 0, 3], settings())
    fed = torch.cat(oracle.observed[0])
    ids = torch.tensor([[*PROMPT, *result.token_ids]])
    with torch.inference_mode():
        states = target(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)[: len(fed)]
    assert torch.allclose(fed, expected, atol=1e-4)
    assert len(fed) >= len(PROMPT) + NEW_TOKENS - 1 - (NUM_DRAFTED + 1)


def test_the_last_layers_tap_is_taken_before_the_final_norm(target: LlamaForCausalLM) -> None:
    with torch.inference_mode(), open_session(target, num_rows=1, capacity=len(PROMPT), taps=(5,)) as session:
        rows = session.prefill(0, torch.tensor(PROMPT))
        logits = target.lm_head(target.model.norm(rows.tap_hidden[:, -1:]))
    assert torch.allclose(logits, rows.logits, atol=1e-5)


def count_hooks(target: LlamaForCausalLM) -> int:
    return sum(len(layer._forward_hooks) for layer in target.model.layers)


def test_no_state_survives_a_call(target: LlamaForCausalLM, drafter: Drafter) -> None:
    before = count_hooks(target)
    fresh = generate(target, drafter, PROMPT, settings())
    generate(target, drafter, LONG_PROMPT, settings())
    used = generate(target, drafter, PROMPT, settings())
    assert (used.token_ids, used.rounds) == (fresh.token_ids, fresh.rounds)
    assert count_hooks(target) == before


def test_hooks_are_removed_when_a_call_fails(target: LlamaForCausalLM) -> None:
    before = count_hooks(target)
    oracle = Oracle([[]], [len(PROMPT)], iter(()), NUM_DRAFTED, vocab_size=96, num_output=[NEW_TOKENS])
    with pytest.raises(IndexError):
        run_loop(target, oracle, TAPS, [PROMPT], settings())
    assert count_hooks(target) == before


@pytest.mark.parametrize("draft_sampling", ["argmax", "selector"])
def test_sampled_decoding_depends_on_the_generator_alone(
    target: LlamaForCausalLM, drafter: Drafter, draft_sampling: str
) -> None:
    chosen = settings(temperature=0.8, top_p=0.9, draft_sampling=draft_sampling)
    runs = [generate(target, drafter, PROMPT, chosen, torch.Generator().manual_seed(seed)) for seed in (4, 4, 5)]
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids
    assert len(runs[0].token_ids) == NEW_TOKENS


@pytest.mark.parametrize("draft_sampling", ["argmax", "selector"])
def test_sampling_close_to_temperature_zero_gives_the_greedy_text(
    target: LlamaForCausalLM, drafter: Drafter, truth: list[int], draft_sampling: str
) -> None:
    chosen = settings(temperature=1e-4, draft_sampling=draft_sampling)
    assert generate(target, drafter, PROMPT, chosen).token_ids == truth[:NEW_TOKENS]
    assert plain_decode(target, PROMPT, chosen).token_ids == truth[:NEW_TOKENS]


def test_positions_beyond_the_drafters_limit_are_refused(target: LlamaForCausalLM, drafter: Drafter) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings=128"):
        generate(target, drafter, PROMPT, settings(max_new_tokens=120))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"num_drafted": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.0},
        {"draft_sampling": "relaxed"},
        {"compile_target": True},
    ],
)
def test_settings_outside_their_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        settings(**wrong)


def test_an_empty_prompt_is_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        plain_decode(target, [], settings())


def test_time_is_charged_to_the_parts(target: LlamaForCausalLM, drafter: Drafter) -> None:
    timings = generate(target, drafter, PROMPT, settings()).timings
    assert min(timings.prefill, timings.context, timings.draft, timings.verify, timings.sample) > 0
    plain = plain_decode(target, PROMPT, settings()).timings
    assert plain.draft == plain.context == 0 < plain.verify
