"""Stage one of COSMOS: an autoencoder of frozen text features, trained with augmentations for robust latents.

Compressor, decompressor and token projection are those of JPEG-DLM (paper); only the training differs.
Shapes: B batch, L tokens, N latents, D latent width, F feature width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.flow.path import per_row
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.base import Batch, Latents, Trainable, masked_mean
from jpeg_dlm.methods.common.standardization import VARIANCE_FLOOR
from jpeg_dlm.methods.cosmos_config import GROUPS, CosmosModel, CosmosObjective, codec_stage, cosmos_preset
from jpeg_dlm.nn.perceiver import Compressor, Decompressor
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.rng import RowNoise


class Codec(nn.Module):
    """Maps features to latents, latents to features, and features to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m: CosmosModel = config.model
        sizes = (
            config.data.token_len, m.latent_len, config.encoder.feature_dim, m.latent_dim, m.bottleneck_dim,
            m.codec_layers, m.codec_heads, m.codec_mlp_ratio, m.dropout, m.position_scale,
        )  # fmt: skip
        self.compressor = Compressor(*sizes)
        self.decompressor = Decompressor(*sizes)
        self.unembed_proj = nn.Linear(config.encoder.feature_dim, m.proj_dim)
        self.lm_head = nn.Linear(m.proj_dim, config.data.vocab_size)

    def project(self, h: Tensor) -> Tensor:
        """Map features to logits through two linear layers with a GELU between them."""
        return self.lm_head(F.gelu(self.unembed_proj(h)))

    def greedy(self, z_BND: Tensor) -> Tensor:
        """Decode unstandardized latents to the most probable tokens."""
        return self.logits(z_BND).argmax(-1)

    def logits(self, z_BND: Tensor) -> Tensor:
        """Decode unstandardized latents."""
        return self.project(self.decompressor(z_BND))


class CosmosCodec(Trainable):
    """Training of the codec, which does not generate text."""

    title = "COSMOS codec"
    groups = GROUPS
    rate_group = "codec"
    uses_encoder = True

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.encoder = config, encoder
        self.codec = Codec(config)
        self.loss_weights = {"ce": 1.0, "feat": 1.0}  # (COSMOS)

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return codec_stage(cosmos_preset(base))

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o: CosmosObjective = self.config.objective
        h_BLF = self.features(batch)
        z_BND = self.codec.compressor(*self.corrupt(h_BLF, batch.mask_BL, noise))
        z_BND = z_BND * (noise.uniform("latent-mask", *z_BND.shape[1:]) >= o.latent_mask_prob)
        hhat_BLF = self.codec.decompressor(z_BND)
        nll_BL = token_nll(self.codec.project, hhat_BLF, batch.tokens_BL, o.ce_chunk)
        return {
            "ce": masked_mean(nll_BL, batch.mask_BL),
            "feat": masked_mean(((hhat_BLF - h_BLF) ** 2).mean(-1), batch.mask_BL),
        }

    def corrupt(self, h_BLF: Tensor, mask_BL: Tensor | None, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return the augmented features and mask for the compressor.

        The first rows of the global batch have hidden tokens, which are not attended to, the next ones noisy features.
        """
        o: CosmosObjective = self.config.objective
        total, place_B = noise.total or len(noise.rows), noise.places_B
        masked_B = place_B < o.mask_share * total
        noisy_B = ~masked_B & (place_B < (o.mask_share + o.noise_share) * total)
        hidden_BL = masked_B[:, None] & (noise.uniform("token-mask", h_BLF.shape[1]) < o.mask_prob)
        delta = o.noise_scale
        noisy_BLF = delta * h_BLF + (1 - delta**2) ** 0.5 * noise.normal("feature", *h_BLF.shape[1:])
        seen_BL = ~hidden_BL if mask_BL is None else mask_BL & ~hidden_BL
        return torch.where(per_row(noisy_B, h_BLF), noisy_BLF, h_BLF), seen_BL

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own latents, without augmentation."""
        z_BND = self.codec.compressor(self.features(batch), batch.mask_BL)
        return batch.accuracy(self.codec.greedy(z_BND))

    @torch.no_grad()
    def latent_space(self, batch: Batch) -> Latents:
        """Return latents standardized per coordinate with the statistics of this batch; stage two fixes the statistics."""
        z_BND = self.codec.compressor(self.features(batch), batch.mask_BL).float()
        mean_ND = all_mean(z_BND.mean(0))
        std_ND = all_mean((z_BND - mean_ND).square().mean(0)).clamp_min(VARIANCE_FLOOR).sqrt()
        return Latents((z_BND - mean_ND) / std_ND, lambda z: self.codec.greedy(z * std_ND + mean_ND))
