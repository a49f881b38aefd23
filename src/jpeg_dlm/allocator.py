"""Freed memory stays with the program. Else large tensors go back to the system, which clears them anew, page by page."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # what `mallopt` sets (glibc's malloc.h)


def keep_freed_memory() -> bool:
    """For a program of its own (a library leaves the allocator of its host alone); whether it took effect.

    Measured on two cores: a training step at the size of LM1B takes 6.8 s instead of 7.9, with the same peak of memory.
    Whoever set the allocator in the environment, or has another one than glibc's, keeps what they have.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
