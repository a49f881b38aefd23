"""Algorithm 2 on networks that a test writes down, against the algorithm spelled out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import MICRO

from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.latent_sampler import LatentSampler, networks_of
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise

CONFIG = override(preset("smoke"), MICRO)
N, D = CONFIG.model.latent_len, CONFIG.model.latent_dim
TIMES = (0.0, 0.25, 0.5, 1.0)
SAMPLER = replace(CONFIG.sampler, solver="euler", grid="stored", times=TIMES, steps=3, w=2.0)


def network(z, t, s, w):
    """Something that depends on all four."""
    return torch.tanh(z * (1 + t) + w) if s is None else torch.tanh(z * (1 - t) - w * s)


def decoded(z, w):
    return (w * z.sum(-1) > 0).long()


class Recording:
    """A sampler on these networks and the grids it prepared."""

    def __init__(self):
        self.prepared = []
        self.sampler = LatentSampler("test", CONFIG, torch.device("cpu"), self.denoiser, decoded)

    def denoiser(self, times, w):
        self.prepared.append((list(times), w))
        return lambda z, t, s: network(z, t, s, w)


def by_hand(z, times=TIMES):
    """(tokens at the end, tokens of every prediction): Euler steps, each conditioned on the prediction before."""
    s, seen = None, []
    for t, u in zip(times, times[1:], strict=False):
        s = network(z, t, s, SAMPLER.w)
        seen.append(decoded(s, SAMPLER.w))
        z = z + (u - t) * (s - z) / (1 - t)
    return decoded(z, SAMPLER.w), seen


def test_samples_and_what_is_watched_are_those_of_the_algorithm():
    noise, told, recording = RowNoise(3, [4, 7]), [], Recording()
    tokens = recording.sampler.sample(SAMPLER, noise, lambda k, n, t, decode: told.append((k, n, t, decode())))
    expected, seen = by_hand(noise.normal("sample", N, D))
    assert tokens.equal(expected) and recording.prepared == [(list(TIMES), 2.0)]  # once for the whole grid
    assert [entry[:3] for entry in told] == [(k, 3, t) for k, t in enumerate(TIMES)]
    assert all(a[3].equal(b) for a, b in zip(told, [*seen, expected], strict=True))


@pytest.mark.parametrize("grid", ["random", "quantile"])
def test_the_released_protocol_draws_noise_then_times(grid):
    recording, sampler = Recording(), replace(SAMPLER, grid=grid, times=())
    found = list(recording.sampler.released(5, sampler, seed=9, batch=2))
    g = torch.Generator().manual_seed(9)
    for start, tokens, (times, _) in zip((0, 2, 4), found, recording.prepared, strict=True):
        if grid == "quantile":
            g.manual_seed(9 + start)
        z = torch.randn(min(2, 5 - start), N, D, generator=g)
        if grid == "random":
            inner = torch.sigmoid(sampler.grid_std * torch.randn(2, generator=g) + sampler.grid_mean)
            assert times[1:-1] == sorted(inner.tolist())
        assert tokens.equal(by_hand(z, times)[0])


def test_it_is_a_writer_of_whole_texts_without_trained_networks():
    sampler = Recording().sampler
    assert sampler.latent_sampler is sampler and networks_of(sampler) is None
    with pytest.raises(UsageError, match="test has no gradient to guide it: use the model that it was exported from"):
        sampler.sample(SAMPLER, RowNoise(0, [0]), given_BL=torch.zeros(1, 12, dtype=torch.long))
