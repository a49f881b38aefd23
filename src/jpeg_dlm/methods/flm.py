"""FLM: flow matching on one-hot tokens.

The state of a row has a vector of vocabulary size per token on the linear path z_t = (1 - t) eps + t onehot(x). Times are
drawn, passed to the network and stepped in tau, the share of tokens that can be decoded from the state (see `argmax_noise`).
The network predicts p = E[onehot(x) | z_t] as a distribution over tokens, so the velocity is (p - z_t) / (1 - t).
(FLM) marks the authors' code. Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Config, opt
from jpeg_dlm.flow.path import per_row
from jpeg_dlm.methods.argmax_noise import TimeMap
from jpeg_dlm.methods.base import Batch, CheckpointSignature, Watch
from jpeg_dlm.methods.discrete import CE_CHUNK, DIFFUSION_TENSORS, DditMethod, DditSampler, ExtendedDdit, with_source
from jpeg_dlm.nn.ddit import DDiT
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.util.rng import RowNoise

SOFTCAP = 50.0  # attention scores are squashed to (-50, 50) (FLM)
TIME_FLOOR = 1e-5  # added to 1 - t (FLM)

EXACT = DditSampler()  # with the network's own distributions


@dataclass(frozen=True)
class FlmObjective:
    """Cross-entropy at random times."""

    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)


class Flm(DditMethod):
    """The whole system."""

    title = "FLM"
    signature = CheckpointSignature(("flm",), tensors=DIFFUSION_TENSORS)
    groups = {"model": ExtendedDdit, "objective": FlmObjective, "sampler": DditSampler}

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.ids = config.data.vocab_size + config.model.extra_ids
        self.backbone = DDiT(self.ids, config.model, SOFTCAP)
        self.times = TimeMap(self.ids)
        self.loss_weights = {"ce": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        config = super().adapt(base, name)
        if base.preset != "smoke":
            return config
        # Twice the preset's rate learns more in a short run (measured), perhaps as it suppresses noise of other tokens sooner.
        return replace(config, train=replace(config.train, lr=2 * config.train.lr))

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        tau_B = noise.stratified("time").float()
        z_BLV = self.noisy(batch.tokens_BL, self.times(tau_B), noise)
        z_BLV = with_source(z_BLV, F.one_hot(batch.tokens_BL[:, : batch.source_len], self.ids).to(z_BLV))
        states = self.backbone.states(z_BLV, tau_B)
        nll_BL = token_nll(self.backbone.head, states, batch.tokens_BL, self.config.objective.ce_chunk)
        return {"ce": batch.token_mean(nll_BL)}

    def noisy(self, tokens_BL: Tensor, t_B: Tensor, noise: RowNoise) -> Tensor:
        """Return z_t (B, L, V), computed in place in the noise tensor, the largest tensor of a step."""
        z = noise.normal("state", tokens_BL.shape[1], self.ids)
        t = per_row(t_B.to(z.dtype), z)
        return z.mul_(1 - t).scatter_add_(-1, tokens_BL[..., None], t.expand(*tokens_BL.shape, 1))

    def denoise(self, z_BLV: Tensor, tau_B: Tensor, sampler: DditSampler = EXACT) -> Tensor:
        """Return p (B, L, V), a distribution per token."""
        return sampler.sharpened(self.backbone(z_BLV, tau_B).float()).softmax(-1)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: DditSampler, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None
    ) -> Tensor:
        """Integrate from noise to tokens, with given ones certain and those of a source never noisy."""
        z, steps = noise.normal("sample", self.config.data.row_len, self.ids), sampler.steps
        taus = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=z.device)
        t = self.times(taus)
        p, source_len = z, self.config.data.source_len
        if fixed_BL is not None:  # a step is a mixture of z and p, both of which are then certain of the source
            z = with_source(z, F.one_hot(fixed_BL[:, :source_len], self.ids).to(z))
        for k in range(steps):
            p = self.denoise(z, taus[k].expand(len(z)).to(z.dtype), sampler)
            if fixed_BL is not None:
                certain = F.one_hot(fixed_BL.clamp_min(0), p.shape[-1]).to(p)
                p = torch.where((fixed_BL >= 0)[..., None], certain, p)
            if watch:
                watch(k, steps, taus[k].item(), lambda p=p: self.most_probable(p))
            if k + 1 < steps:  # z + (u - t) (p - z) / (1 - t) is a mixture of z and p; the last step would return p
                z = torch.lerp(z, p, ((t[k + 1] - t[k]) / (1 - t[k] + TIME_FLOOR)).to(z.dtype))
        tokens = self.most_probable(p)
        if watch:
            watch(steps, steps, 1.0, lambda: tokens)
        return tokens

    def most_probable(self, p_BLV: Tensor) -> Tensor:
        """Return the most probable of the tokenizer's ids."""
        return p_BLV[..., : self.config.data.vocab_size].argmax(-1)
