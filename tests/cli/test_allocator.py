"""Keeping freed memory: real processes check if the pages of a freed array are still theirs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")

SCRIPT = """
import sys
from jpeg_dlm.cli.allocator import keep_freed_memory
import numpy
took_effect = keep_freed_memory() if sys.argv[1] == "keep" else False
array = numpy.ones(1 << 23)  # 64 MB: twice what glibc ever learns to keep by itself
middle = array.ctypes.data + array.nbytes // 2
del array
spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
print(took_effect, any(int(start, 16) <= middle < int(end, 16) for start, end in spans))
"""


def kept(word: str, **environment: str) -> tuple[bool, bool]:
    """Whether the setting took effect, and whether memory stayed with the process."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, word], capture_output=True, text=True, env=plain | environment, check=True
    )
    took_effect, stayed = done.stdout.split()
    return took_effect == "True", stayed == "True"


def test_freed_memory_stays_with_the_process():
    assert kept("leave") == (False, False)
    assert kept("keep") == (True, True)


def test_an_allocator_set_by_the_user_is_left_alone():
    assert kept("keep", MALLOC_MMAP_THRESHOLD_="131072") == (False, False)
