"""Time and memory of writing and checking GGUF files of a large drafter: ``python -m tests.bench.bench_gguf``.

Makes a drafter folder of the shape of GLM-5.3-Flash's with random bf16 weights (2.3 GB for five layers; 3.7 GB for the
eight of the recipe), converts it in a process of its own, and prints a line a type: seconds for writing and for
checking, CPU-seconds of both, and the most memory that was not mapped files (RssAnon, sampled).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from dflash2_train.config import GgufConfig
from tests.unit.test_gguf_layout import GLM_5_LAYERS

SAMPLE_SECONDS = 0.02


def make_folder(folder: Path, num_layers: int) -> None:
    """A published drafter without a mask vector, so that no table of the target is needed."""
    import torch
    from safetensors.torch import save_file

    from dflash2_train.model.drafter import Drafter

    shape = replace(GLM_5_LAYERS, num_layers=num_layers, layer_types=("sliding_attention",) * num_layers)
    config = shape.to_published("bfloat16", bos_token_id=None, eos_token_id=[1], pad_token_id=None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.randn(size).mul_(0.02).bfloat16() for name, size in Drafter.expected_tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors")


class AnonymousMemory(threading.Thread):
    """The peak of this process's memory outside mapped files, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            lines = Path("/proc/self/status").read_text().splitlines()
            (value,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
            self.peak = max(self.peak, int(value) / 1024)


def convert(folder: Path, kind: str) -> None:
    """Write and check one file; a vocabulary of the right size stands in for the tokenizer."""
    from dflash2_train.export import gguf_write
    from dflash2_train.export.gguf_layout import ARCHITECTURE, drafter_entries
    from dflash2_train.export.gguf_source import DrafterFolder

    seconds = {"check": 0.0}
    check = gguf_write.check_written

    def timed(*arguments: object) -> None:
        start = time.perf_counter()
        check(*arguments)  # type: ignore[arg-type]
        seconds["check"] = time.perf_counter() - start

    gguf_write.check_written = timed
    source = DrafterFolder(folder)
    entries = {f"{ARCHITECTURE}.{key}": entry for key, entry in drafter_entries(source.shape, mrope=False).items()}
    tokens = [f"token{index}" for index in range(source.shape.vocab_size)]
    memory = AnonymousMemory()
    memory.start()
    start, cpu = time.perf_counter(), time.process_time()
    path = folder / f"{kind}.gguf"
    gguf_write.write_gguf(
        path,
        entries,
        source.plan(kind, GgufConfig(), None),
        lambda writer: writer.add_token_list(tokens),
        sources=source.weights_by_path,
    )
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    memory.done.set()
    line = {
        "type": kind,
        "file_mb": round(path.stat().st_size / 1e6),
        "write_s": round(total - seconds["check"], 1),
        "check_s": round(seconds["check"], 1),
        "cpu_s": round(cpu, 1),
        "peak_mib": round(memory.peak),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0"])
    parser.add_argument("--folder", type=Path, help="scratch folder; a temporary one by default")
    parser.add_argument("--convert", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(arguments.folder, arguments.convert)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        make_folder(Path(scratch), arguments.layers)
        for kind in arguments.types:
            command = [sys.executable, "-m", "tests.bench.bench_gguf", "--folder", scratch, "--convert", kind]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
