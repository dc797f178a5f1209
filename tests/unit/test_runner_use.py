"""How people use the runner: streams, packed layers, targets spread by accelerate, bfloat16 with a reported gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from dflash2_train.config import ConfigError
from dflash2_train.evaluate.measure import check_equality, teacher_forced_gaps
from dflash2_train.model.drafter import Drafter
from dflash2_train.pretrained import load_pretrained
from dflash2_train.runner import DecodeSettings, generate, plain_decode, stream
from dflash2_train.runner.packing import can_pack, packed_linears
from tests.architectures import BUILDERS, SMALL, write_architecture
from tests.drafters import random_drafter

PROMPT = [3, 14, 15, 92, 65, 35]
NEW_TOKENS = 20
ROUNDING = 0.1  # logits; bf16 has 8 bits, and these logits are below 8


@pytest.fixture
def target() -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel = BUILDERS["llama"](SMALL).eval()
    return model


@pytest.fixture
def drafter() -> Drafter:
    shape: dict[str, Any] = {"vocab_size": 96, "mask_token_id": 95, "num_target_layers": 5}
    return random_drafter(**shape).eval()


def settings(**changes: Any) -> DecodeSettings:
    values: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_drafted": 3, "stop_ids": frozenset()}
    return DecodeSettings(**{**values, **changes})


def count_hooks(target: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def test_a_stream_gives_the_text_of_generate_round_by_round(target: PreTrainedModel, drafter: Drafter) -> None:
    whole = generate(target, drafter, PROMPT, settings())
    pieces = list(stream(target, drafter, PROMPT, settings()))
    assert [token for piece in pieces for token in piece] == whole.token_ids
    assert [len(piece) for piece in pieces] == [1, *(one.num_emitted for one in whole.rounds)]


def test_a_stream_that_is_left_early_leaves_the_target_as_it_was(target: PreTrainedModel, drafter: Drafter) -> None:
    before = count_hooks(target)
    pieces = stream(target, drafter, PROMPT, settings())
    assert len(next(pieces)) == 1
    assert count_hooks(target) > before
    pieces.close()  # type: ignore[attr-defined]
    assert count_hooks(target) == before
    assert target.config._attn_implementation == "sdpa"


def test_another_call_between_two_items_of_a_stream_disturbs_neither(target: PreTrainedModel, drafter: Drafter) -> None:
    whole = generate(target, drafter, PROMPT, settings()).token_ids
    other = generate(target, drafter, PROMPT[2:], settings()).token_ids
    text = []
    for piece in stream(target, drafter, PROMPT, settings()):
        text.extend(piece)
        assert generate(target, drafter, PROMPT[2:], settings()).token_ids == other
    assert text == whole
    assert target.config._attn_implementation == "sdpa"


def test_time_between_two_items_of_a_stream_is_not_the_decoders(
    target: PreTrainedModel, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train.runner import loop, outcome

    moment = [0.0]
    monkeypatch.setattr(outcome, "now", lambda: moment[0])
    clock = outcome.Clock(torch.device("cpu"))
    outputs = [outcome.RowOutput(0, settings())]
    for _ in loop.speculate(target, None, (), [PROMPT], settings(), None, outputs, clock):
        moment[0] += 100.0
    assert clock.timings.prefill == clock.timings.decode == 0.0


def test_a_target_spread_by_accelerate_decodes_the_same_text(target: PreTrainedModel, drafter: Drafter) -> None:
    expected = generate(target, drafter, PROMPT, settings()).token_ids
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "cpu" for layer in range(5)}
    spread = dispatch_model(target, device_map=places, main_device="cpu", force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in spread.modules())
    assert generate(spread, drafter, PROMPT, settings()).token_ids == expected


def test_a_target_loaded_by_accelerates_device_map_decodes_the_same_text(drafter: Drafter, tmp_path: Path) -> None:
    write_architecture(tmp_path, "qwen3")
    whole = load_pretrained(tmp_path, torch.float32)
    spread = load_pretrained(tmp_path, torch.float32, device="auto")
    expected = generate(whole, drafter, PROMPT, settings()).token_ids
    assert generate(spread, drafter, PROMPT, settings()).token_ids == expected


def test_packed_layers_decode_the_same_text_and_are_unpacked_afterwards(
    target: PreTrainedModel, drafter: Drafter
) -> None:
    expected = plain_decode(target, PROMPT, settings()).token_ids
    with packed_linears(target, drafter):
        assert "forward" in target.lm_head.__dict__
        assert generate(target, drafter, PROMPT, settings()).token_ids == expected
        assert plain_decode(target, PROMPT, settings()).token_ids == expected
    assert all("forward" not in module.__dict__ for module in [*target.modules(), *drafter.modules()])


def test_packed_layers_are_unpacked_when_decoding_fails(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"), packed_linears(target):
        plain_decode(target, [], settings())
    assert all("forward" not in module.__dict__ for module in target.modules())


def test_layers_of_a_dtype_without_packing_are_refused(target: PreTrainedModel) -> None:
    assert not can_pack(target.double())
    with pytest.raises(ConfigError, match="packed_linears"), packed_linears(target):
        pass


def test_bf16_text_departs_from_the_targets_argmax_by_rounding_alone(target: PreTrainedModel, drafter: Drafter) -> None:
    target, drafter = target.bfloat16(), drafter.bfloat16()
    for start in range(5):
        prompt = [start, *PROMPT]
        result = generate(target, drafter, prompt, settings())
        gaps = teacher_forced_gaps(target, prompt, result.token_ids)
        assert float(gaps.max()) < ROUNDING
        planted = [*result.token_ids[:9], (result.token_ids[9] + 1) % 96]
        assert float(teacher_forced_gaps(target, prompt, planted)[-1]) > ROUNDING, "a planted token must show"
        record = check_equality(target, prompt, planted, result.token_ids)
        assert not record.equal and record.first_difference == 9
