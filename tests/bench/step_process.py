"""What every process that measures a training step does alike: its options, its optimizer, the line that it answers.

Needs torch alone, since the peers' interpreters run it too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable

import torch

from tests.bench.step_clock import measure
from tests.bench.workloads import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATE = 1e-4
GAMMA = 6.5  # of the slot weights


def parse(description: str, *flags: str) -> tuple[Workload, argparse.Namespace]:
    """The workload and the options of a measuring process; ``flags`` are switches of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", type=Workload.from_json)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options.workload, options


def timed(
    loss_of: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor], options: argparse.Namespace
) -> dict[str, float]:
    """Whole steps: the loss, its gradients, fused AdamW on the parameters as they are."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad], lr=LEARNING_RATE, fused=True
    )

    def forward_backward() -> torch.Tensor:
        loss = loss_of()
        torch.autograd.backward(loss)
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measure(forward_backward, update, steps=options.steps, warmup=options.warmup, device=options.device)


def answer(found: dict[str, float]) -> None:
    """The result, as the last line of the output."""
    print(json.dumps(found))  # noqa: T201 - what the parent reads


def random_document(work: Workload, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One document that is supervised throughout, as the peers' models name its parts."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, work.tokens, work.taps * work.hidden, generator=generator)
    return {
        "hidden_states": states.to(device, dtype),
        "input_ids": torch.randint(0, work.vocab - 1, (1, work.tokens), generator=generator).to(device),
        "loss_mask": torch.ones(1, work.tokens, dtype=torch.long, device=device),
    }


def layer_sizes(work: Workload) -> dict[str, object]:
    """The layers of a workload's drafter, as transformers' configuration of Qwen3 names them."""
    return {
        "hidden_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "intermediate_size": work.intermediate,
        "vocab_size": work.vocab,
        "max_position_embeddings": work.tokens + work.block_size,
        "layer_types": ["full_attention"] * work.layers,
    }


def fill_table(weight: torch.Tensor, work: Workload) -> None:
    """Random values whose logits have a trained model's scale."""
    with torch.no_grad():
        weight.normal_(0.0, 2 / work.hidden**0.5)
