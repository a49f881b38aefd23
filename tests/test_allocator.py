"""Memory that is kept: real processes, whose page faults the kernel counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")

SCRIPT = """
import resource, sys
from jpeg_dlm.allocator import keep_freed_memory
import numpy
took_effect = keep_freed_memory() if sys.argv[1] == "keep" else False
numpy.ones(1 << 23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    numpy.ones(1 << 23)  # 64 MB, freed at once
print(took_effect, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str, **environment: str) -> tuple[bool, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, word], capture_output=True, text=True, env=plain | environment, check=True
    )
    took_effect, count = done.stdout.split()
    return took_effect == "True", int(count)


def test_large_arrays_are_cleared_once():
    (plain, without), (kept, faults_kept) = faults("leave"), faults("keep")
    assert not plain and kept
    assert without > 1000 and faults_kept < without / 50


def test_an_allocator_set_by_the_user_is_left_alone():
    kept, count = faults("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept and count > 1000
