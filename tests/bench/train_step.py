"""Time and memory of a whole training step: forward, loss, backward, AdamW. Ours, and public trainers beside it.

``python -m tests.bench.train_step [--peer] [--workloads A,B] [--dtypes float32,bfloat16] [--rounds 3] [--steps 5]``
``python -m tests.bench.train_step --h200 [--peer] [--peak-tflops 989]``

``--peer`` runs speculators' DFlash 2 with full KL and SpecForge's DFlash 1 with cross-entropy alone beside ours, on the
same shapes, dtype, threads and optimizer (fused AdamW on the parameters as they are). Their environments are built from
PyPI on first use, in ``--peer-envs``: with this environment's versions of torch and transformers, and without what they
never import here.

The sides take turns: ``--rounds`` times a process of each, so that all meet the machine's slow and fast minutes alike.
A figure is the median over rounds of the medians over steps; a peak is the largest.

Columns: ``rounds`` are the fastest and the slowest round's step; ``x ours`` how many times ours the figure before it
is; ``CPU s`` the processor time of all threads, to compare on a machine that others use; ``peak`` the largest resident
size during the steps (GPU: allocated), ``start`` that after the imports; ``loss x`` the most memory of tensors while
the loss alone runs, as a multiple of [supervised slots, V] in fp32. ``bound`` is the time that the step's matrix
products take at the rate of one large product of the same dtype; on a GPU utilisation is against ``--peak-tflops``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess  # noqa: S404 - measuring processes, fixed arguments
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.peers import ENVIRONMENTS, PEERS
from tests.bench.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
RATE_SIDE = 2048  # of the square product whose rate gives the bound
COLUMNS = (
    "who",
    "work",
    "dtype",
    "step s",
    "rounds",
    "x ours",
    "fwd+bwd s",
    "CPU s",
    "peak GB",
    "x ours",
    "start GB",
    "loss x",
    "loss",
)
Figures = dict[str, float]  # what a measuring process answers


@dataclass(frozen=True)
class Side:
    """A program that answers with one line of JSON."""

    name: str
    command: tuple[str, ...]


def sides_of(options: argparse.Namespace) -> list[Side]:
    """This project first, then what it is measured beside."""
    mine = (sys.executable, "-m", "tests.bench.step_ours")
    sides = [Side("ours", mine)]
    if options.h200:
        sides.append(Side("ours, unfused loss", (*mine, "--unfused")))
    for peer in PEERS if options.peer else ():
        python = peer.interpreter(options.peer_envs)
        sides.append(Side(peer.name, (str(python), "-m", f"tests.bench.{peer.module}")))
    return sides


def measured(side: Side, work: Workload, dtype: str, options: argparse.Namespace) -> Figures:
    """Run one side once.

    Raises:
        SystemExit: it failed; its own words are shown.
    """
    settings = {"dtype": dtype, "device": options.device, "steps": options.steps, "warmup": options.warmup}
    settings["threads"] = options.threads
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(  # noqa: S603 - our own scripts
        [*side.command, work.to_json(), *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{side.name}, workload {work.name}, {dtype}: failed.\n{done.stderr[-4000:]}")
    found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_turns(sides: list[Side], work: Workload, dtype: str, options: argparse.Namespace) -> list[list[Figures]]:
    """What every side found, round by round."""
    console, found = Console(stderr=True), [[] for _ in sides]
    for number in range(1, options.rounds + 1):
        for side, rounds in zip(sides, found, strict=True):
            rounds.append(measured(side, work, dtype, options))
            where = f"{work.name} {dtype}, round {number} of {options.rounds}, {side.name}"
            console.print(f"{where}: {rounds[-1]['step_s']:.3f} s a step", highlight=False)
    return found


def over_rounds(rounds: list[Figures]) -> Figures:
    """A side's figures: medians, but the largest peak; ``fastest_s`` and ``slowest_s`` are the rounds' steps."""
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    steps = [one["step_s"] for one in rounds]
    peak = max(one["peak_bytes"] for one in rounds)
    return {**medians, "peak_bytes": peak, "fastest_s": min(steps), "slowest_s": max(steps)}


def cells(name: str, work: Workload, dtype: str, found: Figures, ours: Figures) -> tuple[str, ...]:
    """One side's row of the table."""
    loss_bytes = found["loss_bytes"]
    return (
        name,
        work.name,
        dtype,
        f"{found['step_s']:.3f}",
        f"{found['fastest_s']:.2f}-{found['slowest_s']:.2f}",
        f"{found['step_s'] / ours['step_s']:.2f}",
        f"{found['forward_backward_s']:.3f}",
        f"{found['cpu_s']:.2f}",
        f"{found['peak_bytes'] / 1e9:.2f}",
        f"{found['peak_bytes'] / ours['peak_bytes']:.2f}",
        f"{found['start_bytes'] / 1e9:.2f}",
        f"{loss_bytes / work.full_logits_bytes:.3f}" if loss_bytes else "",
        f"{found['loss']:.3f}",
    )


def product_rate(dtype: str, threads: int) -> float:
    """FLOP/s of one large square product on this CPU, best of five."""
    import torch

    torch.set_num_threads(threads)
    left = torch.randn(RATE_SIDE, RATE_SIDE).to(getattr(torch, dtype))
    times = []
    for _ in range(6):
        started = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - started)
    return 2 * RATE_SIDE**3 / min(times[1:])


def compare(sides: list[Side], work: Workload, dtype: str, options: argparse.Namespace, table: Table) -> None:
    """All sides of one workload, and the bound."""
    flops = work.forward_backward_flops()
    rate = options.peak_tflops * 1e12 if options.device == "cuda" else product_rate(dtype, options.threads)
    figures = [over_rounds(rounds) for rounds in in_turns(sides, work, dtype, options)]
    ours = figures[0]
    for side, found in zip(sides, figures, strict=True):
        table.add_row(*cells(side.name, work, dtype, found, ours))
        if options.device == "cuda":
            tokens = work.tokens / found["step_s"]
            share = flops / rate / found["forward_backward_s"]
            table.add_row(f"{tokens:,.0f} tokens/s, {share:.0%} of peak in fwd+bwd")
    bound = f"bound: {flops / 1e9:,.0f} GFLOP at {rate / 1e9:,.0f} GFLOP/s"
    ratio = f"{flops / rate / ours['step_s']:.2f}"
    table.add_row(bound, work.name, dtype, f"{flops / rate:.3f}", "", ratio, end_section=True)


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="A,B", help=f"among {','.join(WORKLOADS)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side, taking turns")
    parser.add_argument("--steps", type=int, default=5, help="timed in each process")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help=f"also {'; '.join(peer.name for peer in PEERS)}")
    parser.add_argument("--peer-envs", type=Path, default=ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--h200", action="store_true", help="the GPU workload, bf16, beside the unfused loss")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of the card")
    options = parser.parse_args()
    options.device = "cuda" if options.h200 else "cpu"
    if options.h200:
        options.workloads, options.dtypes = "H200", "bfloat16"
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        parser.error(f"--workloads={options.workloads}: {sorted(unknown)} not among {list(WORKLOADS)}")
    for name in ("rounds", "steps", "warmup", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: at least 1")
    return options


def main() -> None:
    """Measure every workload in every dtype and print one table."""
    options = parse()
    if options.h200:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("--h200 needs an NVIDIA GPU and found none. The CPU workloads run without it.")
    sides = sides_of(options)
    title = f"one training step, {options.threads} threads, {options.rounds} rounds of {options.steps} steps"
    table = Table(*COLUMNS, title=title)
    for name in options.workloads.split(","):
        for dtype in options.dtypes.split(","):
            compare(sides, WORKLOADS[name], dtype, options, table)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
