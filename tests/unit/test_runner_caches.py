"""Every kind of target cache, rolled back at every accepted count, and greedy text that no drafter changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner import DecodeSettings, generate_batch, plain_decode, plain_decode_batch
from dflash2_train.runner.target_session import RowSession, SeparateSession, open_session
from tests.architectures import BUILDERS, SMALL
from tests.decoding import Oracle, run_loop
from tests.drafters import random_drafter

VOCAB, BLOCK, TAPS = 96, 8, (0, 2, 4)
PROMPTS = ([3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [(7 * i) % 90 for i in range(23)], [46])
EVERY_COUNT = (0, 7, 1, 6, 2, 5, 3, 4, 0)  # accepted drafts, one block after the other
NEW_TOKENS = 18
TOLERANCE = 2e-4


def _mistral() -> PreTrainedModel:
    sliding = {"sliding_window": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MistralForCausalLM(MistralConfig(**SMALL.common, **sliding))


# kind of layers -> (model, the session that suits it)
TARGETS: dict[str, tuple[Callable[[], PreTrainedModel], type]] = {
    "full": (lambda: BUILDERS["llama"](SMALL), RowSession),
    "qwen3": (lambda: BUILDERS["qwen3"](SMALL), RowSession),
    "sliding": (_mistral, RowSession),
    "sliding and full": (lambda: BUILDERS["gemma3"](SMALL), RowSession),
    "sliding and full with soft caps": (lambda: BUILDERS["gemma2"](SMALL), SeparateSession),
    "indexed": (lambda: BUILDERS["glm_moe_dsa"](SMALL), SeparateSession),
    "indexed and recurrent": (lambda: BUILDERS["glm5_next"](SMALL), SeparateSession),
    "full and recurrent": (lambda: BUILDERS["qwen3_5"](SMALL), SeparateSession),
}
STATIC = ("full", "sliding", "sliding and full")


@cache
def make_target(kind: str) -> PreTrainedModel:
    """A random target with varied greedy text."""
    torch.manual_seed(5)
    model = TARGETS[kind][0]().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key and weight.ndim == 1:
                weight.add_(torch.empty_like(weight).uniform_(-0.5, 1.0))
    head = model.get_output_embeddings()  # a tied one would repeat the last token for ever
    head.weight = torch.nn.Parameter(0.3 * torch.randn(head.weight.shape))
    return model


@cache
def make_drafter() -> Drafter:
    """A random drafter for all of them."""
    shape: dict[str, Any] = {"vocab_size": VOCAB, "mask_token_id": 95, "num_target_layers": 5, "block_size": BLOCK}
    return random_drafter(target_layer_ids=TAPS, sliding_window=9, **shape).eval()


def settings(**changes: Any) -> DecodeSettings:
    values: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_drafted": BLOCK - 1, "stop_ids": frozenset()}
    return DecodeSettings(**{**values, **changes})


@cache
def greedy_texts(kind: str) -> list[list[int]]:
    """Each prompt's plain greedy text, decoded alone and longer than the tests decode."""
    long = settings(max_new_tokens=NEW_TOKENS + BLOCK)
    return [plain_decode(make_target(kind), list(prompt), long).token_ids for prompt in PROMPTS]


@torch.inference_mode()
def from_scratch(model: PreTrainedModel, ids: list[int], num_rows: int) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -num_rows:]
    return logits


def both(kind: str) -> Iterator[bool]:
    yield False
    if kind in STATIC:
        yield True


CASES = [(kind, static) for kind in TARGETS for static in both(kind)]


@pytest.mark.parametrize(("kind", "static"), CASES)
@torch.inference_mode()
def test_after_every_accepted_count_logits_and_taps_equal_a_pass_from_scratch(kind: str, static: bool) -> None:
    model, generator = make_target(kind), torch.Generator().manual_seed(1)
    texts = [list(PROMPTS[0]), list(PROMPTS[1])]
    opened = open_session(model, num_rows=2, capacity=80, taps=TAPS, static=static)
    assert type(opened) is TARGETS[kind][1]
    with opened as session:
        for row, text in enumerate(texts):
            session.prefill(row, torch.tensor(text))
        for left, right in zip(EVERY_COUNT, reversed(EVERY_COUNT), strict=True):
            block = torch.randint(VOCAB, (2, BLOCK), generator=generator)
            rows = session.forward(block)
            for row, text in enumerate(texts):
                expected = from_scratch(model, [*text, *block[row].tolist()], BLOCK)
                assert torch.allclose(rows.logits[row], expected, atol=TOLERANCE, rtol=1e-3)
            session.commit([left + 1, right + 1])
            for text, drafts, accepted in zip(texts, block.tolist(), (left, right), strict=True):
                text.extend(drafts[: accepted + 1])
            assert session.lengths == [len(text) for text in texts]
    assert max(session.lengths) > 50, "the windows of 6 and 8 were crossed with every count"


@pytest.mark.parametrize("kind", TARGETS)
def test_plain_decoding_equals_recomputing_every_token(kind: str) -> None:
    ids = list(PROMPTS[0])
    for token in greedy_texts(kind)[0]:
        assert token == int(from_scratch(make_target(kind), ids, 1).argmax())
        ids.append(token)
    assert len(set(greedy_texts(kind)[0])) > 5, "text that repeats itself would hide stale caches"


@pytest.mark.parametrize(("kind", "static"), CASES)
def test_a_batch_of_unequal_prompts_is_decoded_as_each_is_alone(kind: str, static: bool) -> None:
    truths = greedy_texts(kind)
    stop = truths[1][6]  # one row ends early
    chosen = settings(stop_ids=frozenset({stop}), static_cache=static)
    expected = [
        truth[: truth.index(stop) + 1] if stop in truth[:NEW_TOKENS] else truth[:NEW_TOKENS] for truth in truths
    ]
    oracle = Oracle(
        truths,
        [len(prompt) for prompt in PROMPTS],
        cycle([2, 7, 0, 4, 1]),
        BLOCK - 1,
        vocab_size=VOCAB,
        num_output=[len(text) for text in expected],
    )
    results = run_loop(make_target(kind), oracle, TAPS, PROMPTS, chosen)
    assert [result.token_ids for result in results] == expected
    assert len({len(result.rounds) for result in results}) > 1, "rows should finish at different times"


@pytest.mark.parametrize(("kind", "static"), CASES)
def test_a_random_drafter_leaves_the_greedy_text_of_every_row_unchanged(kind: str, static: bool) -> None:
    results = generate_batch(make_target(kind), make_drafter(), PROMPTS, settings(static_cache=static, num_drafted=5))
    assert [result.token_ids for result in results] == [truth[:NEW_TOKENS] for truth in greedy_texts(kind)]


@pytest.mark.parametrize("static", [False, True])
def test_plain_decoding_of_a_batch_is_that_of_its_rows(static: bool) -> None:
    results = plain_decode_batch(make_target("sliding"), PROMPTS, settings(static_cache=static))
    assert [result.token_ids for result in results] == [truth[:NEW_TOKENS] for truth in greedy_texts("sliding")]


def test_a_row_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    truths = greedy_texts("full")
    for static in (False, True):
        chosen = settings(stop_ids=frozenset({truths[0][0]}), static_cache=static)
        results = generate_batch(make_target("full"), make_drafter(), PROMPTS, chosen)
        assert (results[0].token_ids, results[0].finish_reason) == ([truths[0][0]], "stop")
        for truth, result in zip(truths[1:], results[1:], strict=True):
            until = truth.index(truths[0][0]) + 1 if truths[0][0] in truth else NEW_TOKENS
            assert result.token_ids == truth[: min(until, NEW_TOKENS)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_a_compiled_verification_is_one_graph_for_all_rounds_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, *, mode, dynamic: compiler(model, backend=count, fullgraph=True, dynamic=dynamic),
    )
    chosen = settings(static_cache=True, compile_target=True)
    for _ in range(2):  # the second call has a cache and hooks of its own
        results = generate_batch(make_target("qwen3"), make_drafter(), PROMPTS, chosen)
        assert [result.token_ids for result in results] == [truth[:NEW_TOKENS] for truth in greedy_texts("qwen3")]
    assert len(graphs) == 1


def test_a_cache_that_cannot_be_rolled_back_is_refused_by_name() -> None:
    config = FalconH1Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
    )
    with pytest.raises(ConfigError, match="LinearAttentionAndFullAttentionLayer"):
        plain_decode(FalconH1ForCausalLM(config).eval(), [1], settings())


def test_a_static_cache_is_refused_where_the_target_has_none() -> None:
    with pytest.raises(ConfigError, match="static_cache=True: target glm_moe_dsa"):
        plain_decode(make_target("indexed"), [1], settings(static_cache=True))


def test_the_targets_own_attention_is_put_back_after_a_call_and_after_a_failure() -> None:
    model = make_target("full")
    oracle = Oracle([[]], [1], iter(()), 7, vocab_size=VOCAB, num_output=[NEW_TOKENS])
    with pytest.raises(IndexError):
        run_loop(model, oracle, TAPS, [[1]], settings())
    assert model.config._attn_implementation == "sdpa"
    plain_decode(model, [1], settings())
    assert model.config._attn_implementation == "sdpa"


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="96 embedding rows, the drafter a vocabulary of 64"):
        generate_batch(make_target("full"), random_drafter().eval(), PROMPTS, settings(num_drafted=3))


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts is empty"):
        generate_batch(make_target("full"), make_drafter(), [], settings())
