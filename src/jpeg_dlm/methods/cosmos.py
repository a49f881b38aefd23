"""COSMOS: diffusion in the latent space of a codec that is trained first and then frozen (2506.21170).

This is stage two; stage one is `methods.cosmos_codec`. Time runs from data (t = 0) to noise (t = 1).
Shapes: B batch, L tokens, N latents, D latent width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import Control, Origin, Steering, keep_given, steering
from jpeg_dlm.flow.path import per_row, per_sample
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.base import GUIDED, Batch, Latents, LatentView, Method, Trainable, Watch, copy_tensors
from jpeg_dlm.methods.common.standardization import VARIANCE_FLOOR, Standardization
from jpeg_dlm.methods.cosmos_codec import Codec, CosmosCodec
from jpeg_dlm.methods.cosmos_config import GROUPS, CosmosModel, CosmosObjective, CosmosSampler, codec_stage, cosmos_preset
from jpeg_dlm.nn.unet_transformer import UNetTransformer
from jpeg_dlm.rng import RowNoise


class Cosmos(Standardization, Method):
    """The diffusion model and its frozen codec. `encoder` may be None for a model that only samples."""

    title = "COSMOS"
    groups = GROUPS
    uses_encoder = True
    supports = GUIDED

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        m: CosmosModel = config.model
        self.config, self.encoder = config, encoder
        self.codec = Codec(config).requires_grad_(False)
        self.network = UNetTransformer(m.latent_dim, m.hidden, m.depth, m.heads, m.mlp_ratio)
        self.schedule = TanSchedule(config.objective.schedule_d)
        self.start_statistics(m.latent_len, m.latent_dim)
        self.loss_weights = {"x0": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return cosmos_preset(base)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network; the frozen codec stays in eval mode, without dropout."""
        super().train(mode)
        self.codec.eval()
        return self

    # ------------------------------------------------------------ after stage one

    @classmethod
    def first_stage(cls, config: Config) -> Config:
        return codec_stage(config)

    @classmethod
    def with_stage_steps(cls, config: Config, steps: int) -> Config:
        return replace(config, objective=replace(config.objective, codec_steps=steps))

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        if not isinstance(stage, CosmosCodec):
            raise UsageError(f"COSMOS starts from the codec of its own first stage, not from {stage.title}.")
        copy_tensors(self.codec.state_dict(), stage.codec.state_dict(), "the first stage")
        self.measure(batches)

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> None:
        """Set the mean and scale of every latent coordinate from `batches`, which are the same on every process."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for batch in batches:
            z_BND = self.latents(batch).double().cpu()
            count, total, squares = count + len(z_BND), total + z_BND.sum(0), squares + z_BND.square().sum(0)
        if count < 2:
            raise UsageError("Latent statistics need at least two rows: give more text.")
        mean = total / count
        scale = (squares / count - mean.square()).clamp_min(VARIANCE_FLOOR).rsqrt()
        for buffer, value in ((self.latent_mean, mean), (self.latent_scale, scale)):
            buffer.copy_(all_mean(value.to(buffer)))  # already equal up to rounding on different devices

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o: CosmosObjective = self.config.objective
        z_0 = self.encode(batch)
        t = o.t_min + (1 - o.t_min) * noise.uniform("time")
        alpha, sigma = self.schedule.alpha_sigma(per_row(t, z_0))
        z_t = alpha * z_0 + sigma * noise.normal("latent", *z_0.shape[1:])
        s = None
        if noise.shared_coin("self_condition", o.sc_prob):
            with torch.no_grad():
                s = self.predict(z_t, t)
        return {"x0": F.mse_loss(self.predict(z_t, t, s), z_0)}

    def predict(self, z_t: Tensor, t: Tensor, s: Tensor | None = None) -> Tensor:
        """Predict the clean standardized latents from z_t at times t (B), given an earlier prediction s (None: zeros)."""
        return self.network(z_t, t, s)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: CosmosSampler, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor:  # fmt: skip
        """Write rows; `watch` sees what the latents themselves decode to."""
        steer = steering(self.logits, given_BL, control)
        z = self.sample_latents(sampler, noise, watch, steer, control.origin if control else None)
        tokens = self.greedy(steer.refined(z) if steer else z)
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: tokens)
        return keep_given(tokens, given_BL)

    @torch.no_grad()
    def sample_latents(
        self, sampler: CosmosSampler, noise: RowNoise, watch: Watch | None = None, steer: Steering | None = None,
        origin: Origin | None = None,
    ) -> Tensor:  # fmt: skip
        """Run Euler steps of the reverse SDE from noise or an origin, self-conditioned; the last step adds no noise."""
        draw, shape, begin = noise.streams("sample"), self.latent_mean.shape, 1.0
        mean, std, x0 = torch.zeros(()), 1.0, None
        if origin:
            mean = origin.clean(self.logits)
            begin = self.schedule.time(origin.noise / origin.time) if origin.time else 1.0
            if begin <= sampler.t_end:
                return mean
            alpha, std = map(float, self.schedule.alpha_sigma(torch.tensor(begin, dtype=torch.float64)))
            mean = alpha * mean
        times = torch.linspace(begin, sampler.t_end, sampler.steps + 1, dtype=torch.float64).tolist()
        for step, (t, after) in enumerate(pairwise(times)):
            z = mean + std * draw.normal(*shape)
            x0 = self.predict(z, torch.full((len(z),), t, device=z.device), x0)
            if steer:
                x0 = steer.moved(x0, self.linear_time(t))
            mean, std = self.schedule.reverse_step(z, x0, t, after - t)
            if watch:
                watch(step, sampler.steps, self.linear_time(t), lambda x0=x0: self.greedy(x0))
        return x0 if x0 is not None and sampler.result == "x0" else mean

    def linear_time(self, t: float) -> float:
        """Return the time of the linear path at which noise and signal have the ratio that they have here at t."""
        alpha, sigma = self.schedule.alpha_sigma(torch.tensor(t, dtype=torch.float64))
        return float(alpha / (alpha + sigma))

    # ------------------------------------------------------------ the codec

    def latents(self, batch: Batch) -> Tensor:
        """Encode clean text to unstandardized latents."""
        return self.codec.compressor(self.features(batch), batch.mask_BL)

    @torch.no_grad()
    def encode(self, batch: Batch) -> Tensor:
        """Encode clean text to standardized latents (B, N, D)."""
        return self.standardize(self.latents(batch))

    def greedy(self, z_standardized: Tensor) -> Tensor:
        """Decode standardized latents to the most probable tokens."""
        return self.logits(z_standardized).argmax(-1)

    def logits(self, z_standardized: Tensor) -> Tensor:
        """Decode standardized latents."""
        return self.codec.logits(self.unstandardize(z_standardized))

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: CosmosSampler | None = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own latents."""
        return batch.accuracy(self.greedy(self.encode(batch)))

    def latent_space(self, batch: Batch) -> Latents:
        def predict(z_t: Tensor, t: float) -> Tensor:
            """Predict from the state of COSMOS's own path with the same SNR."""
            return self.predict_once(z_t / math.hypot(t, 1 - t), (1 - t) / t)

        return Latents(self.encode(batch), self.greedy, predict)

    def latent_view(self) -> LatentView:
        """Return the functions that studies use; states are variance-preserving."""
        return LatentView(
            self.encode, self.predict_once, self.greedy, noisy=lambda z, eps, ratio: (z + ratio * eps) / math.hypot(1, ratio)
        )

    def predict_once(self, z_t: Tensor, ratio: float) -> Tensor:
        """Predict the clean latents behind a state with this sigma / alpha, with zero self-conditioning (paper)."""
        return self.predict(z_t, per_sample(self.schedule.time(ratio), z_t))
