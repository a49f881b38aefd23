"""LDLM: joint training in which the flow loss also trains the compressor (arXiv:2605.07933), on JPEG-DLM's networks.

The paper stops this gradient, since latents collapsed. LDLM lets it pass, with four remedies: the gradient warms up, the
token loss does not train the codec, the decoder sees noisy latents, and times adapt to the loss. There is no public code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config, opt
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm, Noisy
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS, JpegDlmModel, JpegDlmObjective, SamplerConfig
from jpeg_dlm.methods.regularizers import latent_regularizers
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.rng import RowNoise

STEEPNESS, CENTER = 10.0, 0.8  # of the warm-up's sigmoid (after LDLM)
BINS, MEMORY, UNIFORM = 100, 0.99, 0.1  # bins of time, momentum of their loss, share of uniform times (assumed)


@dataclass(frozen=True)
class LdlmObjective(JpegDlmObjective):
    """Losses of JPEG-DLM, and the gradient of the flow loss in the compressor."""

    flow_gradient: float = opt(1.0, "weight of the flow loss's gradient in the compressor (LDLM)", ge=0, le=1e6)
    gradient_warmup: float = opt(0.5, "share of training over which that weight rises along a sigmoid (assumed)", ge=0, le=1)
    decoder_noise: float = opt(0.5, "deviation of noise before D in training (LDLM: 3; sigma corrupts here too)", ge=0, le=1000)


def warmup_factor(progress: float, share: float) -> float:
    """Return the factor of the gradient after `progress` of training: a sigmoid from 0 to 1 over the first `share`."""
    if progress >= share:
        return 1.0
    at, start, end = (1 / (1 + math.exp(-STEEPNESS * (x - CENTER))) for x in (progress / share, 0.0, 1.0))
    return (at - start) / (end - start)


class Ldlm(JpegDlm):
    """JPEG-DLM with the flow gradient in the compressor and LDLM's remedies."""

    title = "LDLM"
    signature = None
    groups = {**GROUPS, "objective": LdlmObjective}
    config: Config[JpegDlmModel, LdlmObjective, SamplerConfig]
    time_loss_K: Tensor

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__(config, encoder)
        self.register_buffer("time_loss_K", 1 - (torch.arange(BINS) + 0.5) / BINS)  # a constant slope: uniform times

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return replace(base, method=name, objective=LdlmObjective(**vars(base.objective)))

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Return the terms of Algorithm 1; what differs is marked."""
        o, h = self.config.objective, self.features(batch)
        z_tgt = self.target_latents(h, batch.mask_BL, noise.step)
        z_1 = self.standardize(self.compressor(h, batch.mask_BL))  # the context compressor's latents, with its gradient
        factor = o.flow_gradient * warmup_factor(noise.step / max(1, self.config.train.steps), o.gradient_warmup)
        noisy = self.noisy_embeddings(z_1.detach() + factor * (z_1 - z_1.detach()), batch, noise)
        text, h, z_tgt = self.decoded_text(batch, h, z_tgt, noise)
        z_c = self.compressor(self.corrupted(h, noise), text.mask_BL)
        zhat_tgt, zhat_1 = self.both_branches(self.standardize(z_c), noisy)
        blur = o.decoder_noise * noise.normal("decoder", *zhat_tgt.shape[1:]) if self.training else 0.0
        hhat = self.decompressed(zhat_tgt + blur)  # noisy latents
        return {
            "jep": F.mse_loss(zhat_tgt, z_tgt),
            "feat": text.token_mean((hhat - h.detach()).square().mean(-1)),
            "ce": self.token_loss(hhat.detach(), text),  # trains W alone
            "flow": self.flow_loss(zhat_1, noisy),
            **latent_regularizers(z_c, o, self.config.train.steps, noise),
        }

    def draw_times(self, noise: RowNoise) -> Tensor:
        """Draw times in training so that the flow loss is linear in their quantile: dense where it falls steeply."""
        if not self.training:
            return super().draw_times(noise)
        padded = torch.cat([self.time_loss_K[:1], self.time_loss_K, self.time_loss_K[-1:]])
        slope_K = (padded[:-2] - padded[2:]).clamp_min(0)
        p_K = UNIFORM / BINS + (1 - UNIFORM) * slope_K / slope_K.sum().clamp_min(torch.finfo(slope_K.dtype).tiny)
        above_K, uniform = p_K.cumsum(0), noise.uniform("time").contiguous()
        k = torch.searchsorted(above_K, uniform, right=True).clamp_max(BINS - 1)
        within = ((uniform - above_K[k]) / p_K[k] + 1).clamp(0, 1)
        return ((k + within) / BINS).clamp_max(1 - 0.5 / BINS)

    def flow_loss(self, zhat_1: Tensor, noisy: Noisy) -> Tensor:
        """Return the loss, and in training move the loss of each bin of times toward the mean error of all processes."""
        if self.training:
            with torch.no_grad():
                error_B, k = (zhat_1 - noisy.z_1).square().mean((1, 2)), (noisy.t * BINS).long().clamp(0, BINS - 1)
                sums = error_B.new_zeros(2, BINS).index_add_(1, k, torch.stack([error_B, torch.ones_like(error_B)]))
                total_K, count_K = all_mean(sums)
                mean_K = total_K / count_K  # not finite where no time fell, or where the error is not
                self.time_loss_K.copy_(torch.where(mean_K.isfinite(), mean_K.lerp(self.time_loss_K, MEMORY), self.time_loss_K))
        return super().flow_loss(zhat_1, noisy)

    def export_state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().export_state().items() if name != "time_loss_K"}
