"""How layers are run changes memory and time, never names or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_train.config import ConfigError, TrainConfig
from dflash2_train.layer_execution import apply_layer_options
from dflash2_train.model.drafter import Drafter
from tests.drafters import random_drafter

CPU = torch.device("cpu")


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(output_dir="x", steps=1, row_tokens=8, rows=1, **changes)


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    """Of a loss through context, layers and mask vector."""
    generator = torch.Generator().manual_seed(2)
    shape = drafter.shape
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    taps = torch.randn(1, 5, shape.num_taps * shape.hidden_size, generator=generator)
    cached = drafter.project_context(drafter.encode_context(taps), torch.arange(5).unsqueeze(0))
    ids = torch.tensor([[3, *[shape.mask_token_id] * (shape.block_size - 1)]])
    positions = torch.arange(5, 5 + shape.block_size).unsqueeze(0)
    hidden = drafter.decode_block(drafter.embed_blocks(ids, embedding), positions, cached)
    drafter.zero_grad()
    hidden.square().sum().backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def test_recomputed_layers_have_the_gradients_of_kept_ones_to_the_last_bit() -> None:
    plain, recomputed = random_drafter(num_layers=3), random_drafter(num_layers=3)
    recomputed.load_state_dict(plain.state_dict())
    apply_layer_options(recomputed.layers, settings(gradient_checkpointing=True), CPU)
    expected, found = gradients(plain), gradients(recomputed)
    assert expected.keys() == found.keys()
    assert "layers.1.self_attn.k_proj.weight" in found
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_recomputing_runs_each_layer_twice_and_keeps_the_published_names() -> None:
    drafter = random_drafter(num_layers=2)
    names = list(drafter.state_dict())
    calls = []
    drafter.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    apply_layer_options(drafter.layers, settings(gradient_checkpointing=True), CPU)
    gradients(drafter)
    assert len(calls) == 2
    assert list(drafter.state_dict()) == names


def test_compiled_layers_are_recomputed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: calls.append(1) or run(*arguments)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch, "compile", compiled)  # what it compiles to is for a GPU to show
    drafter = random_drafter(num_layers=2)
    both = settings(compile_layers=True, gradient_checkpointing=True)
    apply_layer_options(drafter.layers, both, torch.device("cuda"))
    gradients(drafter)
    assert len(calls) == 2 * 2


def test_compiling_off_cuda_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"train\.compile_layers"):
        apply_layer_options(random_drafter().layers, settings(compile_layers=True), CPU)
