"""A tiny experiment and its drafter, shared by test modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import (
    DataConfig,
    DrafterConfig,
    EvalConfig,
    ExportConfig,
    PromptSourceConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from dflash2_train.model.drafter import Drafter
    from dflash2_train.target import TargetInfo

RECORD = {"time_utc": "2026-01-01T00:00:00+00:00", "git": {"commit": "abc", "uncommitted_sha256": None}}

# What two runs of one configuration do not share in their log lines.
CLOCKED = ("seconds", "attempt", "data_wait", "validation/seconds", "tokens_per_second", "blocks_per_second", "tflops")


def without_clock(row: dict[str, float]) -> dict[str, float]:
    """A log line without what hangs on the machine's pace and memory."""
    return {name: value for name, value in row.items() if name not in CLOCKED and not name.startswith("memory/")}


def tiny_run_config(root: Path) -> RunConfig:
    """A whole configuration under ``root`` with the smallest sizes that exercise every rule; checked."""
    starter = PromptSourceConfig(kind="starter", split="train", license="apache-2.0")
    config = RunConfig(
        name="tiny",
        run_dir=str(root),
        target=TargetConfig(name="tiny", license="apache-2.0", hidden_size=32, num_layers=6, vocab_size=96),
        drafter=DrafterConfig(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=48,
            block_size=4,
            target_layer_ids=[0, 2, 4],
            mask_token_id=95,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=6,
            conv_group_size=8,
            selector_rank=5,
            selector_top_k=6,
            max_position_embeddings=128,
        ),
        data=DataConfig(
            root=str(root / "data"),
            train_prompts=[starter],
            holdout_prompts=[starter],
            sampling=SamplingConfig(max_tokens=16),
            max_prompt_tokens=32,
        ),
        train=TrainConfig(output_dir=str(root / "train"), steps=2, row_tokens=64, rows=2),
        export=ExportConfig(output_dir=str(root / "export")),
        eval=EvalConfig(output_dir=str(root / "eval"), max_new_tokens=8),
    )
    config.check()
    return config


def make_target_info(config: RunConfig) -> TargetInfo:
    """What opening the tiny target would tell."""
    from dflash2_train.target import TargetInfo

    target = config.target
    return TargetInfo(
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_ids=(1, 2),
        pad_token_id=None,
        license=target.license,
        target_hash="f" * 64,
    )


def make_drafter(config: RunConfig) -> Drafter:
    """A drafter whose every parameter is random, so that none can be lost or swapped unseen."""
    import torch

    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.drafter_config import DrafterShape

    drafter = Drafter(DrafterShape.from_config(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            scale = 1.0 if name.startswith("candidate_selector") else 0.2  # large enough to change the path
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return drafter


def card_of(folder: Path) -> str:
    """The model card of an export."""
    return (folder / "README.md").read_text()


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ``a__b`` is a nested key, and a value of ``...`` removes the key."""
    value = json.loads(path.read_text())
    for name, new in changes.items():
        *parents, key = name.split("__")
        section = value
        for parent in parents:
            section = section[parent]
        if new is ...:
            del section[key]
        else:
            section[key] = new
    path.write_text(json.dumps(value))
