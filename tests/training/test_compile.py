"""A compiled method trains, and trains the same."""

from __future__ import annotations

import pytest
import torch
from small_runs import prepare_blocks, start

from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.text.blocks import Blocks


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"train__checkpoint_layers": True}])
def test_losses_of_a_compiled_run_match(corpus_file, tmp_path, changes):
    blocks = Blocks(prepare_blocks(corpus_file, tmp_path / "blocks"))
    sizes = {"model__depth": 1, "train__warmup": 1} | changes
    eager, compiled = (start("jpeg-dlm", blocks, tmp_path, Ranks(), train__compile=c, **sizes) for c in (False, True))
    torch._dynamo.reset()
    for step in range(4):
        a, b = eager.train_step(), compiled.train_step()
        assert b == pytest.approx(a, abs=1e-4, rel=1e-4), step
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
