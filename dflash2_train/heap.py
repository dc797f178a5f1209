"""Memory that a step has freed stays with the process for the next one.

A step on a CPU allocates and frees the same gigabyte again and again. glibc maps large blocks one by one and unmaps
them when they are freed, and gives the end of its heap back, so every step has its pages cleared and mapped anew: some
16,000 to 80,000 of them a step of a small drafter, 4 to 7 % of its time. Other systems' allocators are left alone.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
NEVER_TRIM = 2**31 - 1  # bytes at the heap's end that may stay


def keep_freed_memory() -> bool:
    """Tell the C library to take all blocks from its heap, and to keep what is freed there.

    Returns:
        whether the library took it; False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or a system without one to open
        return False
    return all([mallopt(name, value) == 1 for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER_TRIM))])
