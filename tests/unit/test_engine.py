"""The engine's pure parts: DeepSpeed's configuration, the schedule, the parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash2_train.config import RunConfig, TrainConfig
from dflash2_train.engine import build_deepspeed_config, learning_rate_factor, parameter_groups
from dflash2_train.train import window_block_size


def settings(**changes: object) -> TrainConfig:
    return TrainConfig(**{"output_dir": "x", "steps": 100, "row_tokens": 64, "rows": 2, **changes})  # type: ignore[arg-type]


def test_bf16_accumulates_in_fp32_and_batch_sizes_multiply_out() -> None:
    config = build_deepspeed_config(settings(accumulation=3), world_size=4)
    assert config["train_batch_size"] == 2 * 3 * 4
    assert config["bf16"]["enabled"] is True
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["zero_optimization"]["stage"] == 1


def test_fp32_asks_for_no_mixed_precision() -> None:
    config = build_deepspeed_config(settings(dtype="float32"), world_size=1)
    assert config["bf16"]["enabled"] is False
    assert "data_types" not in config


def test_the_rate_warms_up_linearly_peaks_once_and_ends_at_its_share() -> None:
    factor = learning_rate_factor(settings(warmup=0.1, final_lr_ratio=0.1))
    rates = [factor(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[9] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(0.1)


def test_every_parameter_is_in_one_group_and_codebooks_norms_and_mask_do_not_decay() -> None:
    module = nn.Module()
    module.proj = nn.Linear(2, 2, bias=False)
    module.norm = nn.LayerNorm(2, bias=False)
    module.register_parameter("predecessor_codebook", nn.Parameter(torch.zeros(2, 2)))
    module.register_parameter("mask_embedding", nn.Parameter(torch.zeros(2)))
    groups = parameter_groups(module, settings(weight_decay=0.1, mask_lr_scale=5.0, gain_lr_scale=3.0, lr=1e-3))
    assert {group["name"]: len(group["params"]) for group in groups} == {
        "matrices": 1,
        "codebooks": 1,
        "gains": 1,
        "mask_embedding": 1,
    }
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0, 0.0]
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 3e-3, 5e-3])


def test_short_blocks_take_their_share_of_windows_and_a_resume_repeats_the_draw(tiny_config: RunConfig) -> None:
    tiny_config.train.short_block_size, tiny_config.train.short_block_share = 2, 0.75
    sizes = [window_block_size(tiny_config, step) for step in range(2000)]
    assert sizes == [window_block_size(tiny_config, step) for step in range(2000)]
    assert set(sizes) == {2, tiny_config.drafter.block_size}
    assert 0.7 < sizes.count(2) / len(sizes) < 0.8


def test_without_a_short_size_every_window_trains_whole_blocks(tiny_config: RunConfig) -> None:
    assert {window_block_size(tiny_config, step) for step in range(50)} == {tiny_config.drafter.block_size}
