"""COSMOS: diffusion in the latent space of a codec that is trained first and then frozen (2506.21170).

Stage one is `CosmosCodec`, an autoencoder of frozen text features with augmentations for robust latents; its networks are those
of JPEG-DLM (paper). Stage two is `Cosmos`, a variance-preserving diffusion z_t = alpha z_0 + sigma eps, whose time runs from
data (t = 0) to noise (t = 1). (COSMOS) marks values of its public code, (paper) values of the comparison with JPEG-DLM.
Shapes: B batch, L tokens, N latents, D latent width, F feature width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import LARGEST_STEPS, Checks, Config, StepSampler, codec_checks, opt
from jpeg_dlm.flow.guidance import Guidance, guided_decoder, keep_fixed
from jpeg_dlm.flow.path import per_row, per_sample
from jpeg_dlm.flow.sampler import Watch
from jpeg_dlm.methods.base import GUIDE, Batch, LatentModel, Likelihood, Method, Trainable
from jpeg_dlm.methods.discrete import CE_CHUNK
from jpeg_dlm.methods.jpeg_dlm_config import CodecSizes
from jpeg_dlm.methods.latent_likelihood import latent_likelihood
from jpeg_dlm.methods.layout import copy_tensors
from jpeg_dlm.methods.regularizers import VARIANCE_FLOOR, Standardization
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.nn.perceiver import Compressor, Decompressor
from jpeg_dlm.nn.token_loss import most_probable, token_nll
from jpeg_dlm.nn.unet_transformer import UNetTransformer
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

PAPER_PRESETS = ("lm1b", "owt1024", "owt128")
CODEC_CLIP = 10.0  # largest gradient norm of stage one (COSMOS)
MASK_SHARE, MASK_PROB = 0.5, 0.3  # share of rows that hide tokens from the compressor, probability of hiding one (paper)
NOISE_SHARE, DELTA = 0.5, 0.7  # share of rows with features delta * h + sqrt(1 - delta**2) * eps (paper)
LATENT_MASK_PROB = 0.4  # probability of zeroing a coordinate of the latents, not rescaled (paper)
T_MIN, T_END = 1e-5, 0.05  # smallest time in training, and the time at which the reverse SDE ends (COSMOS)
SC_PROB = 0.5  # probability of self-conditioning, one coin per batch (COSMOS)
TAN_D = 5.0  # SNR(t) = [d tan(pi t / 2)]**-2; a larger d adds noise earlier (paper)
BETA_T_MAX = 0.95  # beta is constant from here on, as it has a pole at t = 1 (COSMOS)


@dataclass(frozen=True)
class CosmosModel(CodecSizes):
    """Sizes of the codec, as in JPEG-DLM (paper), and of the diffusion network."""

    hidden: int = opt(768, "H, width of the diffusion network (COSMOS)", ge=1, le=1 << 16)
    depth: int = opt(12, "layers of the diffusion network (COSMOS)", ge=1, le=1024)
    heads: int = opt(12, "attention heads of the diffusion network (COSMOS)", ge=1, le=1024)

    def checks(self, config: Config) -> Checks:
        return codec_checks(self, config.data.token_len)


@dataclass(frozen=True)
class CosmosObjective:
    """Budget of stage one, and memory of its token loss."""

    codec_steps: int = opt(0, "steps of stage one; 0: train.steps, as in stage two (COSMOS: 200k)", ge=0, le=LARGEST_STEPS)
    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)


@dataclass(frozen=True)
class CosmosSampler(StepSampler):
    """Options of the reverse SDE."""

    steps: int = opt(200, "Euler steps of the reverse SDE (paper)", ge=1, le=100_000)
    noise_scale: float = opt(1.0, "factor of all noise; less gives less diverse text (not in the paper)", ge=0, le=1e3)

    frontier: ClassVar[Mapping[str, Sequence[float]]] = {"noise_scale": (0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)}  # assumed

    def label(self) -> str:
        return f"{self.steps} SDE steps"


GROUPS: dict[str, type] = {"model": CosmosModel, "objective": CosmosObjective, "sampler": CosmosSampler}


def codec_stage(config: Config) -> Config:
    """Return the config of stage one of a run of COSMOS."""
    train = config.train
    floor = 0.5 if config.preset in PAPER_PRESETS else 0.0  # (COSMOS: from 2e-4 to 1e-4)
    steps = config.objective.codec_steps or train.steps
    train = replace(train, steps=steps, clip=CODEC_CLIP, schedule="cosine", lr_floor=floor)
    return replace(config, method="cosmos-codec", train=train)


# ---------------------------------------------------------------- stage one


class Codec(nn.Module):
    """Maps features to latents, latents to features, and features to logits; its latents are not standardized."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m: CosmosModel = config.model
        self.compressor = Compressor(m, config.data.token_len, config.encoder.feature_dim)
        self.decompressor = Decompressor(m, config.data.token_len, config.encoder.feature_dim)
        self.unembed_proj = nn.Linear(config.encoder.feature_dim, m.proj_dim)
        self.lm_head = nn.Linear(m.proj_dim, config.data.vocab_size)

    def project(self, h: Tensor) -> Tensor:
        """Map features to logits through two linear layers with a GELU between them."""
        return self.lm_head(F.gelu(self.unembed_proj(h)))

    def greedy(self, z_BND: Tensor) -> Tensor:
        """Decode latents to the most probable tokens."""
        return most_probable(self.project, self.decompressor(z_BND), self.lm_head.out_features)


class CosmosCodec(Trainable):
    """Training of the codec, which does not generate text."""

    title = "COSMOS codec"
    groups = GROUPS
    rate_group = "codec"
    uses_encoder = True
    sources = "beside"  # it is of targets alone

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.encoder = config, encoder
        self.codec = Codec(config)
        self.loss_weights = {"ce": 1.0, "feat": 1.0}  # (COSMOS)

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return codec_stage(Cosmos.adapt(base, "cosmos"))

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        h_BLF = self.features(batch)
        z_BND = self.codec.compressor(*self.corrupt(h_BLF, batch.mask_BL, noise))
        z_BND = z_BND * (noise.uniform("latent-mask", *z_BND.shape[1:]) >= LATENT_MASK_PROB)
        hhat_BLF = self.codec.decompressor(z_BND)
        nll_BL = token_nll(self.codec.project, hhat_BLF, batch.tokens_BL, self.config.objective.ce_chunk)
        return {"ce": batch.token_mean(nll_BL), "feat": batch.token_mean(((hhat_BLF - h_BLF) ** 2).mean(-1))}

    def corrupt(self, h_BLF: Tensor, mask_BL: Tensor | None, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return the augmented features and mask for the compressor.

        The first rows of the global batch have hidden tokens, which are not attended to, the next ones noisy features.
        """
        total, place_B = noise.total or len(noise.rows), noise.places_B
        masked_B = place_B < MASK_SHARE * total
        noisy_B = ~masked_B & (place_B < (MASK_SHARE + NOISE_SHARE) * total)
        hidden_BL = masked_B[:, None] & (noise.uniform("token-mask", h_BLF.shape[1]) < MASK_PROB)
        noisy_BLF = DELTA * h_BLF + (1 - DELTA**2) ** 0.5 * noise.normal("feature", *h_BLF.shape[1:])
        seen_BL = ~hidden_BL if mask_BL is None else mask_BL & ~hidden_BL
        return torch.where(per_row(noisy_B, h_BLF), noisy_BLF, h_BLF), seen_BL

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own latents, without augmentation."""
        return batch.accuracy(self.codec.greedy(self.codec.compressor(self.features(batch), batch.mask_BL)))


# ---------------------------------------------------------------- the tan-d schedule and its reverse SDE


def alpha_sigma(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, sigma) with alpha**2 + sigma**2 = 1, from sine and cosine, as the tangent is undefined at t = 1."""
    data, noise = torch.cos(math.pi / 2 * t), TAN_D * torch.sin(math.pi / 2 * t)
    length = torch.hypot(data, noise)
    return data / length, noise / length


def alpha_sigma_at(t: float) -> tuple[float, float]:
    """Return (alpha, sigma) at one time, computed in float64."""
    alpha, sigma = alpha_sigma(torch.tensor(t, dtype=torch.float64))
    return float(alpha), float(sigma)


def vp_time(ratio: float) -> float:
    """Return the time t at which sigma / alpha = d tan(pi t / 2) equals `ratio`."""
    return 2 / math.pi * math.atan(ratio / TAN_D)


def beta(t: float) -> float:
    """Return -d log(alpha**2) / dt, the rate of the forward SDE dz = -beta z / 2 dt + sqrt(beta) dw."""
    angle = torch.tensor(math.pi / 2 * min(t, BETA_T_MAX), dtype=torch.float64)
    return float(math.pi * TAN_D**2 * torch.tan(angle) / (torch.cos(angle) ** 2 + TAN_D**2 * torch.sin(angle) ** 2))


def reverse_step(z: Tensor, x0: Tensor, t: float, dt: float) -> tuple[Tensor, float]:
    """Return (mean, noise standard deviation) of one Euler step of the reverse SDE from t to t + dt, dt < 0."""
    alpha, sigma = alpha_sigma_at(t)
    rate, score = beta(t), (alpha * x0 - z) / sigma**2
    return z + dt * (-rate / 2 * z - rate * score), math.sqrt(-rate * dt)


# ---------------------------------------------------------------- stage two


class Cosmos(Standardization, Method):
    """The diffusion model and its frozen codec. `encoder` may be None for a model that only samples."""

    title = "COSMOS"
    groups = GROUPS
    uses_encoder = True
    learns_latents = True
    sources = "beside"
    supports = GUIDE

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.encoder = config, encoder
        self.codec = Codec(config).requires_grad_(False)
        self.network = UNetTransformer(config.model, config.encoder.feature_dim if config.data.source_len else 0)
        self.start_statistics(config.model.latent_len, config.model.latent_dim)
        self.loss_weights = {"x0": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Return JPEG-DLM's data, encoder and sizes in a preset, with COSMOS's own recipe at the paper's sizes."""
        model = CosmosModel(**{f.name: getattr(base.model, f.name) for f in fields(CosmosModel)})
        objective, train = CosmosObjective(ce_chunk=base.objective.ce_chunk), base.train
        if base.preset in PAPER_PRESETS:
            objective = replace(objective, codec_steps=200_000)
            batch, accumulation = (64, 1) if base.data.token_len <= 128 else (16, 4)  # 512 rows per step on 8 devices (COSMOS)
            adam = {"lr": 2e-4, "codec_lr": 2e-4, "beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 1e-5, "clip": 1.0}
            budget = {"steps": 500_000, "batch": batch, "accumulation": accumulation}
            train = replace(train, **adam, **budget, warmup=1000, schedule="constant", ema=0.9999)
        encoder = replace(base.encoder, scale="per_channel")  # (COSMOS); also right for layers with another scale than ELF's
        groups = {"model": model, "objective": objective, "sampler": CosmosSampler()}
        return replace(base, method="cosmos", encoder=encoder, train=train, **groups)

    @classmethod
    def stages(cls, config: Config) -> list[Config]:
        return [*super().stages(config), *([] if config.train.init else [codec_stage(config)])]

    @classmethod
    def with_stage_steps(cls, config: Config, steps: int) -> Config:
        return replace(config, objective=replace(config.objective, codec_steps=steps))

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        if not isinstance(stage, CosmosCodec):
            return super().start_from(stage, batches)
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

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        z_0 = self.encode(batch)
        t = T_MIN + (1 - T_MIN) * noise.uniform("time")
        alpha, sigma = alpha_sigma(per_row(t, z_0))
        z_t = alpha * z_0 + sigma * noise.normal("latent", *z_0.shape[1:])
        s, source = None, self.source_context(batch.source)
        if noise.shared_coin("self_condition", SC_PROB):
            with torch.no_grad():
                s = self.network(z_t, t, None, source)
        return {"x0": F.mse_loss(self.network(z_t, t, s, source), z_0)}

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self,
        sampler: CosmosSampler,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        guidance: Guidance | None = None,
        source: Batch | None = None,
    ) -> Tensor:
        """Run Euler steps of the reverse SDE from noise or a text, self-conditioned; the last step adds no noise.

        `watch` sees what the latents themselves decode to.
        """
        context = self.source_context(source)
        guided, draw = guided_decoder(self.logits, fixed_BL, guidance), noise.streams("sample")
        mean, std, x0, begin = torch.zeros(()), 1.0, None, 1.0
        if guidance and (edit := guidance.source):
            begin = vp_time(edit.noise / edit.time) if edit.time else 1.0
            alpha, std = alpha_sigma_at(begin) if begin > T_END else (1.0, 0.0)
            mean = alpha * edit.clean(self.logits)
        times = torch.linspace(begin, T_END, sampler.steps + 1, dtype=torch.float64).tolist() if begin > T_END else []
        for step, (t, after) in enumerate(pairwise(times)):
            z = mean + sampler.noise_scale * std * draw.normal(*self.latent_mean.shape)
            x0 = self.network(z, per_sample(t, z), x0, context)
            alpha, sigma = alpha_sigma_at(t)
            linear_time = alpha / (alpha + sigma)  # at which the linear path has the same ratio of noise and signal
            x0 = guided.nudge(x0, linear_time) if guided else x0
            mean, std = reverse_step(z, x0, t, after - t)
            if watch:
                watch(step, sampler.steps, linear_time, lambda x0=x0: self.greedy(x0))
        tokens = self.greedy(guided.refine(mean) if guided else mean)
        if watch:
            watch(sampler.steps, sampler.steps, 1.0, lambda: tokens)
        return keep_fixed(tokens, fixed_BL)

    # ------------------------------------------------------------ the codec

    def source_context(self, source: Batch | None) -> Context | None:
        """Return the features of sources, which the network reads."""
        return None if source is None else Context(self.features(source), source.real_BL)

    def latents(self, batch: Batch) -> Tensor:
        """Encode clean text to unstandardized latents."""
        return self.codec.compressor(self.features(batch), batch.mask_BL)

    @torch.no_grad()
    def encode(self, batch: Batch) -> Tensor:
        """Encode clean text to standardized latents (B, N, D)."""
        return self.standardize(self.latents(batch))

    def greedy(self, z_standardized: Tensor) -> Tensor:
        """Decode standardized latents to the most probable tokens."""
        return self.codec.greedy(self.unstandardize(z_standardized))

    def logits(self, z_standardized: Tensor) -> Tensor:
        """Decode standardized latents."""
        return self.codec.project(self.codec.decompressor(self.unstandardize(z_standardized)))

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: CosmosSampler | None = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own latents."""
        return batch.accuracy(self.greedy(self.encode(batch)))

    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Estimate a bound from one code of each row, after its source if it has one."""
        return latent_likelihood(self.latent_model(self.source_context(batch.source)), batch, noise)

    def latent_model(self, source: Context | None = None) -> LatentModel:
        """Return the functions of its latent space, in which predictions may read a source; states are variance-preserving."""
        return LatentModel(
            self.encode,
            predict=lambda z_t, ratio: self.network(z_t, per_sample(vp_time(ratio), z_t), None, source),
            decode=self.greedy,
            logits=self.logits,
            noisy=lambda z, eps, ratio: (z + ratio * eps) / math.hypot(1, ratio),
        )
