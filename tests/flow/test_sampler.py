"""Algorithm 2 on networks that a test writes down, against the algorithm spelled out here and against closed forms."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from jpeg_dlm.flow.sampler import Prediction, sample, step_back, together
from jpeg_dlm.methods.jpeg_dlm_config import SamplerConfig
from jpeg_dlm.util.rng import RowNoise

N, D = 3, 2
OPTIONS = SamplerConfig(steps=4, grid="uniform", w=2.0)
TIMES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Networks:
    """Something that depends on all arguments, decoded to the signs of the latents."""

    noise_scale, v_floor, latent_shape = 1.0, 0.0, (N, D)

    def __init__(self):
        self.seen = []

    def denoise(self, z, t, s, w):
        self.seen.append((z, t))
        return torch.tanh(z * (1 + t) + w) if s is None else torch.tanh(z * (1 - t) - w * s)

    def tokens(self, z, w):
        return (w * z.sum(-1) > 0).long()

    def logits(self, z, w):
        return torch.stack([-w * z.sum(-1), w * z.sum(-1)], -1)


def by_hand(networks, z):
    """Return the latents and the predictions of Euler steps, each conditioned on the prediction before."""
    s, predictions = None, []
    for t, u in pairwise(TIMES):
        s = networks.denoise(z, t, s, OPTIONS.w)
        predictions.append(s)
        z = z + (u - t) * (s - z) / max(1 - t, networks.v_floor)
    return z, predictions


def test_samples_and_what_is_watched_are_those_of_the_algorithm():
    noise, steps, networks = RowNoise(3, [4, 7]), [], Networks()
    tokens = sample(networks, OPTIONS, noise, lambda k, n, t, decode: steps.append((k, n, t, decode())))
    z, predictions = by_hand(networks, noise.normal("sample", N, D))
    expected = [networks.tokens(x, 2.0) for x in (*predictions, z)]
    assert tokens.equal(expected[-1]) and [step[:3] for step in steps] == [(k, 4, t) for k, t in enumerate(TIMES)]
    assert all(step[3].equal(wanted) for step, wanted in zip(steps, expected, strict=True))


def test_noise_has_its_scale_and_velocities_their_floor():
    networks, noise = Networks(), RowNoise(0, [1])
    networks.noise_scale, networks.v_floor = 3.0, 0.5
    states = []
    sample(networks, OPTIONS, noise, lambda k, n, t, prediction: states.append(prediction.state_BND))
    z = 3.0 * noise.normal("sample", N, D)
    assert states[0].equal(z) and torch.allclose(states[-1], by_hand(networks, z)[0])


def test_the_first_noise_alone_is_scaled():
    networks, noise = Networks(), RowNoise(0, range(8))
    sample(networks, replace(OPTIONS, noise_scale=0.5), noise)
    assert networks.seen[0][0].equal(0.5 * noise.normal("sample", N, D))
    for seed in (0, 1):
        assert len(sample(Networks(), replace(OPTIONS, noise_scale=0.0), RowNoise(seed, range(8))).unique(dim=0)) == 1
    networks = Networks()
    sample(networks, replace(OPTIONS, noise_scale=0.0, solver="sde"), noise)
    fresh = noise.streams("sde").normal(N, D)  # ELF's, of the first step back
    assert networks.seen[0][0].allclose(1.5 * 0.25 * fresh) and OPTIONS.gamma == 1.5


def test_fresh_noise_goes_back_in_time_before_every_step_but_the_last():
    networks, noise = Networks(), RowNoise(5, [0, 1])
    sample(networks, replace(OPTIONS, solver="sde", gamma=1.5), noise)
    back = [(1 - 1.5 * (u - t)) * t for t, u in pairwise(TIMES[:-1])] + [TIMES[-2]]
    assert [t for _, t in networks.seen] == pytest.approx(back)
    still = Networks()
    euler = sample(still, OPTIONS, noise)
    assert sample(Networks(), replace(OPTIONS, solver="sde", gamma=0.0), noise).equal(euler)
    assert not networks.seen[1][0].equal(still.seen[1][0])


def test_a_step_back_is_that_of_elf():
    """The numbers are those of ELF's sampler: z 0.5, from 0.3 to 0.4 with gamma 1.5 and noise -1.4."""
    z, t = step_back(torch.tensor(0.5), 0.3, 0.4, 1.5, torch.tensor(-1.4))
    assert (z.item(), t) == (pytest.approx(0.215), pytest.approx(0.255))


@dataclass
class Gaussian:
    """Data N(0, S^2): the posterior mean of z_1 is t S^2 z / c^2 with c^2 = t^2 S^2 + (1 - t)^2, and the flow ends at S z."""

    scale: float = 1.7
    noise_scale, v_floor, latent_shape = 1.0, 0.0, (4, 4)

    def denoise(self, z, t, s, w):
        return t * self.scale**2 * z / ((t * self.scale) ** 2 + (1 - t) ** 2)

    def tokens(self, z, w):
        return z[..., 0]

    def logits(self, z, w):
        raise NotImplementedError


def test_euler_steps_converge_in_first_order_to_the_exact_flow():
    noise = RowNoise(0, range(8))
    exact = 1.7 * noise.normal("sample", 4, 4)[..., 0]
    errors = [(sample(Gaussian(), replace(OPTIONS, steps=n), noise) - exact).abs().max().item() for n in (40, 80, 160)]
    assert all(math.log2(a / b) == pytest.approx(1, abs=0.2) for a, b in pairwise(errors))


def test_watchers_share_what_is_decoded():
    calls, seen = [], []
    watch = together(None, lambda *a: seen.append(a[3]()), lambda *a: seen.append((a[3](), a[3].state_BND)))
    watch(0, 1, 0.0, Prediction(lambda: calls.append(1) or torch.ones(1), torch.zeros(1)))
    assert len(calls) == 1 and len(seen) == 2 and together(None) is None
