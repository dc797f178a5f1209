"""Time and memory of a training step. Needs torch alone, so that both sides are measured by the same code."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def start_peak(device: str) -> int:
    """Forget earlier peaks; the bytes held now."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's switch that resets VmHWM
    return peak_bytes(device)


def peak_bytes(device: str) -> int:
    """Largest memory of this process since :func:`start_peak`, bytes: resident, or allocated on the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def peak_growth(work: Callable[[], object], device: str) -> int:
    """The most bytes of tensors that ``work`` holds at once beside those held before it.

    On a CPU they are counted as torch allocates them: resident memory would hide what fits into a freed part of the
    heap, and show what the heap leaves unused.
    """
    if device == "cuda":
        before = start_peak(device)
        work()
        return peak_bytes(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    steps = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(steps), default=0)


def growth_when_warm(work: Callable[[], object], forget: Callable[[], None], device: str) -> int:
    """:func:`peak_growth` of ``work`` once libraries are loaded and their kernels prepared by doing it once before.

    ``forget`` drops what ``work`` leaves behind.
    """
    work()
    forget()
    growth = peak_growth(work, device)
    forget()
    return growth


def measure(
    forward_backward: Callable[[], torch.Tensor], update: Callable[[], None], *, steps: int, warmup: int, device: str
) -> dict[str, float]:
    """Medians over ``steps`` steps.

    Args:
        forward_backward: makes all gradients and returns the loss.
        update: applies and forgets them.
        steps: timed.
        warmup: steps before, at least one: it makes the optimizer's state.
        device: ``cpu`` or ``cuda``.
    """
    for _ in range(warmup):
        forward_backward()
        update()
    start_peak(device)
    whole, core, processor, loss = [], [], [], torch.zeros(())
    for _ in range(steps):
        started, cpu_started = _now(device), time.process_time()
        loss = forward_backward()
        core.append(_now(device) - started)
        update()
        whole.append(_now(device) - started)
        processor.append(time.process_time() - cpu_started)
    return {
        "step_s": statistics.median(whole),
        "forward_backward_s": statistics.median(core),
        "cpu_s": statistics.median(processor),
        "peak_bytes": float(peak_bytes(device)),
        "loss": float(loss.detach()),
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
