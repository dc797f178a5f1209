"""Peak memory and time of an export beside the size of its checkpoint, with random weights.

    python -m tests.bench.bench_export                     # the newcomer's sizes
    python -m tests.bench.bench_export --layers 2          # glm53_flash with two layers of its eight
    python -m tests.bench.bench_export --layers 8          # the whole 1.84 B

The export runs in a process of its own, from a checkpoint on disk to a checked folder; its peak is the kernel's count
(VmHWM) less what the process held before. The yardstick, in the same run, is a copy of the same bytes with an fsync,
and their sha256 once. ``--weights mean`` averages two checkpoints' fp32 masters.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dflash2_train.checkpoint import MANIFEST, WEIGHTS
from dflash2_train.config import RunConfig
from dflash2_train.export import run
from dflash2_train.export.weight_sources import MASK_PARAMETER, MASTER_WEIGHTS
from dflash2_train.export.weight_writer import write_weights
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import atomic_write_json, sha256_file
from tests.cases import make_target_info
from tests.families import load


def status_bytes(field: str) -> int:
    """A size of this process in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def bytes_read() -> int:
    """Bytes that this process has asked the system for so far, from disk or from its cache; mapped ones excepted."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def write_checkpoint(config: RunConfig, step: int, *, masters: bool) -> int:
    """Random weights under the trainer's names; returns their bytes in bf16."""
    folder = Path(config.train.output_dir) / f"step{step:06d}"
    folder.mkdir(parents=True)
    shape = DrafterShape.from_config(config)
    shapes = {**Drafter.expected_tensors(shape), MASK_PARAMETER: (shape.hidden_size,)}
    file, dtype = (MASTER_WEIGHTS, torch.float32) if masters else (WEIGHTS, torch.bfloat16)

    def random(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtype).uniform_(-0.1, 0.1)

    write_weights(folder, shapes, random, dtype=dtype)
    (folder / "model.safetensors").rename(folder / file)
    files = {file: sha256_file(folder / file)}
    manifest = {"step": step, "world_size": 1, "layout": 2, "fingerprint": {}, "files": files}
    atomic_write_json(folder / MANIFEST, manifest)
    return sum(2 * torch.Size(size).numel() for size in shapes.values())


def measured_export(config: RunConfig, pipe: Any) -> None:
    """Export and report; runs in a fresh process."""
    torch.set_num_threads(1)
    before = status_bytes("VmRSS")
    with patch.object(run, "open_target_config", lambda _target: make_target_info(config)):
        start, cpu = time.perf_counter(), time.process_time()
        folder = run.export_checkpoint(config)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    pipe.send(
        {"seconds": seconds, "cpu": cpu, "peak": status_bytes("VmHWM") - before, "before": before, "written": size}
    )


def plain_copy(source: Path, target: Path) -> float:
    """Seconds to read and write the same bytes and sync them, 8 MiB at a time."""
    start = time.perf_counter()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while piece := reader.read(8 << 20):
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    return time.perf_counter() - start


def main() -> None:
    """Make the checkpoint, export it, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of glm53_flash; without it the sizes of smollm2_cpu")
    parser.add_argument("--weights", choices=("last", "mean"), default="last")
    parser.add_argument("--folder", help="where to write; its disk is what is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        config = load(f"+experiment={'smollm2_cpu' if arguments.layers is None else 'glm53_flash'}", f"run_dir={root}")
        if arguments.layers is not None:
            config.drafter = replace(config.drafter, num_layers=arguments.layers)
        if arguments.weights == "mean":
            config.export.weights, config.export.average_last = "mean", 2
        masters = arguments.weights == "mean"
        sizes = [write_checkpoint(config, step, masters=masters) for step in range(1, 3 if masters else 2)]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measured_export, args=(config, theirs))
        process.start()
        theirs.close()  # so that a child that fails ends the wait
        result = ours.recv()
        process.join()
        written = next(Path(config.export.output_dir).glob("*.safetensors"))
        copy = plain_copy(written, Path(root) / "copy")
        start = time.perf_counter()
        sha256_file(written)
        hashing = time.perf_counter() - start
    result = {
        "parameters": sizes[0] // 2,
        "checkpoint_mib": round(sizes[0] / 2**20, 1),
        "peak_mib": round(result["peak"] / 2**20, 1),
        "peak_over_checkpoint": round(result["peak"] / sizes[0], 3),
        "libraries_mib": round(result["before"] / 2**20, 1),
        "seconds": round(result["seconds"], 2),
        "cpu_seconds": round(result["cpu"], 2),
        "copy_seconds": round(copy, 2),
        "sha256_seconds": round(hashing, 2),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
