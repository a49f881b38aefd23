"""Keep freed memory in the process: otherwise large tensors return to the system, which clears each page again."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of `mallopt` (glibc's malloc.h)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory; return True if that took effect. Only for programs, not for use as a library.

    Measured on two cores: a training step at the size of LM1B takes 6.8 s instead of 7.9, with the same peak memory.
    Allocator settings in the environment and allocators other than glibc's are left alone.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
