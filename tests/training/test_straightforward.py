"""The trainer against the straightforward step: the same losses and weights, step after step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from small_runs import prepare_blocks, start

from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.text.blocks import Blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from straightforward import Straightforward, StraightforwardStep


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective__ce_chunk": 7, "objective__sc_prob": 1.0},
        {"model__decode_residual": True, "train__checkpoint_layers": True, "objective__sc_prob": 0.0},
    ],
)
def test_twenty_steps_are_the_same(corpus_file, tmp_path, changes):
    blocks = Blocks(prepare_blocks(corpus_file, tmp_path / "blocks"))
    ours = start("jpeg-dlm", blocks, tmp_path, Ranks(), train__steps=20, **changes)
    plain = Straightforward(ours.config, ours.method.encoder)
    plain.load_state_dict(ours.method.state_dict())
    theirs = StraightforwardStep(plain, ours.config.train, ours.stream)
    start_weights = {name: t.clone() for name, t in plain.state_dict().items()}
    for step in range(20):
        a, b = ours.train_step(), theirs.train_step()
        assert {name: a[name] for name in b} == pytest.approx(b, abs=1e-4, rel=1e-4), step
        assert set(b) == {"jep", "flow", "feat", "ce", "sigreg", "var", "cov", "loss"}
    moved = max((t - start_weights[name]).abs().max().item() for name, t in plain.state_dict().items())
    assert moved > 1e-3
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(ours.method.state_dict()[name], tensor, atol=1e-4), name
    for name, average in theirs.average.items():
        assert torch.allclose(ours.ema.shadow[name], average, atol=1e-4), name
