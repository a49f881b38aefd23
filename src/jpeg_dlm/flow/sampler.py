"""Algorithm 2 of the paper: noise, a grid of times, Euler steps with self-conditioning, and one decoding to tokens.

`sample` is the one loop of JPEG-DLM, of ELF and of exported networks.
Shapes: B batch, L tokens, N latents, D latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from jpeg_dlm.flow.guidance import Guidance, guided_decoder, keep_fixed
from jpeg_dlm.flow.path import make_grid
from jpeg_dlm.util.rng import RowNoise

# Kinds of requests that a sampler of text takes; `methods.base.require_capability` refuses the others.
Capability = Literal["prompts", "templates", "guides", "edits", "long text", "sources"]

# Called at each step of a sampler with the step, their number, the time, and a function that decodes the current prediction.
Watch = Callable[[int, int, float, Callable[[], Tensor]], None]

Denoise = Callable[[Tensor, float, Tensor | None, float], Tensor]  # x = f(z, t; s, w)


class TextSampler(Protocol):
    """What writes texts: a method, or a pair of exported networks."""

    title: str
    supports: frozenset[Capability]

    @property
    def device(self) -> torch.device: ...

    def sample(
        self,
        sampler: Any,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        *,
        guidance: Any = None,
        source: Any = None,
    ) -> Tensor: ...


class Networks(Protocol):
    """What Algorithm 2 asks of a model; noise has the deviation `noise_scale`, and 1 - t is at least `v_floor`."""

    noise_scale: float
    v_floor: float
    latent_shape: tuple[int, int]

    def denoise(self, z: Tensor, t: float, s: Tensor | None, w: float) -> Tensor: ...  # x = f(z, t; s, w)

    def tokens(self, z: Tensor, w: float) -> Tensor: ...  # of clean latents: one decode evaluation at t = 1

    def logits(self, z: Tensor, w: float) -> Tensor: ...  # their logits, differentiable in the latents, for guides


@torch.no_grad()
def sample(
    networks: Networks,
    sampler: Any,
    noise: RowNoise,
    watch: Watch | None = None,
    fixed_BL: Tensor | None = None,
    guidance: Guidance | None = None,
    denoise: Denoise | None = None,
) -> Tensor:
    """Write token ids (B, L), a row for each of the noise; `watch` sees what the latents themselves decode to.

    `denoise` stands in for that of the networks, where it depends on more, such as a context. The grid is one for all rows
    of a seed; ELF's authors draw one per batch, so that a text depends on its batch.
    """
    denoise = denoise or networks.denoise
    shape, w = networks.latent_shape, sampler.w
    z = networks.noise_scale * sampler.noise_scale * noise.normal("sample", *shape)  # z ~ N(0, I), one generator per row
    grid = make_grid(sampler.grid, sampler.steps, sampler.grid_mean, sampler.grid_std, noise.shared("grid"))
    logits = partial(networks.logits, w=w)
    if guidance and guidance.source:
        z, grid = guidance.source.state(guidance.source.clean(logits), z), guidance.source.rest(grid)
    guided = guided_decoder(logits, fixed_BL, guidance)
    fresh = noise.streams("sde") if sampler.solver == "sde" else None
    s, times, steps = None, grid.tolist(), len(grid) - 1
    for k, (t, u) in enumerate(pairwise(times)):
        if fresh and u < times[-1]:
            z, t = step_back(z, t, u, sampler.gamma, networks.noise_scale * fresh.normal(*shape))
        s = denoise(z, t, s, w)  # conditioned on the prediction before (appendix)
        s = guided.nudge(s, t) if guided else s
        if watch:
            watch(k, steps, t, Prediction(partial(networks.tokens, s, w), z))
        z = z + (u - t) * ((s - z) / max(1 - t, networks.v_floor))
    z = guided.refine(z) if guided else z
    tokens = networks.tokens(z, w)
    if watch:
        watch(steps, steps, 1.0, Prediction(lambda: tokens, z))
    return keep_fixed(tokens, fixed_BL)


def step_back(z: Tensor, t: float, u: float, gamma: float, noise: Tensor) -> tuple[Tensor, float]:
    """Return (z_b, t_b): scale z and t by a = 1 - gamma (u - t), at least 0, and fill up z with fresh noise (ELF).

    The network then sees states in which it can mend earlier errors. The two independent noises add up to less than the
    noise of the path at t_b, so z_b is slightly too clean for t_b.
    """
    a = min(1.0, max(0.0, 1 - gamma * (u - t)))
    return a * z + (1 - a) * noise, a * t


# ---------------------------------------------------------------- watching


@dataclass(frozen=True)
class Prediction:
    """The current prediction, which decodes when called, and the latents as they are in this step."""

    decode: Callable[[], Tensor]
    state_BND: Tensor

    def __call__(self) -> Tensor:
        return self.decode()


def together(*watchers: Watch | None) -> Watch | None:
    """Return one watcher that calls all of these, which share what the sampler decodes for a step; None if there are none."""
    present = [watcher for watcher in watchers if watcher]

    def see(step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        shared = cache(tokens)
        if isinstance(tokens, Prediction):
            shared = replace(tokens, decode=shared)
        for watcher in present:
            watcher(step, steps, t, shared)

    return see if present else None
