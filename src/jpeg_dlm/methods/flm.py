"""FLM: flow matching on one-hot tokens; and FMLM, its flow map, which replaces many steps with one.

The state of a row has a vector of vocabulary size per token on the linear path z_t = (1 - t) eps + t onehot(x). Times are
drawn, passed to the network and stepped in tau, the share of tokens that can be decoded from the state (see
`decoding_error`). The network predicts p = E[onehot(x) | z_t] as a distribution over tokens, so the velocity is
(p - z_t) / (1 - t).

A flow map X_{s,t} maps a state at s to the state at t with a single evaluation of a two-time denoiser D_{s,t},

    X_{s,t}(z) = (1 - t) / (1 - s) z + (t - s) / (1 - s) D_{s,t}(z)

where D_{s,s} = p. Since X_{s,t} = X_{u,t} X_{s,u} for s < u < t, D over shorter intervals gives the target for D_{s,t}.
(FLM) marks the authors' code. Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.flow.path import per_row
from jpeg_dlm.methods.base import FILLS_IN, Batch, Method, Publication, Watch, masked_mean
from jpeg_dlm.methods.common.decoding_error import TimeMap
from jpeg_dlm.methods.common.discrete import (
    DIFFUSION_TENSORS,
    PAPER_TOKENIZERS,
    ExtendedNetwork,
    adapted,
    ddit_model,
    ddit_sizes,
    published_config,
    sampler_steps,
)
from jpeg_dlm.methods.common.shared_options import StepSampler
from jpeg_dlm.nn.ddit import DDiT, NoiseLevel, zero_linear
from jpeg_dlm.nn.precision import fp32_island
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.rng import RowNoise

SOFTCAP = 50.0  # attention scores are squashed to (-50, 50) (FLM)
TIME_FLOOR = 1e-5  # added to 1 - t (FLM)


@dataclass(frozen=True)
class FlmObjective:
    """Cross-entropy at random times; with `flow_map` also over random intervals."""

    flow_map: bool = opt(False, "learn the two-time denoiser of FMLM, which samples in few steps")
    diagonal: float = opt(0.5, "share of rows with a single time instead of an interval, which train plain FLM (FLM)")
    whole: float = opt(1 / 32, "share of the other rows whose interval is the whole of [0, 1] (FLM)")
    ce_chunk: int = opt(0, "token positions whose logits exist at once, recomputed in backward; 0 or a flow map keeps all")

    def checks(self, config: Config) -> Checks:
        return [
            (0 < self.diagonal <= 1, "objective.diagonal must lie in (0, 1], as only these rows learn from text"),
            (0 <= self.whole <= 1, "objective.whole must lie between 0 and 1"),
        ]


@dataclass(frozen=True)
class FlmSampler(StepSampler):
    """Steps of equal size in tau."""

    steps: int = opt(128, "network evaluations (paper: 128 on LM1B, 1024 on OWT; a flow map needs 1 to 32)")
    step: Literal["euler", "map"] = opt("euler", "along the velocity, or by the flow map (objective.flow_map)")

    def checks(self, config: Config) -> Checks:
        learned = getattr(config.objective, "flow_map", False)
        known = self.step == "euler" or learned
        return [*super().checks(config), (known, "sampler.step 'map' needs a model trained with objective.flow_map")]

    def label(self) -> str:
        return super().label() if self.step == "euler" else f"{self.steps} map steps"


# ---------------------------------------------------------------- flow maps


def leap(z: Tensor, d: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return X_{s,t}(z) for D_{s,t}(z) = d, a mixture of z and d; times are (B)."""
    return torch.lerp(z, d, per_row(((t - s) / (1 - s + TIME_FLOOR)).to(z.dtype), z))


def split_share(s: Tensor, u: Tensor, t: Tensor) -> Tensor:
    """Return lambda of D_{s,t} = lambda D_{s,u} + (1 - lambda) D_{u,t}: (1 - t)(u - s) / ((1 - u)(t - s))."""
    tiny = torch.finfo(s.dtype).tiny  # an interval too short to split in float64 gets D_{u,t}
    return (1 - t) * (u - s) / ((1 - u) * (t - s)).clamp_min(tiny)


class TwoTimeDDiT(DDiT):
    """The shared transformer conditioned on two times; the second has no effect at initialization."""

    def __init__(self, vocab: int, **sizes: Any) -> None:
        super().__init__(vocab, **sizes)
        self.sigma_map_prime = NoiseLevel(sizes["freq_dim"], sizes["cond_dim"])
        # zero, so that an FLM loaded as a flow map stays the same (FLM)
        self.sigma_map_prime.mlp[2] = zero_linear(sizes["cond_dim"], sizes["cond_dim"])

    def condition(self, sigma_B: Tensor, prime_B: Tensor | None = None) -> Tensor:
        prime_B = sigma_B if prime_B is None else prime_B
        with fp32_island(sigma_B):
            return F.silu(self.sigma_map(sigma_B) + self.sigma_map_prime(prime_B))


# ---------------------------------------------------------------- the method


class Flm(Method):
    """The whole system."""

    title = "FLM"
    # Flow maps are "flm_distill" and "flm_distill_double" in released files and "fmlm_..." in later code (FLM).
    publication = Publication(("flm", "flm_*distill*", "fmlm*"), tensors=DIFFUSION_TENSORS)
    supports = FILLS_IN
    groups = {"model": ExtendedNetwork, "objective": FlmObjective, "sampler": FlmSampler}

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.ids = config.data.vocab_size + config.model.extra_ids
        kind = TwoTimeDDiT if config.objective.flow_map else DDiT
        self.backbone = kind(self.ids, softcap=SOFTCAP, **config.model.arguments())
        self.times = TimeMap(self.ids)
        self.loss_weights = {"ce": 1.0, "ce_map": 1.0} if config.objective.flow_map else {"ce": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        model = ExtendedNetwork(**ddit_model(base), extra_ids=int(base.preset == "owt1024"))  # (FLM)
        config = adapted(base, name, FlmObjective(ce_chunk=base.objective.ce_chunk), FlmSampler(sampler_steps(base)), model)
        if base.preset != "smoke":
            return config
        # Twice the preset's rate learns more in a short run (measured), perhaps as it suppresses noise of other tokens sooner.
        return replace(config, train=replace(config.train, lr=2 * config.train.lr))

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        flow_map = any(".sigma_map_prime." in name for name in tensors)
        ids, _ = ddit_sizes(tensors)
        extra = int(ids - 1 in [known for _, known, _ in PAPER_TOKENIZERS.values()])
        config = published_config(tensors, replace(base, objective=replace(base.objective, flow_map=flow_map)), extra)
        return replace(config, model=replace(config.model, extra_ids=extra))

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        tau_B = noise.stratified("time").float()
        if self.config.objective.flow_map:
            return self.map_losses(batch, tau_B, noise)
        states = self.states(self.noisy(batch.tokens_BL, self.times(tau_B), noise), tau_B)
        nll_BL = token_nll(self.backbone.head, states, batch.tokens_BL, self.config.objective.ce_chunk)
        return {"ce": masked_mean(nll_BL, batch.mask_BL)}

    def noisy(self, tokens_BL: Tensor, t_B: Tensor, noise: RowNoise) -> Tensor:
        """Return z_t (B, L, V), computed in place in the noise tensor, the largest tensor of a step."""
        z = noise.normal("state", tokens_BL.shape[1], self.ids)
        t = per_row(t_B.to(z.dtype), z)
        return z.mul_(1 - t).scatter_add_(-1, tokens_BL[..., None], t.expand(*tokens_BL.shape, 1))

    def map_losses(self, batch: Batch, tau_B: Tensor, noise: RowNoise) -> dict[str, Tensor]:
        """Return the cross-entropy with the token on the diagonal, and with `map_target` elsewhere; both count all rows."""
        tau_s, tau_t = self.intervals(tau_B, noise)
        z = self.noisy(batch.tokens_BL, self.times(tau_s), noise)
        log_p = self.backbone.head(self.states(z, tau_s, tau_t)).float().log_softmax(-1)
        off = (tau_t > tau_s).nonzero().squeeze(1)
        nll_BL = -log_p.gather(-1, batch.tokens_BL[..., None]).squeeze(-1)
        map_BL = torch.zeros_like(nll_BL)
        if len(off):
            target = self.map_target(z[off], tau_s[off], tau_t[off])
            map_BL = map_BL.index_copy(0, off, -(target * log_p[off]).sum(-1))
        on = (tau_t == tau_s)[:, None]
        return {"ce": masked_mean(nll_BL * on, batch.mask_BL), "ce_map": masked_mean(map_BL, batch.mask_BL)}

    def intervals(self, tau_B: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return (tau_s, tau_t): a single time, an interval of uniform length and position, or all of [0, 1] (FLM)."""
        o: FlmObjective = self.config.objective
        length = noise.uniform("length")
        length = torch.where(noise.uniform("whole") < o.whole, torch.ones_like(length), length)
        length = torch.where(noise.uniform("diagonal") < o.diagonal, torch.zeros_like(length), length)
        tau_s = tau_B * (1 - length)
        return tau_s, (tau_s + length).clamp_max(1)

    @torch.no_grad()
    def map_target(self, z: Tensor, tau_s: Tensor, tau_t: Tensor) -> Tensor:
        """Return lambda D_{s,u} + (1 - lambda) D_{u,t}, with u halfway in tau and the current network (FLM)."""
        tau_u = (tau_s + tau_t) / 2
        s, u, t = self.times(tau_s), self.times(tau_u), self.times(tau_t)
        d_su = self.denoise(z, tau_s, tau_u)
        d_ut = self.denoise(leap(z, d_su, s, u), tau_u, tau_t)
        return torch.lerp(d_ut, d_su, per_row(split_share(s, u, t).to(z.dtype), z))

    # ------------------------------------------------------------ the denoiser

    def states(self, z_BLV: Tensor, tau_B: Tensor, end_B: Tensor | None = None) -> Tensor:
        """Return the inputs of the head (B, L, H) for D over [tau, end]; without an end or a flow map, for p at tau."""
        with fp32_island(z_BLV):
            x_BLH = self.backbone.vocab_embed(z_BLV)
        if isinstance(self.backbone, TwoTimeDDiT):
            return self.backbone.states(x_BLH, self.backbone.condition(tau_B, end_B))
        return self.backbone.states(x_BLH, self.backbone.condition(tau_B))

    def denoise(self, z_BLV: Tensor, tau_B: Tensor, end_B: Tensor | None = None) -> Tensor:
        """Return D (B, L, V), a distribution per token."""
        return self.backbone.head(self.states(z_BLV, tau_B, end_B)).float().softmax(-1)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: FlmSampler, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None
    ) -> Tensor:
        z = noise.normal("sample", self.config.data.token_len, self.ids)
        return self.integrate(z, sampler, watch, given_BL)

    @torch.no_grad()
    def integrate(
        self, z: Tensor, sampler: FlmSampler, watch: Watch | None = None, given_BL: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Integrate from the noise z to tokens, with given ones certain; an Euler step is a leap with the one-time denoiser."""
        steps = sampler.steps
        taus = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=z.device)
        t = self.times(taus)
        p = z
        for k in range(steps):
            tau, end = (taus[i].expand(len(z)).to(z.dtype) for i in (k, k + 1))
            p = self.denoise(z, tau, end if sampler.step == "map" else None)
            if given_BL is not None:
                certain = F.one_hot(given_BL.clamp_min(0), p.shape[-1]).to(p)
                p = torch.where((given_BL >= 0)[..., None], certain, p)
            if watch:
                watch(k, steps, taus[k].item(), lambda p=p: self.written(p))
            if k + 1 < steps:  # the last step would return p
                z = leap(z, p, t[k].expand(len(z)), t[k + 1].expand(len(z)))
        tokens = self.written(p)
        if watch:
            watch(steps, steps, 1.0, lambda: tokens)
        return tokens

    def written(self, p_BLV: Tensor) -> Tensor:
        """Return the most probable of the tokenizer's ids."""
        return p_BLV[..., : self.config.data.vocab_size].argmax(-1)
