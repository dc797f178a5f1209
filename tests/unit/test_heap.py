"""Freed memory that stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from dflash2_train import heap

CYCLES = """
import ctypes, resource, sys
from dflash2_train.heap import keep_freed_memory
assert sys.argv[1] == "given back" or keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def cycle():
    blocks = [libc.malloc(size << 20) for size in (24, 24, 24, 80)]
    for block, size in zip(blocks, (24, 24, 24, 80)):
        ctypes.memset(block, 1, size << 20)
        libc.free(block)
for _ in range(3):
    cycle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    cycle()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_memory_that_is_freed_and_taken_again_brings_no_fresh_pages() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", CYCLES, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 100
    assert faults("given back") > 30_000 or huge_pages()


def huge_pages() -> bool:
    """Whether the system maps large blocks by pages of megabytes on its own."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as setting:
            return "[always]" in setting.read()
    except FileNotFoundError:
        return False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert not heap.keep_freed_memory()
