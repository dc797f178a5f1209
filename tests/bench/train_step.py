"""Time and memory of a whole training step: forward, loss, backward, AdamW. Ours, and a public trainer beside it.

``python -m tests.bench.train_step [--peer] [--workloads A,B] [--dtypes float32,bfloat16] [--steps 5] [--threads 2]``
``python -m tests.bench.train_step --h200 [--peer] [--peak-tflops 989]``

``--peer`` runs speculators' DFlash 2 with full KL right after ours, on the same shapes, dtype, threads and optimizer
(fused AdamW on the parameters as they are). Its environment is built from PyPI on first use, in ``--peer-env``: with
this environment's versions of torch and transformers, and without torchvision and torchaudio, which it never imports
here and whose CUDA builds break a CPU torch. Every figure comes from a process of its own and is a median of steps.

Columns: ``CPU s`` is the processor time of all threads, to compare on a machine that others use; ``peak`` the largest
resident size during the steps (GPU: allocated), ``start`` that after the imports; ``loss`` the growth while the loss
alone runs, as a multiple of [supervised slots, V] in fp32. ``bound`` is the time that the step's matrix products take
at the rate of one large product of the same dtype; on a GPU utilisation is against ``--peak-tflops``.
"""

from __future__ import annotations

import argparse
import json
import subprocess  # noqa: S404 - measuring processes and pip, fixed arguments
import sys
import time
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.workloads import WORKLOADS, Workload

HERE = Path(__file__).parent
PEER = "speculators==0.9.0"
PEER_ENVIRONMENT = Path.home() / ".cache" / "dflash2-train" / "bench" / PEER.replace("==", "-")
# What importing the peer needs beside torch and transformers; itself and its connectors come without dependencies.
PEER_NEEDS = (
    "triton",
    "datasets>=4.0,<=5.1.0",
    "loguru>=0.7.2,<=0.7.3",
    "pydantic>=2",
    "pydantic-settings>=2",
    "openai>=2",
    "aiohttp",
    "click",
    "httpx",
    "protobuf",
    "psutil",
    "rich",
    "typer>=0.12",
)
PEER_ALONE = (PEER, "hs-connectors==0.9.0")
RATE_SIDE = 2048  # of the square product whose rate gives the bound
COLUMNS = ("who", "work", "dtype", "step s", "x ours", "fwd+bwd s", "CPU s", "peak GB", "start GB", "loss x", "loss")


@dataclass(frozen=True)
class Side:
    """A program that answers with one line of JSON."""

    name: str
    command: tuple[str, ...]
    folder: Path


def ours(*extra: str) -> Side:
    """This project."""
    name = "ours, unfused loss" if "--unfused" in extra else "ours"
    return Side(name, (sys.executable, "-m", "tests.bench.step_ours", *extra), HERE.parents[1])


def peer(environment: Path) -> Side:
    """speculators, in an environment that is made when it is not there."""
    environment = environment.resolve()
    python = environment / "bin" / "python"
    marker = environment / "complete"
    wanted = "\n".join((*peer_requirements(), *PEER_ALONE))
    if not marker.is_file() or marker.read_text() != wanted:
        if environment.exists() and not (environment / "pyvenv.cfg").is_file():
            raise SystemExit(f"--peer-env={environment}: exists and is no environment; name a folder to be made.")
        Console().print(f"building {PEER} in {environment}; some minutes, once")
        venv.create(environment, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *peer_requirements()], check=True)
        subprocess.run([*pip, "--no-deps", *PEER_ALONE], check=True)
        marker.write_text(wanted)  # last: an interrupted build starts again
    return Side(PEER, (str(python), str(HERE / "step_peer.py")), HERE)


def peer_requirements() -> tuple[str, ...]:
    """For pip's resolver: our torch and transformers, so that only the trainers differ."""
    same = (f"torch=={version('torch').split('+')[0]}", f"transformers=={version('transformers')}")
    return (*same, *PEER_NEEDS)


def measured(side: Side, work: Workload, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one side once.

    Raises:
        SystemExit: it failed; its own words are shown.
    """
    settings = {"dtype": dtype, "device": options.device, "steps": options.steps, "warmup": options.warmup}
    settings["threads"] = options.threads
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(  # noqa: S603 - our own scripts
        [*side.command, work.to_json(), *flags], cwd=side.folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{side.name}, workload {work.name}, {dtype}: failed.\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


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


def add_row(table: Table, name: str, work: Workload, dtype: str, found: dict[str, float], base: float) -> None:
    """One measured side."""
    loss_bytes = found["loss_bytes"]
    table.add_row(
        name,
        work.name,
        dtype,
        f"{found['step_s']:.3f}",
        f"{found['step_s'] / base:.2f}",
        f"{found['forward_backward_s']:.3f}",
        f"{found['cpu_s']:.2f}",
        f"{found['peak_bytes'] / 1e9:.2f}",
        f"{found['start_bytes'] / 1e9:.2f}",
        f"{loss_bytes / work.full_logits_bytes:.3f}" if loss_bytes else "",
        f"{found['loss']:.3f}",
    )


def compare(sides: list[Side], work: Workload, dtype: str, options: argparse.Namespace, table: Table) -> None:
    """All sides of one workload, one right after the other, and the bound."""
    flops = work.forward_backward_flops()
    rate = options.peak_tflops * 1e12 if options.device == "cuda" else product_rate(dtype, options.threads)
    base = 0.0
    for side in sides:
        found = measured(side, work, dtype, options)
        base = base or found["step_s"]
        add_row(table, side.name, work, dtype, found, base)
        if options.device == "cuda":
            tokens = work.tokens / found["step_s"]
            share = flops / rate / found["forward_backward_s"]
            table.add_row("", "", "", f"{tokens:,.0f} tokens/s, {share:.0%} of peak in fwd+bwd")
    bound = f"bound: {flops / 1e9:,.0f} GFLOP at {rate / 1e9:,.0f} GFLOP/s"
    table.add_row(bound, work.name, dtype, f"{flops / rate:.3f}", f"{flops / rate / base:.2f}", end_section=True)


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="A,B", help=f"among {','.join(WORKLOADS)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help=f"also {PEER}")
    parser.add_argument("--peer-env", type=Path, default=PEER_ENVIRONMENT, help="folder of the peer's environment")
    parser.add_argument("--h200", action="store_true", help="the GPU workload, bf16, beside the unfused loss")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of the card")
    options = parser.parse_args()
    options.device = "cuda" if options.h200 else "cpu"
    if options.h200:
        options.workloads, options.dtypes = "H200", "bfloat16"
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        parser.error(f"--workloads={options.workloads}: {sorted(unknown)} not among {list(WORKLOADS)}")
    return options


def main() -> None:
    """Measure every workload in every dtype and print one table."""
    options = parse()
    if options.h200:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("--h200 needs an NVIDIA GPU and found none. The CPU workloads run without it.")
    sides = [ours()]
    if options.h200:
        sides.append(ours("--unfused"))
    if options.peer:
        sides.append(peer(options.peer_env))
    table = Table(*COLUMNS, title=f"one training step, {options.threads} threads, medians of {options.steps}")
    for name in options.workloads.split(","):
        for dtype in options.dtypes.split(","):
            compare(sides, WORKLOADS[name], dtype, options, table)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
