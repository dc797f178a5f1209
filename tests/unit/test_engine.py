"""The engine's pure part, DeepSpeed's configuration, and the draw of short windows."""

from __future__ import annotations

from dflash2_train.config import RunConfig, TrainConfig
from dflash2_train.engine import build_deepspeed_config
from dflash2_train.window_step import window_block_size


def settings(**changes: object) -> TrainConfig:
    return TrainConfig(**{"output_dir": "x", "steps": 100, "row_tokens": 64, "rows": 2, **changes})  # type: ignore[arg-type]


def test_bf16_accumulates_in_fp32_and_batch_sizes_multiply_out() -> None:
    config = build_deepspeed_config(settings(accumulation=3), world_size=4)
    assert config["train_batch_size"] == 2 * 3 * 4
    assert config["bf16"]["enabled"] is True
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
    assert config["zero_optimization"]["stage"] == 1


def test_fp32_asks_for_no_mixed_precision() -> None:
    config = build_deepspeed_config(settings(dtype="float32"), world_size=1)
    assert config["bf16"]["enabled"] is False
    assert "data_types" not in config and "communication_data_type" not in config


def test_without_zero_the_optimizer_clips_and_not_deepspeed() -> None:
    assert build_deepspeed_config(settings(dtype="float32", zero_stage=0), world_size=1)["gradient_clipping"] == 0
    assert build_deepspeed_config(settings(grad_clip=0.5), world_size=1)["gradient_clipping"] == 0.5


def test_short_blocks_take_their_share_of_windows_and_a_resume_repeats_the_draw(tiny_config: RunConfig) -> None:
    tiny_config.train.short_block_size, tiny_config.train.short_block_share = 2, 0.75
    sizes = [window_block_size(tiny_config, step) for step in range(2000)]
    assert sizes == [window_block_size(tiny_config, step) for step in range(2000)]
    assert set(sizes) == {2, tiny_config.drafter.block_size}
    assert 0.7 < sizes.count(2) / len(sizes) < 0.8


def test_without_a_short_size_every_window_trains_whole_blocks(tiny_config: RunConfig) -> None:
    assert {window_block_size(tiny_config, step) for step in range(50)} == {tiny_config.drafter.block_size}
