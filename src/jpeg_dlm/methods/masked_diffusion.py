"""MDLM and SEDD-Absorb, which are one masked diffusion: masking noise, the likelihood bound, samplers that unmask tokens.

At a masked position, both networks predict weights w_y >= 0 of the tokens y, or scores s_y = w_y / (e^sigma - 1). MDLM's
weights are probabilities; SEDD's need not sum to 1. For any schedule alpha_t = e^-sigma,

    bound   integral of sigma' / (e^sigma - 1) * [ sum_y w_y - 1 - log w_x0 ] dt, over the masked positions
    step    P(y) = c w_y, P(mask) = 1 - c sum_y w_y, with c = (alpha_s - alpha_t) / (1 - alpha_t) from t to s < t

A step draws whether a position is unmasked, then its token: exactly the law above. The public samplers of MDLM and SEDD draw
both at once by an exponential race of float32 numbers, which draws rare tokens too seldom and flatters generative perplexity.
Shapes: B batch, L tokens, V ids of the network, H hidden width, N selected positions of a batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Config, opt
from jpeg_dlm.flow.guidance import keep_fixed
from jpeg_dlm.flow.path import per_sample
from jpeg_dlm.methods import discrete
from jpeg_dlm.methods.base import Batch, CheckpointSignature, Likelihood, Watch
from jpeg_dlm.methods.discrete import AncestralSampler, DditMethod, DiscreteObjective, LogLinear, MaskedDdit
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.nn.token_loss import in_parts
from jpeg_dlm.util.rng import RowNoise, RowStreams, chosen_rows, on_device

EXACT = AncestralSampler()  # draws from the network's own distributions


class RowCache:
    """Caches the states of a network that ignores time: unchanged or fully unmasked rows are not recomputed."""

    def __init__(self, states: Callable[[Tensor, float], Tensor], mask_id: int) -> None:
        self.states, self.mask_id = states, mask_id
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_BL: Tensor, t: float) -> Tensor:
        if self.last is None:
            h_BLH = self.states(x_BL, t)
        else:
            before_BL, h_BLH = self.last
            stale_B = (x_BL != before_BL).any(1) & (x_BL == self.mask_id).any(1)
            if stale_B.any():  # a new tensor, as a watcher may still hold the last one
                h_BLH = h_BLH.index_put((stale_B,), self.states(x_BL[stale_B], t))
        self.last = x_BL, h_BLH
        return h_BLH


class MaskedDiffusion(DditMethod):
    """Masked diffusion; subclasses define the weights and their cost."""

    time_conditioned: ClassVar[bool]  # True if the network receives the noise level

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.vocab, self.mask_id = discrete.with_mask(config.model.mask_id, config.data.vocab_size)
        self.schedule = LogLinear()
        self.backbone = DDiT(self.vocab, config.model)
        self.loss_weights = {"nelbo": 1.0}

    # ------------------------------------------------------------ defined by subclasses

    @abstractmethod
    def weights(self, h_NH: Tensor, sampler: AncestralSampler = EXACT) -> Tensor:
        """Return w (N, V) in fp32, with 0 for the mask; a sampler may sharpen them."""

    @abstractmethod
    def total_weight(self, h_NH: Tensor) -> Tensor:
        """Return sum_y w_y (N)."""

    @abstractmethod
    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        """Return sum_y w_y - 1 - log w_x0 (N)."""

    def last_tokens(self, h_NH: Tensor, u_N: Tensor, sampler: AncestralSampler = EXACT) -> Tensor:
        """Return tokens (N) for positions that are still masked after the last step; u is uniform."""
        return self.draw(h_NH, u_N, sampler)

    # ------------------------------------------------------------ the network

    def states(self, x_BL: Tensor, t_B: Tensor) -> Tensor:
        """Return the inputs of the head (B, L, H)."""
        sigma_B = self.schedule.sigma(t_B) if self.time_conditioned else torch.zeros_like(t_B)
        return self.backbone.states(x_BL, sigma_B)

    def logits(self, h_NH: Tensor) -> Tensor:
        """Return logits (N, V) in fp32; the mask is never predicted."""
        logits_NV = self.backbone.head(h_NH).float()
        logits_NV[:, self.mask_id] = -torch.inf
        return logits_NV

    # ------------------------------------------------------------ the bound

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Estimate the mean integrand of the bound over [t_min, 1]; `likelihood` does not omit the least noise."""
        o, host = self.config.objective, noise.on_host  # the host has to know how many tokens are masked
        t_B = discrete.training_times(host, o)
        masked_BL = host.uniform("mask", batch.tokens_BL.shape[1]) < 1 - self.schedule.alpha(t_B)[:, None]
        masked_BL[:, : batch.source_len] = False
        _, places_N = chosen_rows(masked_BL.flatten().numpy(), noise.device)
        t_B = on_device(t_B, noise.device)
        weight_B = self.schedule.dsigma(t_B) / self.schedule.sigma(t_B).expm1()  # 1 / t
        nelbo_BL = weight_B[:, None] * self.costs(batch.tokens_BL, places_N, t_B)
        return {"nelbo": discrete.reduce_loss(nelbo_BL, batch, o.reduction)}

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
        x0_BL, first = batch.tokens_BL, batch.source_len
        length = x0_BL.shape[1] - first  # of the target, as a source is never masked
        u_BL, order_BL = noise.uniform("mask", length).sort(1)
        n_B1 = (noise.stratified("time") * length).long().clamp_max(length - 1)[:, None] + 1
        masked_BL = F.pad(order_BL.argsort(1) < n_B1, (first, 0))
        t_B = self.schedule.time(1 - u_BL.gather(1, n_B1 - 1).squeeze(1)).clamp_max(1)
        places_N = masked_BL.flatten().nonzero().squeeze(1)
        return Likelihood.over(length / n_B1 * self.costs(x0_BL, places_N, t_B), batch.real_BL)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(self, sampler: Any, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None) -> Tensor:
        """Sample rows; unmasked tokens never change, so given tokens are simply not masked."""
        masked_BL = torch.full((len(noise.rows), self.config.data.row_len), self.mask_id, device=noise.device)
        x_BL = keep_fixed(masked_BL, fixed_BL)
        streams = noise.streams("sample")
        states = RowCache(self.states_at, self.mask_id) if getattr(sampler, "cache", False) else self.states_at
        grid = discrete.sampling_times(sampler.steps)
        chances = self.chances(grid[:-1], grid[1:]).tolist()
        for k, (t, c) in enumerate(zip(grid.tolist(), chances, strict=False)):
            h_BLH = states(x_BL, t)
            if watch:
                watch(k, sampler.steps, 1 - t, partial(self.prediction, x_BL, h_BLH))
            x_BL = self.step(x_BL, h_BLH, c, streams, sampler)
        u_BL, masked_BL = streams.uniform(x_BL.shape[1]), x_BL == self.mask_id
        if masked_BL.any():
            h_NH = states(x_BL, discrete.T_MIN_SAMPLING)[masked_BL]
            last_tokens = partial(self.last_tokens, sampler=sampler)
            x_BL[masked_BL] = in_parts(last_tokens, discrete.POSITIONS_AT_ONCE, h_NH, u_BL[masked_BL])
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: x_BL)
        return x_BL

    def states_at(self, x_BL: Tensor, t: float) -> Tensor:
        """Return the states of rows that have the same time."""
        return self.states(x_BL, per_sample(t, x_BL))

    def chances(self, t: Tensor, s: Tensor) -> Tensor:
        """Return c of the steps from times t to s; SEDD's analytic and Euler steps have it too, as alpha is linear in t."""
        alpha_t, alpha_s = self.schedule.alpha(t), self.schedule.alpha(s)
        return (alpha_s - alpha_t) / (1 - alpha_t)

    def prediction(self, x_BL: Tensor, h_BLH: Tensor) -> Tensor:
        """Return the tokens so far, with masks replaced by the most probable tokens."""
        masked_BL = x_BL == self.mask_id
        best_N = in_parts(lambda h: self.logits(h).argmax(-1), discrete.POSITIONS_AT_ONCE, h_BLH[masked_BL])
        return x_BL.masked_scatter(masked_BL, best_N)

    def step(self, x_BL: Tensor, h_BLH: Tensor, c: float, streams: RowStreams, sampler: AncestralSampler = EXACT) -> Tensor:
        """Unmask with probability c sum_y w_y (at most 1), then draw y with probability w_y / sum: the exact distribution."""
        masked_BL, (coin_BL, u_BL) = x_BL == self.mask_id, streams.uniform(2, x_BL.shape[1]).unbind(1)
        total_N = in_parts(self.total_weight, discrete.POSITIONS_AT_ONCE, h_BLH[masked_BL])
        leave_BL = coin_BL < torch.zeros_like(coin_BL).masked_scatter(masked_BL, c * total_N.double())
        x_BL = x_BL.clone()
        draw = partial(self.draw, sampler=sampler)
        x_BL[leave_BL] = in_parts(draw, discrete.POSITIONS_AT_ONCE, h_BLH[leave_BL], u_BL[leave_BL])
        return x_BL

    def draw(self, h_NH: Tensor, u_N: Tensor, sampler: AncestralSampler) -> Tensor:
        """Draw tokens with probability w_y / sum, or from that distribution sharpened; when to unmask does not change."""
        return discrete.draw_tokens(self.weights(h_NH, sampler), u_N)


# ---------------------------------------------------------------- MDLM


@dataclass(frozen=True)
class MdlmSampler(AncestralSampler):
    """MDLM's sampler `ddpm_cache`."""

    cache: bool = opt(True, "evaluate a row again only after one of its tokens changed (MDLM: after any of the batch did)")

    def evaluations(self, token_len: int) -> int:
        """With the cache, return the expected number of steps that unmask a token; each token has one, uniformly drawn."""
        if not self.cache:
            return super().evaluations(token_len)
        return round(self.steps * (1 - (1 - 1 / self.steps) ** token_len))


class Mdlm(MaskedDiffusion):
    """Masked diffusion whose network predicts the masked tokens without receiving the noise level: w_y = p(x0 = y | x_t).

    In the SUBS parameterization, the mask has probability zero and unmasked tokens stay. Both hold by construction here,
    because only masked positions are predicted. The bound is a cross-entropy with weight 1 / t.
    """

    title = "MDLM"
    signature = CheckpointSignature(
        ("mdlm",),
        "subs",
        hub="mdlm",
        tensors=discrete.DIFFUSION_TENSORS,
        fixed={(*where, "time_conditioning"): False for where in ((), ("config",), ("config", "algo"))},
    )
    groups = {"model": MaskedDdit, "objective": DiscreteObjective, "sampler": MdlmSampler}
    time_conditioned = False

    def weights(self, h_NH: Tensor, sampler: AncestralSampler = EXACT) -> Tensor:
        return sampler.sharpened(self.logits(h_NH)).softmax(-1)

    def total_weight(self, h_NH: Tensor) -> Tensor:
        """Return 1, so that the head runs only for positions that are unmasked."""
        return h_NH.new_ones(len(h_NH))

    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(h_NH), x0_N, reduction="none")

    def last_tokens(self, h_NH: Tensor, u_N: Tensor, sampler: AncestralSampler = EXACT) -> Tensor:
        """Return the most probable tokens."""
        return self.logits(h_NH).argmax(-1)


# ---------------------------------------------------------------- SEDD-Absorb


class Sedd(MaskedDiffusion):
    """Masked diffusion whose network predicts ratios of probabilities (scores), trained by score entropy.

    The score of token y at a masked position is s_y = e^logit_y / (e^sigma - 1) / (V - 1), with V ids including the mask: an
    untrained network, whose logits are zero, has the scores of uniform tokens. The noise level cancels in the weights
    w_y = s_y (e^sigma - 1), and with r = 1 / (e^sigma - 1) the score entropy sum_y s_y - r log s_x0 + r (log r - 1) is r
    times `cost`. The last evaluation samples the tokens still masked.
    """

    title = "SEDD-Absorb"
    signature = CheckpointSignature(
        ("sedd",),
        "sedd",
        hub="sedd",
        keys=frozenset({"tokens", "graph", "noise"}),
        tensors=discrete.DIFFUSION_TENSORS,
        fixed={("graph", "type"): "absorb", ("noise", "type"): "loglinear", ("model", "scale_by_sigma"): True},
    )
    groups = {"model": MaskedDdit, "objective": DiscreteObjective, "sampler": AncestralSampler}
    tokenizer = "gpt2"
    time_conditioned = True

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Use SEDD's own recipe at the paper's sizes: GPT-2's tokenizer on both corpora, rows without a frame, its loss.

        A small preset has stratified times and a mean over tokens, as the others: less noise, and a comparable loss.
        """
        config = super().adapt(base, name)
        if base.preset not in discrete.PAPER_TOKENIZERS:
            return config
        objective = replace(config.objective, stratified=False, reduction="sequence_sum")
        data, train = replace(config.data, frame=False), replace(config.train, steps=1_300_001)
        return replace(config, objective=objective, data=data, train=train)

    def weights(self, h_NH: Tensor, sampler: AncestralSampler = EXACT) -> Tensor:
        return (sampler.sharpened(self.logits(h_NH)) - math.log(self.vocab - 1)).exp()

    def total_weight(self, h_NH: Tensor) -> Tensor:
        return self.weights(h_NH).sum(-1)

    def cost(self, h_NH: Tensor, x0_N: Tensor) -> Tensor:
        logits_NV, offset = self.logits(h_NH), math.log(self.vocab - 1)
        log_total_N, log_w_N = logits_NV.logsumexp(-1) - offset, logits_NV.gather(-1, x0_N[:, None]).squeeze(-1) - offset
        return log_total_N.expm1() - log_w_N
