"""Memory of this process, GiB."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

GIB = 2**30
_STATM = Path("/proc/self/statm")


def memory_values(device: torch.device) -> dict[str, float]:
    """Resident size now and at most, and on CUDA the peaks of the caching allocator since the process started."""
    values = {
        "memory/rss": int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB,
        "memory/rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,  # Linux counts in KiB
    }
    if device.type == "cuda":
        values["memory/cuda_allocated_peak"] = torch.cuda.max_memory_allocated(device) / GIB
        values["memory/cuda_reserved_peak"] = torch.cuda.max_memory_reserved(device) / GIB
    return {name: round(value, 4) for name, value in values.items()}
