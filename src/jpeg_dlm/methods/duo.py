"""Duo: uniform-state discrete diffusion, trained first on its Gaussian relaxation.

Symbols: alpha_t share of tokens without noise, x_t noisy tokens, x_theta the network's distribution of the clean token,
K ids of the process. A token stays with probability alpha_t, else it is drawn uniformly from all K ids, itself included.
In the bound and the posterior, x_theta acts as a prior that the position's own x_t then updates: the best network predicts
a token from the other positions only, not from all of x_t.
Shapes: B batch, L tokens, K ids, N positions, H hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import LARGEST_STEPS, Checks, Config, opt
from jpeg_dlm.flow.guidance import keep_fixed
from jpeg_dlm.methods import discrete
from jpeg_dlm.methods.argmax_noise import gamma_of, survival
from jpeg_dlm.methods.base import Batch, CheckpointSignature, Likelihood, Watch
from jpeg_dlm.methods.discrete import AncestralSampler, DditMethod, DiscreteObjective, ExtendedDdit, LogLinear
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.nn.token_loss import in_parts
from jpeg_dlm.util.rng import RowNoise

BELOW_ONE = math.nextafter(1, 0)  # 1 would always draw the last id, however improbable

# Duo: Gaussian levels of the curriculum; alpha falls from 0.942 to 0.049 and from 0.945 to 0.049.
PAPER_GAMMAS = {"lm1b": (-3.5, -1.75), "owt1024": (-3.55, -1.85)}
CURRICULUM_ALPHAS = (0.945, 0.05)  # range of alpha for other vocabularies


@dataclass(frozen=True)
class DuoObjective(DiscreteObjective):
    """The bound, and the curriculum, which replaces tokens by softened Gaussian latents in the first part of training."""

    curriculum: Literal["none", "simple"] = opt("simple", "Gaussian latents in the first part of training (Duo), or none")
    curriculum_steps: int = opt(0, "its steps; 0 is half of train.steps (Duo: 500k of 1M)", ge=0, le=LARGEST_STEPS)
    gamma_min: float = opt(
        0.0, "its lowest noise level (Duo: LM1B -3.5, OWT -3.55); both 0: the level with alpha = 0.945", ge=-100, le=100
    )
    gamma_max: float = opt(
        0.0, "its highest noise level (Duo: LM1B -1.75, OWT -1.85); both 0: the level with alpha = 0.05", ge=-100, le=100
    )
    tau: float = opt(1e-3, "temperature of the softmax that the network sees in place of the argmax (Duo)", gt=0, le=1e3)

    def checks(self, config: Config) -> Checks:
        ordered = self.gamma_min < self.gamma_max or self.gamma_min == self.gamma_max == 0
        return [(ordered, "objective.gamma_min must be below objective.gamma_max, or both 0")]


@dataclass(frozen=True)
class DuoSampler(AncestralSampler):
    """Ancestral sampling, in which every token may change at every step."""

    final: Literal["ancestral", "greedy"] = opt(
        "ancestral", "last evaluation: draw from the posterior of clean tokens, or take the most probable tokens (Duo)"
    )

    def label(self) -> str:
        return super().label() + (", greedy tail" if self.final == "greedy" else "")


@dataclass(frozen=True)
class Noised:
    """Noisy rows: the tokens x_t, the network's input (ids or distributions), alpha and d alpha / dt."""

    x_t_BL: Tensor
    seen: Tensor
    alpha_B: Tensor
    dalpha_B: Tensor


class Duo(DditMethod):
    """The whole system; only training uses the curriculum, likelihood and sampler do not."""

    title = "Duo"
    signature = CheckpointSignature(("duo", "duo_base"), hub="duo", tensors=discrete.DIFFUSION_TENSORS)
    groups = {"model": ExtendedDdit, "objective": DuoObjective, "sampler": DuoSampler}
    has_phases = True  # the curriculum

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.ids = config.data.vocab_size + config.model.extra_ids
        self.schedule = LogLinear()
        o: DuoObjective = config.objective
        self.gammas = o.gamma_min, o.gamma_max
        if not o.gamma_min < o.gamma_max:  # vocabularies other than the paper's get the same range of alpha
            first, last = CURRICULUM_ALPHAS
            self.gammas = gamma_of(first, self.ids), gamma_of(last, self.ids)
        self.backbone = DDiT(self.ids, config.model)
        self.loss_weights = {"nelbo": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        gamma_min, gamma_max = PAPER_GAMMAS.get(base.preset, (0.0, 0.0))
        config = super().adapt(base, name)
        return replace(config, objective=replace(config.objective, gamma_min=gamma_min, gamma_max=gamma_max))

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o: DuoObjective = self.config.objective
        t_B = discrete.training_times(noise, o).double()
        corrupt = self.gaussian_noised if self.in_curriculum(noise.step) else self.noised
        nats_BL = self.nelbo(batch.tokens_BL, self.beginning_clean(corrupt(batch.tokens_BL, t_B, noise), batch))
        return {"nelbo": discrete.reduce_loss(nats_BL, batch, o.reduction).float()}

    def in_curriculum(self, step: int) -> bool:
        """Return True if an optimizer step belongs to the curriculum; evaluation never does."""
        o: DuoObjective = self.config.objective
        steps = o.curriculum_steps or self.config.train.steps // 2
        return self.training and o.curriculum == "simple" and step < steps

    def noised(self, x0_BL: Tensor, t_B: Tensor, noise: RowNoise) -> Noised:
        """Apply the uniform-state process at times t of the log-linear schedule."""
        alpha_B = self.schedule.alpha(t_B)
        streams = noise.streams("forward")
        kept_BL = streams.uniform(x0_BL.shape[1]) < alpha_B[:, None]
        x_t = torch.where(kept_BL, x0_BL, self.uniform_ids(streams.uniform(x0_BL.shape[1])))
        return Noised(x_t, x_t, alpha_B, self.schedule.dalpha(t_B))

    @torch.no_grad()
    def gaussian_noised(self, x0_BL: Tensor, t_B: Tensor, noise: RowNoise) -> Noised:
        """Apply the same process as the argmax of a Gaussian latent w; the network sees softmax(w / tau)."""
        low, high = self.gammas
        gamma_B = low + t_B * (high - low)
        alpha_B, slope_B = survival(gamma_B, self.ids)
        a_B11, s_B11 = (torch.sigmoid(x).sqrt().float()[:, None, None] for x in (-gamma_B, gamma_B))
        w_BLK = noise.normal("latent", x0_BL.shape[1], self.ids).mul_(s_B11)
        w_BLK.scatter_add_(-1, x0_BL[..., None], a_B11.expand(-1, x0_BL.shape[1], 1))
        x_t = w_BLK.argmax(-1)
        return Noised(x_t, w_BLK.div_(self.config.objective.tau).softmax(-1), alpha_B, (high - low) * slope_B)

    def beginning_clean(self, noised: Noised, batch: Batch) -> Noised:
        """Return rows whose sources have no noise."""
        source_BS = batch.tokens_BL[:, : batch.source_len]
        seen = source_BS if noised.seen.ndim == 2 else F.one_hot(source_BS, self.ids).to(noised.seen)
        return replace(
            noised, x_t_BL=discrete.with_source(noised.x_t_BL, source_BS), seen=discrete.with_source(noised.seen, seen)
        )

    def nelbo(self, x0_BL: Tensor, noised: Noised) -> Tensor:
        """Return nats at every position (B, L), per unit of time, in float64."""
        alpha_B1, dalpha_B1 = noised.alpha_B[:, None], noised.dalpha_B[:, None]
        h_BLH = self.backbone.states(noised.seen, -noised.alpha_B.log().float())
        odds_BL = (self.ids * alpha_B1 / (1 - alpha_B1)).float().expand(x0_BL.shape)
        places = [x.flatten(0, 1) for x in (h_BLH, odds_BL, x0_BL, noised.x_t_BL)]
        terms = lambda h, *others: log_terms(self.backbone.head(h).float(), *others)  # noqa: E731
        logs_BL3 = in_parts(terms, self.config.objective.ce_chunk, *places).view(*x0_BL.shape, 3).double()
        return nelbo_integrand(logs_BL3, noised.x_t_BL == x0_BL, alpha_B1, dalpha_B1, self.ids)

    @torch.no_grad()
    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Estimate the bound with one random time per row.

        The bound is the integral over time plus the divergence of x_1 from the uniform prior, about 3e-3 nats per token for
        the vocabularies of the paper. Below T_MIN_SAMPLING the integrand is taken as constant.
        """
        t_B = noise.stratified("time").double().clamp_min(discrete.T_MIN_SAMPLING)
        nats_BL = self.nelbo(batch.tokens_BL, self.beginning_clean(self.noised(batch.tokens_BL, t_B, noise), batch))
        return Likelihood.over(nats_BL + prior_divergence(self.schedule.eps, self.ids), batch.real_BL)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: DuoSampler, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None
    ) -> Tensor:
        streams, length = noise.streams("sample"), self.config.data.row_len
        x_BL = keep_fixed(self.uniform_ids(streams.uniform(length)), fixed_BL)
        grid, last_id = F.pad(discrete.sampling_times(sampler.steps), (0, 1)), self.config.data.vocab_size - 1
        for k, (alpha_t, alpha_s) in enumerate(pairwise(self.schedule.alpha(grid).tolist())):
            if watch and k < sampler.steps:  # extra ids are shown as the tokenizer's last
                watch(k, sampler.steps, 1 - grid[k].item(), partial(x_BL.clamp_max, last_id))
            x_BL = keep_fixed(self.step(sampler, x_BL, alpha_t, alpha_s, streams.uniform(length)), fixed_BL)
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: x_BL)
        return x_BL

    def step(self, sampler: DuoSampler, x_BL: Tensor, alpha_t: float, alpha_s: float, u_BL: Tensor) -> Tensor:
        """Step from x_t to x_s with one number u per position; clean text (alpha_s = 1) has only the tokenizer's ids."""
        h_BLH = self.backbone.states(x_BL, torch.full((len(x_BL),), -math.log(alpha_t), device=x_BL.device))

        def drawn(h_NH: Tensor, x_N: Tensor, u_N: Tensor) -> Tensor:
            logits_NK = self.backbone.head(h_NH).float()
            if alpha_s == 1:
                logits_NK[:, self.config.data.vocab_size :] = -torch.inf
                if sampler.final == "greedy":
                    return logits_NK.argmax(-1)
            return draw_posterior(sampler.sharpened(logits_NK), x_N, alpha_t, alpha_s, u_N)

        return in_parts(drawn, discrete.POSITIONS_AT_ONCE, *(x.flatten(0, 1) for x in (h_BLH, x_BL, u_BL))).view(x_BL.shape)

    def uniform_ids(self, u: Tensor) -> Tensor:
        """Map float64 uniform numbers in [0, 1), fine enough for any K, to uniform ids."""
        return (u * self.ids).long()


# ---------------------------------------------------------------- the bound


def log_terms(logits_NK: Tensor, odds_N: Tensor, x0_N: Tensor, x_t_N: Tensor) -> Tensor:
    """Return the terms of x_theta in the bound (N, 3): the sum over ids of a_j, a at x0, and a at x_t.

    a_j = log(1 + odds x_theta_j) with odds = K alpha / (1 - alpha) is log(K alpha x_theta_j + 1 - alpha) without the term
    log(1 - alpha), which cancels in the bound; without it, the sum over a large vocabulary stays precise in fp32.
    """
    a_NK = torch.log1p(odds_N[:, None] * logits_NK.softmax(-1))
    at = [a_NK.gather(-1, x[:, None]).squeeze(-1) for x in (x0_N, x_t_N)]
    return torch.stack([a_NK.sum(-1), *at], dim=-1)


def nelbo_integrand(logs: Tensor, same: Tensor, alpha: Tensor, dalpha: Tensor, ids: int) -> Tensor:
    """Return Duo's continuous-time bound at one time from `log_terms` (..., 3); `same` is x_t == x0. Never negative."""
    total, at_x0, at_xt = logs.unbind(-1)
    most = torch.log1p(ids * alpha / (1 - alpha))  # a_j of a network that is certain of j
    missed = most - at_x0
    spread = (most - total) / ids
    if_same = (torch.expm1(missed) / (1 - alpha) - missed + spread) * torch.exp(-most)
    if_other = (torch.expm1(-at_xt) + at_xt + alpha * missed) / (1 - alpha) + spread
    return -dalpha / alpha * torch.where(same, if_same, if_other)


def prior_divergence(alpha: float, ids: int) -> float:
    """Return KL(q(x_1 | x0) || uniform) of one token, in nats."""
    stay, other = torch.tensor([alpha + (1 - alpha) / ids, (1 - alpha) / ids], dtype=torch.float64)
    return float(stay * (ids * stay).log() + (ids - 1) * other * (ids * other).log())


# ---------------------------------------------------------------- the sampler's parts


def draw_posterior(logits_NK: Tensor, x_N: Tensor, alpha_t: float, alpha_s: float, u_N: Tensor) -> Tensor:
    """Draw x_s ~ q(x_s | x_t, x_theta) from u in [0, 1), in float64.

    The posterior is a mixture of x_t itself, the uniform distribution and x_theta. The position of u within the chosen
    component is uniform again and draws from it, so only the few positions that draw from x_theta need its CDF.
    """
    ids, alpha_ts = logits_NK.shape[-1], alpha_t / alpha_s
    log_p_N = logits_NK.gather(-1, x_N[:, None]).squeeze(-1) - logits_NK.logsumexp(-1)
    stay_N = ids * alpha_t * log_p_N.double().exp() + (alpha_ts - alpha_t)
    anything, predicted = (1 - alpha_ts) * (1 - alpha_s), alpha_s - alpha_t
    v_N = u_N * (stay_N + anything + predicted) - stay_N  # below 0: stay
    x_s_N = x_N.clone()
    if anything:
        any_id_N = (v_N * (ids / anything)).long().clamp(0, ids - 1)
        x_s_N = torch.where(v_N < 0, x_N, any_id_N)
    chosen_N = v_N >= anything
    rest = ((v_N[chosen_N] - anything) / predicted).clamp(0, BELOW_ONE)
    x_s_N[chosen_N] = discrete.draw_tokens(logits_NK[chosen_N].double().softmax(-1), rest)
    return x_s_N
