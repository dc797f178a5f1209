"""Time and memory of the chunked unary loss beside plain autograd over full logits.

``python -m tests.bench.bench_loss [--rows N] [--vocab V] [--hidden H] [--chunk-mib 8,256] [--threads 2]
[--dtype float32] [--device cuda]``

Both variants get the same inputs; the plain one does what the fused one does (CE, tail-bucket KL, top-16
candidates, gradient of the hidden states). Every variant runs in a process of its own, so that the peak is its own:
the growth of the process's largest resident size over the inputs, from Linux's /proc (CUDA: of the allocator's peak).
``CPU ms`` is the processor time of all threads, the figure to compare on a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dflash2_train.losses import MIN_TAIL, Workspace, unary_loss

TEACHER_TOP_K = 20
CANDIDATES = 16
TIMED_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant to measure; ``chunk_mib`` None is the plain one."""

    rows: int
    vocab: int
    hidden: int
    threads: int
    chunk_mib: int | None
    device: str
    dtype: str
    implementation: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of both variants."""

    hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    target_ids: Tensor  # [N]
    weights: Tensor  # [N]
    teacher_ids: Tensor  # [N, T]
    teacher_logprobs: Tensor  # [N, T]


def make_inputs(case: Case) -> Inputs:
    """Random inputs of a trained model's scale: logits of standard deviation 2, teacher mass 0.95 on its top-20."""
    torch.manual_seed(0)
    device = torch.device(case.device)
    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
    scale = 2.0 / case.hidden**0.5
    first = torch.randint(0, case.vocab - TEACHER_TOP_K, (case.rows, 1), device=device)
    logprobs = torch.randn(case.rows, TEACHER_TOP_K, device=device).mul(2).log_softmax(-1) + torch.tensor(0.95).log()
    return Inputs(
        hidden=torch.randn(case.rows, case.hidden, device=device).to(dtype).requires_grad_(),
        head=(torch.randn(case.vocab, case.hidden, device=device) * scale).to(dtype),
        target_ids=torch.randint(0, case.vocab, (case.rows,), device=device),
        weights=torch.ones(case.rows, device=device),
        teacher_ids=first + torch.arange(TEACHER_TOP_K, device=device),
        teacher_logprobs=logprobs,
    )


def fused(inputs: Inputs, case: Case, chunk_mib: int, workspace: Workspace) -> Tensor:
    """The loss as trained with."""
    result = unary_loss(
        inputs.hidden,
        inputs.head,
        inputs.target_ids,
        inputs.teacher_ids,
        inputs.teacher_logprobs,
        ce_weight=1.0,
        kl_weight=1.0,
        kl_kind="tail_bucket",
        top_k=CANDIDATES,
        chunk_bytes=chunk_mib << 20,
        implementation=case.implementation,
        workspace=workspace,
    )
    return (inputs.weights * result.loss).sum()


def plain(inputs: Inputs) -> Tensor:
    """The same loss by autograd over [N, V]."""
    logits = (inputs.hidden @ inputs.head.T).float()
    logits.detach().topk(CANDIDATES, -1)
    log_q = logits.log_softmax(-1)
    cross_entropy = -log_q.gather(-1, inputs.target_ids[:, None]).squeeze(-1)
    log_p, log_qt = inputs.teacher_logprobs, log_q.gather(-1, inputs.teacher_ids)
    p = log_p.exp()
    tail_p, tail_q = 1 - p.sum(-1), (1 - log_qt.exp().sum(-1)).clamp(min=MIN_TAIL)
    divergence = (p * (log_p - log_qt)).sum(-1) + tail_p * (tail_p.log() - tail_q.log())
    return (inputs.weights * (cross_entropy + divergence)).sum()


def start_peak(device: str) -> int:
    """Forget earlier peaks; the bytes held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's switch that resets VmHWM
    return peak_bytes(device)


def peak_bytes(device: str) -> int:
    """Largest memory of this process since :func:`start_peak`, bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def measure(case: Case) -> dict[str, float]:
    """Loss, norm of the gradient, seconds of forward and backward, peak MiB over the inputs."""
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case)
    chunk_mib = case.chunk_mib
    workspace = Workspace()
    loss_of: Callable[[Inputs], Tensor] = plain
    if chunk_mib is not None:
        loss_of = lambda given: fused(given, case, chunk_mib, workspace)  # noqa: E731
    small = make_inputs(replace(case, rows=4, vocab=4096, hidden=64))
    torch.autograd.backward(loss_of(small))  # libraries load before the baseline is taken
    before = start_peak(case.device)
    seconds, cpu_seconds, loss = [], [], torch.zeros(())
    for _ in range(TIMED_RUNS):
        inputs.hidden.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = loss_of(inputs)
        torch.autograd.backward(loss)
        if case.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    assert inputs.hidden.grad is not None
    return {
        "loss": float(loss.detach()),
        "gradient_norm": float(inputs.hidden.grad.float().norm()),
        "seconds": statistics.median(seconds),
        "best_seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
        "peak_mib": (peak_bytes(case.device) - before) / 2**20,
    }


def main() -> None:
    """Measure every variant and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-mib", default="8,256")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", default="auto", choices=["auto", "torch", "triton"])
    options = parser.parse_args()
    shape = {key: getattr(options, key) for key in ("rows", "vocab", "hidden", "threads", "device", "dtype")}
    variants: list[int | None] = [None, *(int(size) for size in options.chunk_mib.split(","))]
    columns = ("variant", "ms", "best", "CPU ms", "peak MiB", "of fp32 logits", "loss", "gradient norm")
    logits_mib = options.rows * options.vocab * 4 / 2**20
    table = Table(*columns, title=f"unary loss, forward and backward: {json.dumps(shape)}")
    for chunk_mib in variants:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (Case(**shape, chunk_mib=chunk_mib, implementation=options.implementation),))
        table.add_row(
            "full logits" if chunk_mib is None else f"sweep, at most {chunk_mib} MiB",
            f"{found['seconds'] * 1e3:.0f}",
            f"{found['best_seconds'] * 1e3:.0f}",
            f"{found['cpu_seconds'] * 1e3:.0f}",
            f"{found['peak_mib']:.0f}",
            f"{found['peak_mib'] / logits_mib:.3f}",
            f"{found['loss']:.3f}",
            f"{found['gradient_norm']:.4f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
