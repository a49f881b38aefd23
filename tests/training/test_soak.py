"""Memory and open files do not grow over a run of many steps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reliability import FLAT_MB, soaked
from reliability_runs import Soak


@pytest.mark.slow
def test_memory_and_files_stay_flat(tmp_path: Path):
    (figure,) = soaked(True, tmp_path)
    assert figure.holds, figure.found


def test_a_leak_would_be_seen():
    steps = np.arange(0, 500, 10.0)
    filling = 400 + 50 * np.minimum(steps / 80, 1)  # pools that fill in the beginning are no leak
    flat = Soak(steps, filling, np.full_like(steps, 9)).settled()
    once = Soak(steps, filling + 4 * (steps > 300), np.full_like(steps, 9)).settled()
    leaking = Soak(steps, filling + steps * 0.004, np.full_like(steps, 9)).settled()
    assert flat.mb_per_1000_steps == pytest.approx(0, abs=1e-9) and flat.steps[0] > 98
    assert once.mb_per_1000_steps == pytest.approx(0, abs=1e-9)  # memory that the allocator takes and keeps
    assert leaking.mb_per_1000_steps == pytest.approx(4.0) and leaking.mb_per_1000_steps > FLAT_MB
