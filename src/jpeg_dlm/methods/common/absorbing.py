"""The shared part of MDLM and SEDD-Absorb: masking noise, the likelihood bound, and samplers that unmask tokens.

At a masked position, both networks predict weights w_y >= 0 of the tokens y, or scores s_y = w_y / (e^sigma - 1). MDLM's
weights are probabilities; SEDD's need not sum to 1. For any schedule alpha_t = e^-sigma,

    bound   integral of sigma' / (e^sigma - 1) * [ sum_y w_y - 1 - log w_x0 ] dt, over the masked positions
    step    P(y) = c w_y, P(mask) = 1 - c sum_y w_y, with c = (alpha_s - alpha_t) / (1 - alpha_t) from t to s < t

Shapes: B batch, L tokens, V ids of the network, H hidden width, N selected positions of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from jpeg_dlm.config import Config, opt
from jpeg_dlm.flow.control import keep_given
from jpeg_dlm.methods.base import FILLS_IN, Batch, Likelihood, Method, Watch
from jpeg_dlm.methods.common.discrete import (
    PAPER_TOKENIZERS,
    POSITIONS_AT_ONCE,
    T_MIN_SAMPLING,
    DditConfig,
    LogLinear,
    ddit_sizes,
    draw_tokens,
    reduce_loss,
    sampling_times,
    training_times,
)
from jpeg_dlm.methods.common.shared_options import StepSampler
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.nn.token_loss import in_parts
from jpeg_dlm.rng import RowNoise, RowStreams, chosen_rows, on_device


@dataclass(frozen=True)
class AbsorbingSampler(StepSampler):
    """Ancestral sampling from all masks on evenly spaced times."""

    steps: int = opt(128, "steps from all masks to text (paper: 128 on LM1B, 1024 on OWT)")
    race_dtype: Literal["exact", "float64", "float32"] = opt(
        "exact",
        "how a step draws: 'exact' draws whether a position is unmasked, then its token; the others draw by an exponential "
        "race of all tokens and the mask in that precision. The published numbers of MDLM and SEDD used 'float32', which is "
        "biased: it draws rare tokens too seldom, more so with more steps, which flatters generative perplexity",
    )

    def evaluations(self, token_len: int) -> int:
        """Add one evaluation for tokens that are still masked after the last step."""
        return self.steps + 1


# ---------------------------------------------------------------- mathematics of one step


def step_distribution(w_NV: Tensor, c: float, mask_id: int) -> Tensor:
    """Return P(y) = c w_y and P(mask) = 1 - c sum_y w_y (N, V); SEDD's P(mask) can be negative, then it never wins."""
    q_NV = c * w_NV
    q_NV[:, mask_id] = 0
    q_NV[:, mask_id] = 1 - q_NV.sum(-1)
    return q_NV


def race(q_NV: Tensor, u_NV: Tensor) -> Tensor:
    """Draw from q as argmax q / E with exponential E; the precision of the uniform numbers limits accuracy (MDLM, SEDD, Duo).

    In float32 they are multiples of 2^-24, so E never falls below about 2^-24. A token must beat the mask's q / E, and a
    token of probability c w is drawn f(k) times as often as it should, f(k) = 1 / (k (e^(1/k) - 1)), k = 2^24 c w / (1 - c).
    """
    return (q_NV / (1e-10 - (u_NV + 1e-10).log())).argmax(-1)


class RowCache:
    """Caches the states of a network that sees only tokens: unchanged or fully unmasked rows are not recomputed."""

    def __init__(self, states: Callable[[Tensor], Tensor], mask_id: int) -> None:
        self.states, self.mask_id = states, mask_id
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_BL: Tensor) -> Tensor:
        if self.last is None:
            h_BLH = self.states(x_BL)
        else:
            before_BL, h_BLH = self.last
            stale_B = (x_BL != before_BL).any(1) & (x_BL == self.mask_id).any(1)
            if stale_B.any():
                h_BLH[stale_B] = self.states(x_BL[stale_B])
        self.last = x_BL, h_BLH
        return h_BLH


# ---------------------------------------------------------------- the systems


class Absorbing(Method):
    """Masked diffusion; subclasses define the weights, their cost and the end of the sampler."""

    supports = FILLS_IN
    time_conditioned: ClassVar[bool]  # True if the network receives the noise level

    def __init__(self, config: Config) -> None:
        super().__init__()
        m: DditConfig = config.model
        self.config = config
        self.vocab, self.mask_id = m.with_mask(config.data.vocab_size)
        self.schedule = LogLinear()
        self.backbone = DDiT(self.vocab, m.hidden, m.depth, m.heads, m.cond_dim, m.freq_dim, m.mlp_ratio, m.dropout)
        self.loss_weights = {"nelbo": 1.0}

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        ids, sizes = ddit_sizes(tensors)
        published = {vocab + (mask_id == -1): (name, vocab, mask_id) for name, vocab, mask_id in PAPER_TOKENIZERS.values()}
        tokenizer, vocab, mask_id = published.get(ids, (base.data.tokenizer, ids - 1, -1))
        data = replace(base.data, tokenizer=tokenizer, vocab_size=vocab)
        return replace(base, data=data, model=replace(base.model, **sizes, mask_id=mask_id))

    # ------------------------------------------------------------ defined by subclasses

    @abstractmethod
    def weights(self, h_NH: Tensor) -> Tensor:
        """Return w (N, V) in fp32, with 0 for the mask."""

    @abstractmethod
    def total_weight(self, h_NH: Tensor) -> Tensor:
        """Return sum_y w_y (N)."""

    @abstractmethod
    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        """Return sum_y w_y - 1 - log w_x0 (N)."""

    @abstractmethod
    def chances(self, sampler: Any, t: Tensor, s: Tensor) -> Tensor:
        """Return c of the steps from times t to s."""

    @abstractmethod
    def finish(self, sampler: Any, h_NH: Tensor, u_N: Tensor) -> Tensor:
        """Return tokens (N) for positions that are still masked after the last step; u is uniform."""

    # ------------------------------------------------------------ the network

    def states(self, x_BL: Tensor, t_B: Tensor) -> Tensor:
        """Return the inputs of the head (B, L, H)."""
        sigma_B = self.schedule.sigma(t_B) if self.time_conditioned else torch.zeros_like(t_B)
        return self.backbone.states(self.backbone.vocab_embed(x_BL), self.backbone.condition(sigma_B))

    def logits(self, h_NH: Tensor) -> Tensor:
        """Return logits (N, V) in fp32; the mask is never predicted."""
        logits_NV = self.backbone.head(h_NH).float()
        logits_NV[:, self.mask_id] = -torch.inf
        return logits_NV

    # ------------------------------------------------------------ the bound

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Estimate the mean integrand of the bound over [t_min, 1]; `likelihood` does not omit the least noise."""
        o, host = self.config.objective, noise.on_host  # the host has to know how many tokens are masked
        t_B = training_times(host, o)
        masked_BL = host.uniform("mask", batch.tokens_BL.shape[1]) < 1 - self.schedule.alpha(t_B)[:, None]
        _, places_N = chosen_rows(masked_BL.flatten().numpy(), noise.device)
        t_B = on_device(t_B, noise.device)
        weight_B = self.schedule.dsigma(t_B) / self.schedule.sigma(t_B).expm1()  # 1 / t
        nelbo_BL = weight_B[:, None] * self.costs(batch.tokens_BL, places_N, t_B)
        return {"nelbo": reduce_loss(nelbo_BL, batch.mask_BL, o.reduction)}

    def costs(self, x0_BL: Tensor, places_N: Tensor, t_B: Tensor) -> Tensor:
        """Return `cost` at masked places, which count through the rows, and 0 elsewhere (B, L)."""
        x0 = x0_BL.flatten()
        h_BLH = self.states(x0.index_fill(0, places_N, self.mask_id).view_as(x0_BL), t_B)
        masked = (h_BLH.flatten(0, 1).index_select(0, places_N), x0.index_select(0, places_N))
        cost_N = in_parts(self.cost, self.config.objective.ce_chunk, *masked)
        return cost_N.new_zeros(len(x0)).index_copy(0, places_N, cost_N).view_as(x0_BL)

    @torch.no_grad()
    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Estimate the whole bound without bias from one time per row, without cutting either end and without large weights.

        Over the masked share m = 1 - alpha, the bound is the integral of E[sum of costs] / m. A uniform m would give rare rows
        huge weights. Instead, the number n of masked tokens is uniform on 1..L, and m is the n-th smallest of L uniform
        numbers: this pair has density n / L times that of the integral, hence the weight L / n. Shares above 1 - eps, which
        the schedule never reaches, are passed to the network as t = 1. Padding is noised like text but does not count.
        """
        x0_BL = batch.tokens_BL
        length = x0_BL.shape[1]
        u_BL, order_BL = noise.uniform("mask", length).sort(1)
        n_B1 = (noise.stratified("time") * length).long().clamp_max(length - 1)[:, None] + 1
        masked_BL = order_BL.argsort(1) < n_B1
        t_B = self.schedule.time(1 - u_BL.gather(1, n_B1 - 1).squeeze(1)).clamp_max(1)
        places_N = masked_BL.flatten().nonzero().squeeze(1)
        return Likelihood.over(length / n_B1 * self.costs(x0_BL, places_N, t_B), batch.real_BL)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(self, sampler: Any, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None) -> Tensor:
        """Sample rows; unmasked tokens never change, so given tokens are simply not masked."""
        masked_BL = torch.full((len(noise.rows), self.config.data.token_len), self.mask_id, device=noise.device)
        x_BL = keep_given(masked_BL, given_BL)
        streams, states = noise.streams("sample"), self.sampling_states(sampler)
        grid = torch.tensor(sampling_times(sampler.steps), dtype=torch.float64)
        chances = self.chances(sampler, grid[:-1], grid[1:]).tolist()
        for k, (t, c) in enumerate(zip(grid.tolist(), chances, strict=False)):
            h_BLH = states(x_BL, t)
            if watch:
                watch(k, sampler.steps, 1 - t, partial(self.prediction, x_BL, h_BLH))
            x_BL = self.step(sampler, x_BL, h_BLH, c, streams)
        u_BL, masked_BL = streams.uniform(x_BL.shape[1]), x_BL == self.mask_id
        if masked_BL.any():
            h_NH = states(x_BL, T_MIN_SAMPLING)[masked_BL]
            x_BL[masked_BL] = in_parts(partial(self.finish, sampler), POSITIONS_AT_ONCE, h_NH, u_BL[masked_BL])
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: x_BL)
        return x_BL

    def sampling_states(self, sampler: Any) -> Callable[[Tensor, float], Tensor]:
        """Return the function `states(x, t)` of one sampler run, in which all rows have the same time t."""
        return lambda x_BL, t: self.states(x_BL, torch.full((len(x_BL),), t, device=x_BL.device))

    def prediction(self, x_BL: Tensor, h_BLH: Tensor) -> Tensor:
        """Return the tokens so far, with masks replaced by the most probable tokens."""
        masked_BL = x_BL == self.mask_id
        best_N = in_parts(lambda h: self.logits(h).argmax(-1), POSITIONS_AT_ONCE, h_BLH[masked_BL])
        return x_BL.masked_scatter(masked_BL, best_N)

    def step(self, sampler: AbsorbingSampler, x_BL: Tensor, h_BLH: Tensor, c: float, streams: RowStreams) -> Tensor:
        """Unmask some positions."""
        if sampler.race_dtype == "exact":
            return self.two_stage_step(x_BL, h_BLH, c, streams)
        return self.race_step(x_BL, h_BLH, c, streams, getattr(torch, sampler.race_dtype))

    def two_stage_step(self, x_BL: Tensor, h_BLH: Tensor, c: float, streams: RowStreams) -> Tensor:
        """Unmask with probability c sum_y w_y (at most 1), then draw y with probability w_y / sum: the exact distribution."""
        masked_BL, (coin_BL, u_BL) = x_BL == self.mask_id, streams.uniform(2, x_BL.shape[1]).unbind(1)
        total_N = in_parts(self.total_weight, POSITIONS_AT_ONCE, h_BLH[masked_BL])
        leave_BL = coin_BL < torch.zeros_like(coin_BL).masked_scatter(masked_BL, c * total_N.double())
        x_BL = x_BL.clone()
        x_BL[leave_BL] = in_parts(self.draw, POSITIONS_AT_ONCE, h_BLH[leave_BL], u_BL[leave_BL])
        return x_BL

    def draw(self, h_NH: Tensor, u_N: Tensor) -> Tensor:
        """Draw tokens with probability w_y / sum."""
        return draw_tokens(self.weights(h_NH), u_N)

    def race_step(self, x_BL: Tensor, h_BLH: Tensor, c: float, streams: RowStreams, dtype: torch.dtype) -> Tensor:
        """Draw a step by `race`, row by row; each row draws only the numbers that its own masks need."""
        x_BL = x_BL.clone()
        for x_L, h_LH, generator in zip(x_BL, h_BLH, streams.generators(), strict=True):
            masked_L = x_L == self.mask_id
            w_NV = self.weights(h_LH[masked_L]).to(dtype)
            u_NV = torch.rand(w_NV.shape, generator=generator, device=w_NV.device, dtype=dtype)
            x_L[masked_L] = race(step_distribution(w_NV, c, self.mask_id), u_NV)
        return x_BL
