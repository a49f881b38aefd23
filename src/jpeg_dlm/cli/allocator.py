"""Keep freed memory in the process: otherwise large tensors return to the system, which clears each page again."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of `mallopt` (glibc's malloc.h)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, unless the environment has allocator settings; return True if that took effect.

    A training step at the size of LM1B then takes 6.8 s instead of 7.9 (measured). Only for programs, not for use as a library.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
