"""A tiny target with its tokenizer, a drafter, and two tasks on the disk: what an evaluation of tasks needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dflash2_train.config import EvalTaskConfig, RunConfig
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from tests.toy_target import BOS, END, TEMPLATE, WORDS, write_tokenizer


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_grid_case(config: RunConfig, root: Path) -> RunConfig:
    """``config`` with a target, an exported drafter, and tasks of one and of two turns under ``root``."""
    config.target.name = str(root / "target")
    llama = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(llama)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[END])
    model.save_pretrained(config.target.name)
    write_tokenizer(Path(config.target.name), TEMPLATE)
    shape = DrafterShape.from_config(config)
    folder = Path(config.export.output_dir)
    folder.mkdir()
    tensors = {name: tensor for name, tensor in Drafter(shape).state_dict().items() if name != "mask_embedding"}
    save_file(tensors, folder / "model.safetensors")
    torch.save(torch.ones(32), folder / "mask_embedding.pt")
    published = shape.to_published("float32", bos_token_id=BOS, eos_token_id=[END], pad_token_id=None)
    (folder / "config.json").write_text(json.dumps(published))
    one = [{"id": f"one-{i}", "prompt": f"w{i} w{i + 7}"} for i in range(3)]
    two = [{"id": f"two-{i}", "turns": [f"w{i + 3}", f"w{i + 20} w{i + 21}"]} for i in range(2)]
    config.eval.tasks = [
        EvalTaskConfig(name="one", path=write_rows(root / "one.jsonl", one)),
        EvalTaskConfig(name="two", path=write_rows(root / "two.jsonl", two), turns_column="turns"),
    ]
    config.eval.sweep.num_speculative_tokens = [3, 1]
    config.eval.sweep.temperatures = [0.0, 1.0]
    return config
