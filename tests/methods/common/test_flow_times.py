"""Times that are partly uniform, and times that follow the loss."""

import math

import pytest
import torch

from jpeg_dlm.methods.common.flow_times import BINS, UNIFORM, AdaptiveTimes, drawn_times
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmObjective
from jpeg_dlm.rng import RowNoise


def test_a_share_of_the_times_is_uniform():
    noise = RowNoise(0, range(400))
    chance, uniform = noise.uniform("time_uniform", 2).unbind(1)
    none, some, all_of_them = (drawn_times(JpegDlmObjective(time_uniform=share), noise) for share in (0.0, 0.25, 1.0))
    assert torch.equal(none, torch.sigmoid(-1.5 + 0.8 * noise.normal("time"))) and torch.equal(all_of_them, uniform)
    assert torch.equal(some, torch.where(chance < 0.25, uniform, none)) and 50 < int((some != none).sum()) < 150


def test_times_begin_uniform_and_follow_the_slope_of_the_loss():
    times = AdaptiveTimes()
    u = (torch.arange(20_000) + 0.5) / 20_000
    assert torch.allclose(times.draw(u), u, atol=0.02)  # the ends have one neighbor less
    # All of the loss falls between 0.3 and 0.5: nine in ten times lie there, and the others anywhere.
    centers = (torch.arange(BINS) + 0.5) / BINS
    times.loss_K.copy_(((0.5 - centers) / 0.2).clamp(0, 1))
    t = times.draw(u)
    assert (t.diff() >= 0).all() and 0 <= t.min() and t.max() < 1
    assert ((t > 0.28) & (t < 0.52)).float().mean().item() == pytest.approx(1 - UNIFORM * 0.76, abs=0.01)
    # The loss is linear in the quantile of a time, as far as times are not uniform.
    inside = (t > 0.32) & (t < 0.48)
    loss = ((0.5 - t) / 0.2).clamp(0, 1)
    slope = loss[inside].diff() / u[inside].diff()
    assert slope.std() / slope.mean().abs() < 0.05


def test_errors_move_the_bins_of_their_times_alone():
    times = AdaptiveTimes()
    before = times.loss_K.clone()
    error = torch.tensor([0.5, 0.7, 9.0, math.nan])
    for _ in range(2000):
        times.update(torch.tensor([0.105, 0.108, 0.505, 0.905]), error)
    assert times.loss_K[10].item() == pytest.approx(0.6, abs=1e-4) and times.loss_K[50].item() == pytest.approx(9.0, abs=1e-4)
    others = [k for k in range(BINS) if k not in (10, 50)]
    assert torch.equal(times.loss_K[others], before[others])
