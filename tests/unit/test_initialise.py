"""A drafter may start from its target and from what its states look like; each start does what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.initialise import fc_from_taps, initialise, look_at_recent
from dflash2_train.model.rotation import rotation
from tests.drafters import tiny_shape

HIDDEN, CONTEXT = 64, 40


def shape() -> DrafterShape:
    return replace(
        tiny_shape(),
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        conv_group_size=16,
        rope_theta=10000.0,
    )


def contexts(count: int) -> torch.Tensor:
    """States with a large constant part in a few channels, as residual streams have."""
    states = torch.randn(count, HIDDEN)
    states[:, :3] += torch.tensor([9.0, -7.0, 6.0])
    return states


def test_layer_0_starts_by_looking_at_the_newest_context() -> None:
    drafter = Drafter(shape())
    drafter.reset_mask_embedding(torch.randn(HIDDEN))
    look_at_recent(drafter, contexts(500), gain=4.0)
    layer = drafter.layers[0]
    keys, _ = layer.self_attn.project_context(
        contexts(CONTEXT)[None], rotation(torch.arange(CONTEXT)[None], 64, 10000.0)
    )
    mask_slot = layer.input_layernorm(drafter.mask_embedding.expand(1, 1, 1, -1))  # [B, A, W, H]
    at = rotation(torch.tensor([[[CONTEXT + 1]]]), 64, 10000.0)  # slot 1 of a block anchored right after the context
    queries, _, _ = layer.self_attn._project_block(mask_slot, at)  # [B, M, A, W, N / M, D]
    weights = torch.softmax(queries.flatten(2, 4) @ keys.transpose(-1, -2), -1)  # [B, M, N / M, S]
    assert float(weights[..., -4:].sum(-1).min().detach()) > 0.5
    uniform = 4 / CONTEXT
    assert uniform < 0.2


def test_the_values_it_looks_at_pass_on_unchanged() -> None:
    drafter = Drafter(shape())
    drafter.reset_mask_embedding(torch.randn(HIDDEN))
    look_at_recent(drafter, contexts(500), gain=4.0)
    attention = drafter.layers[0].self_attn
    values = attention.v_proj.weight.detach()  # [D, H], one key head that both query heads share
    passed = attention.o_proj.weight.detach() @ torch.cat([values, values])  # context channel -> block channel
    assert float(passed.diagonal().mean()) == pytest.approx(1.0, abs=0.05)


def test_states_without_a_constant_part_are_refused_by_the_keys_name() -> None:
    drafter = Drafter(shape())
    drafter.reset_mask_embedding(torch.randn(HIDDEN))
    with pytest.raises(ConfigError, match="init_recent_gain"):
        look_at_recent(drafter, torch.randn(500, HIDDEN), gain=2.0)


def test_fc_can_start_as_a_weighted_sum_of_the_taps() -> None:
    drafter = Drafter(shape())
    weights = [0.0] * (drafter.shape.num_taps - 1) + [2.0]
    fc_from_taps(drafter, weights)
    taps = torch.randn(3, drafter.shape.num_taps * HIDDEN)
    torch.testing.assert_close(drafter.fc(taps), 2.0 * taps[:, -HIDDEN:])


def test_layers_and_final_norm_come_from_the_named_target_layers() -> None:
    drafter = Drafter(shape())
    names = {f"model.{name}": parameter for name, parameter in drafter.state_dict().items()}
    target = {
        name.replace("layers.0.", "layers.5."): torch.full_like(tensor, 0.5)
        for name, tensor in names.items()
        if "layers.0." in name or name == "model.norm.weight"
    }
    report = initialise(drafter, target, {0: 5})
    assert float(drafter.norm.weight.detach().mean()) == 0.5
    assert float(drafter.layers[0].mlp.down_proj.weight.detach().mean()) == 0.5
    assert "layers.0.self_attn.q_proj.weight" in report.copied
    assert "layers.1.self_attn.q_proj.weight" not in report.copied
