"""Time and peak memory of a check-up, with random weights beside a config.json.

    python -m tests.bench.bench_doctor                     # the newcomer's sizes
    python -m tests.bench.bench_doctor --layers 2          # glm53_flash with two layers of its eight
    python -m tests.bench.bench_doctor --layers 8          # the whole 1.84 B
    python -m tests.bench.bench_doctor --layers 2 --own    # and an embedding of its own, its largest tensor

The check-up runs in a process of its own; its peak is the kernel's count (VmHWM) less what the process held before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash2_train.export.hf import published_config
from dflash2_train.export.weight_files import table_shapes
from dflash2_train.export.weight_writer import write_weights
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import atomic_write_json
from tests.bench.bench_export import bytes_read, status_bytes
from tests.cases import make_target_info
from tests.families import load


def write_drafter(folder: Path, layers: int | None, *, own: bool) -> int:
    """A folder with random weights and a mask vector; returns the bytes of its tensors."""
    config = load(f"+experiment={'smollm2_cpu' if layers is None else 'glm53_flash'}", f"run_dir={folder}")
    if layers is not None:
        config.drafter = replace(config.drafter, num_layers=layers)
    shape = DrafterShape.from_config(config)
    shapes = Drafter.expected_tensors(shape)
    if own:
        shapes |= {"embed_tokens.weight": table_shapes(shape)["embed_tokens.weight"]}

    def random(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=torch.bfloat16).uniform_(-0.1, 0.1)

    write_weights(folder, shapes, random, dtype=torch.bfloat16)
    torch.save(torch.randn(shape.hidden_size).bfloat16(), folder / "mask_embedding.pt")
    atomic_write_json(folder / "config.json", published_config(shape, make_target_info(config), "bfloat16"))
    return sum(2 * torch.Size(size).numel() for size in shapes.values())


def measured_check(folder: Path, pipe: Any) -> None:
    """Check and report; runs in a fresh process."""
    from dflash2_train.export.doctor import check_folder

    torch.set_num_threads(1)
    before, read = status_bytes("VmRSS"), bytes_read()
    start, cpu = time.perf_counter(), time.process_time()
    findings = check_folder(folder)
    result = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, "read": bytes_read() - read}
    found = sorted({finding.check for finding in findings})
    pipe.send({**result, "peak": status_bytes("VmHWM") - before, "found": found})


def main() -> None:
    """Write the drafter, check it, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of glm53_flash; without it the sizes of smollm2_cpu")
    parser.add_argument("--own", action="store_true", help="with an embedding of its own")
    parser.add_argument("--folder", help="where to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        size = write_drafter(Path(root), arguments.layers, own=arguments.own)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measured_check, args=(Path(root), theirs))
        process.start()
        result = ours.recv()
        process.join()
    line = {
        "weights_mib": round(size / 2**20, 1),
        "seconds": round(result["seconds"], 2),
        "cpu_seconds": round(result["cpu"], 2),
        "read_mib": round(result["read"] / 2**20, 1),
        "mib_per_second": round(size / 2**20 / result["seconds"]),
        "peak_mib": round(result["peak"] / 2**20, 1),
        "found": result["found"],
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
