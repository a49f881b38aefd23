"""Algorithm 2 of the paper: noise, a grid of times, a solver with self-conditioning, and one decoding to tokens.

The two networks are callables, so the same algorithm runs on torch's networks, on prepared weights and on exported files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import Control, Steering, keep_given, steering
from jpeg_dlm.flow.grids import make_grid
from jpeg_dlm.flow.known import Known
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.flow.solvers import SOLVERS, OnStep, Predict, stochastic, stochastic_times
from jpeg_dlm.nn.dit import Context, DiT
from jpeg_dlm.nn.perceiver import Decompressor
from jpeg_dlm.nn.token_decoder import TokenDecoder
from jpeg_dlm.rng import RowNoise

Denoise = Callable[[Tensor, float, Tensor | None], Tensor]  # x = f(z, t; s, w), with w fixed

# Kinds of requests that a writer takes; `methods.base.require` refuses the others.
Ability = Literal["prompts", "templates", "guides", "edits", "long text"]

# Called at each step of a sampler with the step, their number, the time, and a function that decodes the current prediction.
Watch = Callable[[int, int, float, Callable[[], Tensor]], None]


@dataclass(frozen=True)
class Prediction:
    """The current prediction, which decodes when called, and the latents as they are in this step."""

    decode: Callable[[], Tensor]
    state_BND: Tensor

    def __call__(self) -> Tensor:
        return self.decode()


def together(*watchers: Watch | None) -> Watch | None:
    """Return one watcher that calls all of these, which share what the sampler decodes for a step; None if there are none."""
    there = [watcher for watcher in watchers if watcher]

    def see(step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        shared = cache(tokens)
        if isinstance(tokens, Prediction):
            shared = replace(tokens, decode=shared)
        for watcher in there:
            watcher(step, steps, t, shared)

    return see if there else None


class Writer(Protocol):
    """Interface of everything that writes texts: a method, or Algorithm 2 on other networks."""

    @property
    def title(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def supports(self) -> frozenset[Ability]: ...

    @property
    def latent_sampler(self) -> LatentSampler | None:
        """Algorithm 2, where that is how texts are written."""
        ...

    def sample(
        self, sampler: Any, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor: ...  # fmt: skip


class LatentNetworks(Protocol):
    """The trained torch networks that sampling reads; `methods.jpeg_dlm.JpegDlm` has them."""

    config: Config
    dit: DiT
    predictor: DiT | None
    decompressor: Decompressor
    unembed_proj: nn.Linear
    lm_head: nn.Linear
    token_decoder: TokenDecoder | None
    latent_mean: Tensor
    latent_scale: Tensor

    def tokens(self, z: Tensor, w: float) -> Tensor: ...

    def logits(self, z: Tensor, w: float) -> Tensor: ...


@dataclass(frozen=True)
class LatentSampler:
    """Algorithm 2 on two networks. `networks` are the trained ones, where weights can be prepared or exported from them."""

    title: str
    config: Config
    device: torch.device
    denoiser: Callable[..., Denoise]  # f prepared for the times of a grid and for w, and for a context if the model has one
    tokens: Callable[..., Tensor]  # latents, w and ids to read (given_BL) to token ids: one decode evaluation at t = 1, greedy
    networks: LatentNetworks | None = None
    supports: frozenset[Ability] = frozenset()
    logits: Callable[..., Tensor] | None = None  # those of `tokens`, with a gradient, where control is supported
    known: Callable[[Tensor], Known | None] | None = None  # given ids (B, L) to latents that they determine: causal codecs

    @property
    def latent_sampler(self) -> LatentSampler:
        return self

    @torch.no_grad()
    def sample(
        self, sampler: SamplerConfig, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor:  # fmt: skip
        """Write token ids (B, L), a row for each of the noise; `watch` sees what the latents themselves decode to."""
        if given_BL is not None and self.known and (known := self.known(given_BL)):
            writer = replace(self.holding(known), known=None)
            return keep_given(writer.sample(sampler, noise, watch, known.undetermined(given_BL), control), given_BL)
        m = self.config.model
        z = noise.normal("sample", m.latent_len, m.latent_dim)  # z ~ N(0, I), one generator per row
        grid = grid_of(sampler, noise.shared("grid"))
        if given_BL is None and control is None:
            return self.integrate(z, grid, sampler, watch, noise=noise)
        decode = self.logits
        if decode is None:
            raise UsageError(f"{self.title} has no gradient to guide it: use the model that it was exported from.")

        def logits(x: Tensor, read_BL: Tensor | None = given_BL) -> Tensor:
            return decode(x, sampler.w, read_BL)

        if control and (origin := control.origin):
            z, grid = origin.state(origin.clean(partial(logits, read_BL=origin.tokens_BL)), z), origin.rest(grid)
        reading = replace(self, tokens=partial(self.tokens, given_BL=given_BL))
        tokens = reading.integrate(z, grid, sampler, watch, steering(logits, given_BL, control), noise)
        return keep_given(tokens, given_BL)

    @torch.no_grad()
    def released(self, n: int, sampler: SamplerConfig, seed: int, batch: int, watch: Watch | None = None) -> Iterator[Tensor]:
        """Yield batches of samples in the random-number order of the authors' code, in which a sample depends on its batch.

        With the random grid (LM1B) the generator is seeded once per run and every batch draws noise, then a new grid. With
        the quantile grid (OWT) it is seeded anew with seed + number of the batch's first sample.
        """
        m, g = self.config.model, torch.Generator(self.device).manual_seed(seed)
        for start in range(0, n, batch):
            if sampler.grid == "quantile":
                g.manual_seed(seed + start)
            z = torch.randn((min(batch, n - start), m.latent_len, m.latent_dim), generator=g, device=self.device)
            yield self.integrate(z, grid_of(sampler, g), sampler, watch)

    @torch.no_grad()
    def integrate(
        self, z: Tensor, grid: Tensor, sampler: SamplerConfig, watch: Watch | None = None, steer: Steering | None = None,
        noise: RowNoise | None = None,
    ) -> Tensor:  # fmt: skip
        """Integrate from the noise z along the grid to tokens; a stochastic solver draws more of `noise`."""
        steps = len(grid) - 1

        def on_step(k: int, t: float, z: Tensor, x: Tensor) -> None:
            if watch:
                watch(k, steps, t, Prediction(lambda: self.tokens(x, sampler.w), z))

        clean = self.latents(z, grid.tolist(), sampler, on_step, steer, noise)
        tokens = self.tokens(clean, sampler.w)
        if watch:
            watch(steps, steps, 1.0, Prediction(lambda: tokens, clean))
        return tokens

    @torch.no_grad()
    def latents(
        self, z: Tensor, times: list[float], sampler: SamplerConfig, on_step: OnStep | None = None,
        steer: Steering | None = None, noise: RowNoise | None = None,
    ) -> Tensor:  # fmt: skip
        """Integrate from the noise z along the times to clean latents; `steer` moves every prediction and the last state."""
        if sampler.solver == "sde":
            assert noise is not None, "a stochastic solver needs noise for its rows"
            streams = noise.streams("sde")
            solve = stochastic(sampler.gamma, lambda: streams.normal(*z.shape[1:]))
            denoise = self.denoiser(stochastic_times(times, sampler.gamma), sampler.w)
        else:
            denoise, solve = self.denoiser(times, sampler.w), SOLVERS[sampler.solver]
        if steer is None:
            return solve(self_conditioned(denoise), z, times, on_step)
        return steer.refined(solve(self_conditioned(steered(denoise, steer)), z, times, on_step))

    def holding(self, known: Known) -> LatentSampler:
        """Return the sampler of rows with some known latents: predictions there are exact, and so is what is decoded.

        A solver moves a state whose prediction is constant along the line t z + (1 - t) eps, with the row's own noise.
        """
        decode = self.logits
        return replace(
            self,
            denoiser=lambda times, w, **more: known.within(self.denoiser(times, w, **more)),
            tokens=lambda z, *more, **named: self.tokens(known.put(z), *more, **named),
            # so a guide moves the other latents alone
            logits=decode and (lambda z, *more, **named: decode(known.put(z), *more, **named)),
        )

    def after(self, context: Context, scale: float = 1.0) -> LatentSampler:
        """Return the sampler of blocks that follow a context, row by row.

        A scale other than 1 is classifier-free guidance: x = x_without + scale (x_with - x_without), in two evaluations.
        """
        return replace(self, denoiser=partial(context_guided, self.denoiser, context=context, scale=scale))


def context_guided(
    denoiser: Callable[..., Denoise], times: Sequence[float], w: float, context: Context, scale: float
) -> Denoise:  # fmt: skip
    """Return f(z, t; s, w) after a context, guided by the prediction without it."""
    following = denoiser(times, w, context=context)
    if scale == 1:
        return following
    alone = denoiser(times, w)
    return lambda z, t, s: torch.lerp(alone(z, t, s), following(z, t, s), scale)


def networks_of(writer: Writer) -> LatentNetworks | None:
    """Return the trained networks behind a writer, to prepare or export them; None if there are none."""
    return writer.latent_sampler.networks if writer.latent_sampler else None


def grid_of(sampler: SamplerConfig, generator: torch.Generator) -> Tensor:
    """Return the times of a sampler; only a random grid draws."""
    s = sampler
    return make_grid(s.grid, s.steps, s.grid_mean, s.grid_std, generator, s.times)


def steered(denoise: Denoise, steer: Steering) -> Denoise:
    """Return f(z, t; s, w) with every prediction moved by a guide, before the solver and the next evaluation see it."""
    return lambda z, t, s: steer.moved(denoise(z, t, s), t)


def self_conditioned(denoise: Denoise) -> Predict:
    """Return `predict(z, t)`, in which each call is conditioned on the prediction of the call before (appendix)."""
    s: Tensor | None = None

    def predict(z: Tensor, t: float) -> Tensor:
        nonlocal s
        s = denoise(z, t, s)
        return s

    return predict
