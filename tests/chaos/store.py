"""Break a capture cache at random, mend it with the tools a user has, and see that nothing is lost, twice or silent.

``python -m tests.chaos.store [--runs 200] [--seed 0] [--folder DIR]``

One run, seeded: writer processes fill a cache (bf16 or fp8) while they are killed with SIGKILL at random moments, two
at a time on the same shards in half of the runs; in some runs the disk is full first (a small tmpfs where
this user may mount one, else a limit on the size of files, which breaks writes off the same way). Then shards are
cut, emptied, deleted, robbed of their tensors or get a bit flipped, and the index is torn, lost or gets a bit flipped.
After every disturbance

- a reader that compares digests gives only what was written, or refuses: nothing silent;
- ``verify`` with quarantine, and a writer that makes what is missing, end with every sample there once and bit for bit,
  no temporary file, and no fault: nothing lost, nothing twice;
- a shard that was whole before is the same file after: no work is done again.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest, shard_index, shard_name
from data_gen.cache.index import SHARD_PATTERN
from data_gen.cache.reader import CaptureReader
from data_gen.cache.shard_file import ShardReader
from data_gen.cache.verify import StoreVerifier
from data_gen.cache.writer import CaptureWriter
from dflash2_train.config import StoreConfig, UserError
from tests.cache_cases import CONTENT, equal, flip_bit, make_sample

SHARDS, ROWS, TOKENS = 6, 3, 40
LONGEST_LIFE_S = 0.05  # of a writer that will be killed; a whole pass takes about twice as long
TMPFS_KB, FILE_LIMIT = 8192, 60_000
START_S = 600.0  # on a machine that is busy with other things
EXIT_REFUSED = 3  # a writer that ended with a plain message, as on a full disk


def samples_of(shard: int) -> list[CapturedSample]:
    """The samples of a shard, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + shard)
        samples = [make_sample(f"s{shard}-{row}", length=TOKENS + row) for row in range(ROWS)]
        width = len(CONTENT["target_layer_ids"]) * 256
        return [
            CapturedSample(**{**vars(sample), "tap_hidden": torch.randn(len(sample), width).bfloat16()})
            for sample in samples
        ]


def manifest_of(dtype: str) -> CaptureManifest:
    """Of a cache whose shards are large enough to be caught half-written."""
    return CaptureManifest(content={**CONTENT, "hidden_size": 256, "cache_dtype": dtype})


def fill(root: Path, dtype: str, file_limit: int | None = None, ready: Event | None = None) -> None:
    """Write every shard that is not there; ends the process with ``EXIT_REFUSED`` on a plain error."""
    if ready is not None:
        ready.set()
    torch.set_num_threads(1)
    logging.disable()
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    try:
        writer = CaptureWriter(root, manifest_of(dtype))
        present = writer.existing_shards()
        for shard in range(SHARDS):
            if shard not in present:
                writer.write_shard(shard, samples_of(shard))
    except UserError:
        os._exit(EXIT_REFUSED)


class Chaos:
    """One run under ``root`` (absent or empty)."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.rng = root, random.Random(seed)  # noqa: S311
        self.dtype = self.rng.choice(["bfloat16", "float8_e4m3"])
        self.told: Counter[str] = Counter()
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["data_gen.cache.verify", "tests.cache_cases"])
        # What a cache gives for a shard: the states may have gone through fp8.
        with tempfile.TemporaryDirectory() as folder:
            fill(Path(folder), self.dtype)
            reader = CaptureReader(Path(folder))
            read = [reader.read(place) for place in range(len(reader))]
        self.expected = {sample.sample_id: sample for sample in read}

    def run(self) -> Counter[str]:
        """All disturbances in turn; what was done, by name.

        Raises:
            AssertionError: something was lost, twice or silent.
        """
        if self.rng.random() < 0.3:
            self.fill_the_disk()
        self.kill_writers()
        self.mend()
        for _ in range(self.rng.randint(1, 3)):
            for _ in range(self.rng.randint(1, 3)):
                self.damage_a_shard()
            if self.rng.random() < 0.6:
                self.damage_the_index()
            self.look()
            if self.rng.random() < 0.3:
                self.kill_writers()
            self.mend()
        return self.told

    def kill_writers(self) -> None:
        """Start one or two writers, kill them after a random time, a few times over."""
        for _ in range(self.rng.randint(1, 3)):
            before = self.whole_files()
            writers = [self._start() for _ in range(self.rng.randint(1, 2))]
            for writer in writers:
                time.sleep(self.rng.uniform(0, LONGEST_LIFE_S))
                writer.kill()
            there = len(list(self.root.glob(SHARD_PATTERN)))
            self.told["killed with some shards there"] += 0 < there < SHARDS
            for writer in writers:
                writer.join()
                assert writer.exitcode in (0, -9), f"a writer ended with {writer.exitcode}"
                self.told["writer killed" if writer.exitcode else "writer finished"] += 1
            if len(writers) > 1:
                self.told["two writers at once"] += 1
            self.kept(before)
            self.look()

    def fill_the_disk(self) -> None:
        """A writer meets the end of the disk, says so and leaves only whole shards; with space it goes on."""
        kind = "tmpfs" if _is_mount(self.root.parent) else "limit on files"
        ballast = self.root.parent / "ballast"
        limit = None
        if kind == "tmpfs":
            free = shutil.disk_usage(self.root.parent).free
            ballast.write_bytes(bytes(free - self.rng.randint(4096, 300_000)))
        else:
            limit = self.rng.randint(1000, FILE_LIMIT)
        writer = self._start(limit)
        writer.join()
        assert writer.exitcode == EXIT_REFUSED, f"a full disk ended with {writer.exitcode}"
        self.told[f"disk full ({kind})"] += 1
        assert not [path for path in self.root.glob(".shard-*")], "a half-written file was left"
        ballast.unlink(missing_ok=True)
        self.look()

    def damage_a_shard(self) -> None:
        """Do one of the things that happen to files."""
        path = self.root / shard_name(self.rng.randrange(SHARDS))
        if not path.exists() or path.stat().st_size == 0:
            return
        kind = self.rng.choice(["bit flipped", "cut", "emptied", "deleted", "without tensors"])
        size = path.stat().st_size
        if kind == "bit flipped":
            flip_bit(path, self.rng.randrange(size))
        elif kind == "cut":
            os.truncate(path, self.rng.randrange(1, size))
        elif kind == "emptied":
            os.truncate(path, 0)
        elif kind == "deleted":
            path.unlink()
        else:
            path.unlink()
            save_file({}, path)
        self.told[f"shard {kind}"] += 1

    def damage_the_index(self) -> None:
        """Tear, lose or falsify the index."""
        path = self.root / "index.jsonl"
        if not path.exists() or path.stat().st_size < 2:
            return
        kind = self.rng.choice(["torn", "lost", "bit flipped"])
        if kind == "torn":
            os.truncate(path, self.rng.randrange(1, path.stat().st_size))
        elif kind == "lost":
            path.unlink()
        else:
            flip_bit(path, self.rng.randrange(path.stat().st_size))
        self.told[f"index {kind}"] += 1

    def look(self) -> None:
        """Read what there is: right, or refused."""
        try:
            reader = CaptureReader(self.root, verify_checksums=True)
        except CacheIntegrityError:
            self.told["refused by the reader"] += 1
            return
        seen = set()
        for place in range(len(reader)):
            sample = reader.read(place)
            assert sample.sample_id not in seen, f"{sample.sample_id} is given twice"
            assert equal(sample, self.expected[sample.sample_id]), f"{sample.sample_id} is read wrong"
            assert reader.index[place].num_tokens == len(sample)
            seen.add(sample.sample_id)

    def mend(self) -> None:
        """What a user does: verify with quarantine, capture, verify."""
        whole = self.whole_files()
        settings = StoreConfig(quarantine=True, max_damaged=SHARDS)
        if list(self.root.glob(SHARD_PATTERN)) or (self.root / "index.jsonl").exists():
            try:
                report = StoreVerifier(self.root, settings, None).run(lambda _: None)
                assert report.left == {}
                self.told["shards set aside"] += len(report.quarantined)
            except CacheIntegrityError as error:
                assert "no shard" in str(error) or "manifest" in str(error), str(error)
        writer = self._start()
        writer.join()
        assert writer.exitcode == 0, f"mending ended with {writer.exitcode}"
        self.kept(whole)
        report = StoreVerifier(self.root, settings, None).run(lambda _: None)
        assert report.faults == {}, report.faults
        reader = CaptureReader(self.root)
        ids = [row.sample_id for row in reader.index]
        assert ids == list(self.expected), f"lost or twice: {ids}"
        assert all(equal(reader.read(place), self.expected[name]) for place, name in enumerate(ids))
        assert not list(self.root.glob(".shard-*")), "a temporary file was left"

    def whole_files(self) -> dict[str, tuple[int, int]]:
        """Identity of every shard that is whole now: inode and time of its last change."""
        found = {}
        for path in self.root.glob(SHARD_PATTERN):
            try:
                alone = ShardReader(path, manifest_of(self.dtype))
                alone.check_content()
            except CacheIntegrityError:
                continue
            if alone.sample_ids == [sample.sample_id for sample in samples_of(shard_index(path.name))]:
                found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
        return found

    def kept(self, before: dict[str, tuple[int, int]]) -> None:
        """No whole shard was lost or written again."""
        after = self.whole_files()
        assert {name: after.get(name) for name in before} == before, "a whole shard was lost or made again"

    def _start(self, file_limit: int | None = None) -> BaseProcess:
        """A writer that has begun."""
        ready = self.processes.Event()
        process = self.processes.Process(target=fill, args=(self.root, self.dtype, file_limit, ready))
        process.start()
        assert ready.wait(START_S), "the writer did not start"
        return process


def _is_mount(folder: Path) -> bool:
    return folder.is_mount()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a tmpfs of ``TMPFS_KB`` KB on ``folder``, if this user may; True if so."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_KB}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def chaos_run(folder: Path, seed: int) -> Counter[str]:
    """One run in a new folder under ``folder``; a third of them on a small disk of their own."""
    place = folder / f"run-{seed}"
    place.mkdir()
    if seed % 3:
        told = Chaos(place / "capture", seed).run()
    else:
        with small_disk(place):
            told = Chaos(place / "capture", seed).run()
    shutil.rmtree(place, ignore_errors=True)
    return told


def main() -> None:
    """Run many and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    console, told, started = Console(), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for run in range(options.runs):
            try:
                told += chaos_run(Path(folder), options.seed + run)
            except AssertionError as error:
                raise SystemExit(f"run with --seed {options.seed + run}: {error}") from error
            if (run + 1) % 10 == 0:
                console.print(f"{run + 1} runs, {time.monotonic() - started:.0f} s")
    for name, number in sorted(told.items()):
        console.print(f"{number:6d}  {name}")
    console.print(f"{options.runs} runs: nothing lost, nothing twice, nothing silent")


if __name__ == "__main__":
    main()
