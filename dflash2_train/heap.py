"""Memory that a step has freed stays with the process for the next one.

A step on a CPU allocates and frees the same gigabyte again and again. glibc gives what is freed at the end of its heap
back to the system, and large blocks at once, so that the next step has the pages cleared and mapped anew: 16,000 of
them a step of a small drafter, some 4 % of its time. Other systems' allocators are left alone.
"""

from __future__ import annotations

import ctypes

# The names and numbers of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER_TRIM = 2**31 - 1  # bytes at the heap's end that may stay
LARGEST_IN_HEAP = 32 << 20  # bytes of a block; glibc takes no more, what is larger is mapped by itself


def keep_freed_memory() -> bool:
    """Tell the C library to keep what this process frees; before anything large is allocated.

    Both limits must be set: setting one ends glibc's own adjustment of the other, at whatever it is by then.

    Returns:
        whether the library took it; False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or a system without one to open
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST_IN_HEAP), (M_TRIM_THRESHOLD, NEVER_TRIM))
    return all([mallopt(name, value) == 1 for name, value in settings])
