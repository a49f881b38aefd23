"""ELF (embedded language flows): flow matching on full-length features of a frozen encoder, one latent per token.

JPEG-DLM's DiT derives from this network, which has one head for the clean features x and a factored unembedding to
tokens. Each row of a batch trains one of two modes: denoise (x from the noisy z_t) or decode (tokens from features with a
different amount of noise per token). (ELF) marks values of its paper and code, (paper) those of the comparison.
Shapes: B batch, L tokens, F feature width, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, TrainConfig, opt
from jpeg_dlm.flow.guidance import Guidance
from jpeg_dlm.flow.path import SC_PROB, guidance_scale, guided_target, logit_normal, per_row, per_sample
from jpeg_dlm.flow.sampler import Watch, sample
from jpeg_dlm.methods.base import FROZEN, GUIDE, Batch, LatentModel, Likelihood, Method, linear_time
from jpeg_dlm.methods.discrete import CE_CHUNK
from jpeg_dlm.methods.elf_pairs import PairNetworks, PairRows
from jpeg_dlm.methods.jpeg_dlm_config import DitSizes, SamplerConfig
from jpeg_dlm.methods.jpeg_dlm_networks import SOURCE_DROP
from jpeg_dlm.methods.latent_likelihood import latent_likelihood
from jpeg_dlm.methods.layout import CheckpointSignature, repeated, shapes_of
from jpeg_dlm.nn.dit import Head, LatentTransformer
from jpeg_dlm.nn.layers import fp32_island
from jpeg_dlm.nn.token_loss import most_probable, token_nll
from jpeg_dlm.util.rng import RowNoise, chosen_rows

DECODE_PROB = 0.2  # share of rows in decode mode (ELF)
DECODE_MEAN, DECODE_STD = 0.8, 0.8  # of logit(lambda), the share of clean features in a token to decode (ELF)
V_FLOOR = 0.05  # smallest 1 - t in a velocity (ELF)

# Half an epoch of 512 rows per step: on OpenWebText 95,000 / 5 / 2 (ELF), on OWT-128 eight times as many shorter rows, and on
# LM1B about 8.3 M rows of 128 (assumed).
WARMUP = {"lm1b": 8_100, "owt1024": 9_500, "owt128": 76_000}
PUBLISHED_FEATURES = 512  # channels of T5-small
SMALL_STEPS = 32  # least solver steps of small presets: bigram perplexity in nats 8.6, with 8 steps 9.0 (measured)


@dataclass(frozen=True)
class ElfObjective:
    """Options of the two modes, their noise, and self-conditioning."""

    noise_scale: float = opt(2.0, "deviation of the noise at t = 0 (ELF)", gt=0, le=1e3)
    time_mean: float = opt(-1.5, "mean of logit(t) (ELF)", ge=-100, le=100)
    time_std: float = opt(0.8, "deviation of logit(t) (ELF)", gt=0, le=100)
    decode_noise_scale: float = opt(5.0, "deviation of the decode mode's noise (ELF: 5, conditional tasks 1)", ge=0, le=1e3)
    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)

    def checks(self, config: Config) -> Checks:
        d = config.data
        changing = "data.cache_features needs features that stay, and ELF's of a target change with its source: leave it out"
        return [(not (d.cache_features and d.source_len), changing)]


class ElfNetwork(LatentTransformer):
    """f(z, t; s, w): predicts clean features, and hidden states that `logits` maps to tokens."""

    def __init__(self, config: Config) -> None:
        m, width = config.model, config.encoder.feature_dim
        super().__init__(m, config.data.row_len, width)
        self.denoise_head = Head(m.hidden, width)
        self.proj = nn.Linear(m.hidden, m.proj_dim)
        self.unembed = nn.Linear(m.proj_dim, config.data.vocab_size)
        self.initialize()

    def forward(self, z_BLF: Tensor, t_B: Tensor, s_BLF: Tensor | None, w_B: Tensor, decode_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x_hat, hidden states); rows with `decode_B` are in decode mode."""
        hidden_BLH = self.states(z_BLF, t_B, s_BLF, w_B, decode_B)
        with fp32_island(hidden_BLH):
            return self.denoise_head(hidden_BLH), hidden_BLH

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the factored unembedding: two linear layers with a GELU (tanh, unlike JPEG-DLM's)."""
        return self.unembed(F.gelu(self.proj(hidden), approximate="tanh"))


class Elf(Method):
    """The whole system. `encoder` is frozen and may be None for a model that only samples."""

    title = "ELF"
    signature = CheckpointSignature(tensors=("unembed_kernel",), not_in_tensors=("data.token_len",))
    groups = {"model": DitSizes, "objective": ElfObjective, "sampler": SamplerConfig}
    uses_encoder = True
    sources = "beside"
    supports = GUIDE

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.dit = ElfNetwork(config)
        self.loss_weights = {"flow": 1.0, "ce": 1.0}
        self.latent_shape = (config.data.row_len, config.encoder.feature_dim)
        self.noise_scale, self.v_floor = config.objective.noise_scale, V_FLOOR

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Return a preset's encoder, tokens and DiT, with ELF's recipe at the paper's sizes or a small preset's budget."""
        model = DitSizes(**{f.name: getattr(base.model, f.name) for f in fields(DitSizes)})
        sampler = SamplerConfig(base.sampler.steps, gamma=gamma_for(base.sampler.steps), grid="random")  # (ELF; w is 3)
        objective = ElfObjective(ce_chunk=base.objective.ce_chunk)
        if base.preset in WARMUP:
            train = paper_training(base)
        else:  # better texts than AdamW at the preset's rate and noise of scale 2 (measured on smoke)
            train = replace(base.train, optimizer="muon", lr=1e-2, weight_decay=0.0)
            # Narrow features bear less noise: matched with their own noisy versions, 73% of the tokens of a 128-wide encoder
            # are identified at the published 5, and 90% at 2.5, as with 512 independent channels at 5 (measured).
            decode_noise = objective.decode_noise_scale * (base.encoder.feature_dim / PUBLISHED_FEATURES) ** 0.5
            objective = replace(objective, noise_scale=1.0, decode_noise_scale=decode_noise)
            # With a few steps, random times leave gaps, and samples were worse than shuffled text (measured).
            steps = max(SMALL_STEPS, base.sampler.steps)
            sampler = SamplerConfig(steps, gamma=gamma_for(steps), grid="uniform")
        return replace(base, method="elf", model=model, objective=objective, sampler=sampler, train=train)

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Return `flow` and `ce`, each summed over the rows of its mode and divided by the tokens of all rows (ELF)."""
        o = self.config.objective
        decodes = noise.coins("mode", DECODE_PROB)
        decode, rows = chosen_rows(decodes, noise.device)
        if batch.source is None:
            x, clean = self.features(batch), None
        else:
            pairs = PairRows.of(batch)
            x = self.pair_features(pairs, noise.uniform("context_drop") < SOURCE_DROP)
            batch = Batch(pairs.tokens_BJ, ~pairs.source_BJ)
            clean = (pairs.source_BJ & ~decode[:, None])[..., None]  # in decode mode sources are noisy too (ELF)
        t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
        z = restored(self.corrupted(x, t, decode, noise), x, clean)
        w = guidance_scale(noise.uniform("scale"))
        _, conditioned = chosen_rows(~decodes & noise.coins("self_condition", SC_PROB), x.device)
        s, target = self.self_condition(x, z, t, w, conditioned, clean)

        xhat, hidden = self.dit(z, torch.where(decode, 1.0, t), s, w, decode)

        # The error of the velocity (x - z) / (1 - t): z cancels.
        error = ((xhat - target) ** 2).mean(-1) / ((1 - t).clamp_min(V_FLOOR) ** 2)[:, None]
        # If no row decodes, the unembedding gets an empty input but stays in the graph, so its gradient exists.
        nll = torch.zeros_like(error)
        nll[rows] = token_nll(self.dit.logits, hidden[rows], batch.tokens_BL[rows], o.ce_chunk)
        return {"flow": batch.token_mean(error * ~decode[:, None]), "ce": batch.token_mean(nll)}

    def pair_features(self, pairs: PairRows, dropped: Tensor) -> Tensor:
        """Return features of sources and targets; of a dropped source they are zero, and the target's do not depend on it."""
        x = self.features(Batch(pairs.tokens_BJ, pairs.attention(dropped)))
        return torch.where((pairs.source_BJ & dropped[:, None])[..., None], 0.0, x)

    def corrupted(self, x: Tensor, t: Tensor, decode: Tensor, noise: RowNoise) -> Tensor:
        """Return the network's input: one time per row in denoise mode, one share lambda per token in decode mode."""
        o = self.config.objective
        share = logit_normal(noise.normal("decode_share", x.shape[1]), DECODE_MEAN, DECODE_STD)
        clean = torch.where(decode[:, None], share, t[:, None])[..., None]
        scale = torch.where(decode, o.decode_noise_scale, o.noise_scale)
        return clean * x + (1 - clean) * per_row(scale, x) * noise.normal("latent", *x.shape[1:])

    @torch.no_grad()
    def self_condition(
        self, x: Tensor, z: Tensor, t: Tensor, w: Tensor, rows: Tensor, clean: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (s, target): the first prediction and the guided target for the chosen rows, zeros and x for the others."""
        s, target = restored(torch.zeros_like(x), x, clean), x.clone()
        if len(rows):
            denoise = torch.zeros_like(rows, dtype=torch.bool)
            first, _ = self.dit(z[rows], t[rows], s[rows], w[rows], denoise)
            first = restored(first, x[rows], None if clean is None else clean[rows])
            second, _ = self.dit(z[rows], t[rows], first, w[rows], denoise)
            s[rows], target[rows] = first, guided_target(x[rows], second, first, w[rows])
        return s, target

    # ------------------------------------------------------------ sampling

    def sample(
        self,
        sampler: SamplerConfig,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        guidance: Guidance | None = None,
        source: Batch | None = None,
    ) -> Tensor:
        networks = self if source is None else PairNetworks(self, source, sampler.source_scale)
        return sample(networks, sampler, noise, watch, fixed_BL, guidance)

    def denoise(self, z: Tensor, t: float, s: Tensor | None, w: float) -> Tensor:
        """Predict clean features from the state at time t."""
        w_B = per_sample(w, z)
        return self.dit(z, torch.full_like(w_B, t), s, w_B, torch.zeros_like(w_B, dtype=torch.bool))[0]

    def decoded_states(self, z: Tensor, w: float) -> Tensor:
        """Return the hidden states of the decode evaluation at t = 1, without self-conditioning."""
        w_B = per_sample(w, z)
        return self.dit(z, torch.ones_like(w_B), None, w_B, torch.ones_like(w_B, dtype=torch.bool))[1]

    def logits(self, z: Tensor, w: float = 1.0) -> Tensor:
        return self.dit.logits(self.decoded_states(z, w))

    def tokens(self, z: Tensor, w: float = 1.0) -> Tensor:
        """Return the most probable token at every position."""
        return most_probable(self.dit.logits, self.decoded_states(z, w), self.config.data.vocab_size)

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: SamplerConfig | None = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own clean features."""
        if batch.source is None:
            return batch.accuracy(self.tokens(self.features(batch)))
        x = self.pair_features(PairRows.of(batch), torch.zeros_like(batch.real_BL[:, 0]))
        return batch.accuracy(PairNetworks(self, batch.source, 1.0).tokens(x, 1.0))

    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood | None:
        """Estimate a bound from one code of each row; there is none of pairs."""
        model = self.latent_model()
        return None if model is None else latent_likelihood(model, batch, noise)

    def latent_model(self) -> LatentModel | None:
        """Return the functions that studies use, on the encoder's features as latents (not in the paper); not of pairs."""
        if self.config.data.source_len:
            return None

        def time(ratio: float) -> float:
            return linear_time(ratio / self.config.objective.noise_scale)  # the noise has this deviation at t = 0

        return LatentModel(
            self.features,
            predict=lambda z_t, ratio: self.denoise(z_t, time(ratio), None, 1.0),
            decode=self.tokens,
            logits=self.logits,
            noisy=lambda z, eps, ratio: time(ratio) * (z + ratio * eps),
        )

    # ------------------------------------------------------------ files and optimization

    def export_state(self) -> dict[str, Tensor]:
        """Return the tensors in the published layout: flat names, and the matrices of the unembedding as (in, out): views."""
        return {
            published_name(name): t.mT if name in ("dit.proj.weight", "dit.unembed.weight") else t
            for name, t in self.state_dict().items()
            if not name.startswith(FROZEN)
        }

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return the config of a published checkpoint (`ema_params1` of the torch files); row length and MLP ratio stay."""
        shape = shapes_of(tensors, "ELF's layout")
        hidden, proj_dim = shape("proj_kernel")
        bottleneck_dim, feature_dim = shape("text_proj.proj1.weight")
        model = replace(
            base.model,
            bottleneck_dim=bottleneck_dim,
            proj_dim=proj_dim,
            hidden=hidden,
            depth=repeated(tensors, "blocks"),
            heads=hidden // shape("blocks.0.attn.q_norm.weight", 1)[0],
            freq_dim=shape("t_embedder.mlp_0.weight")[1],
            time_tokens=shape("t_emb_tokens", 3)[1],
            sc_tokens=shape("self_cond_cfg_tokens", 3)[1],
            mode_tokens=shape("mode_tokens", 3)[1],
        )
        data = replace(base.data, vocab_size=shape("unembed_kernel")[1])
        return replace(base, data=data, model=model, encoder=replace(base.encoder, feature_dim=feature_dim))


PUBLISHED = {
    "in_proj.": "text_proj.",
    "sc_embedder.": "self_cond_cfg_embedder.",
    "sc_tokens": "self_cond_cfg_tokens",
    "denoise_head.": "final_layer.",
    "proj.weight": "proj_kernel",
    "proj.bias": "proj_bias",
    "unembed.weight": "unembed_kernel",
    "unembed.bias": "unembed_bias",
}


def published_name(name: str) -> str:
    """Return the name of one of our tensors in ELF's checkpoints."""
    name = name.removeprefix("dit.")
    for ours, theirs in PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def restored(z: Tensor, x: Tensor, clean: Tensor | None) -> Tensor:
    """Return z with the features x at clean positions, if there are any."""
    return z if clean is None else torch.where(clean, x, z)


# ---------------------------------------------------------------- recipes


def gamma_for(steps: int) -> float:
    """Return ELF's gamma for a number of steps, or for the next lower number that ELF lists."""
    return 2.0 if steps < 32 else 1.5 if steps < 64 else 1.0


def paper_training(base: Config) -> TrainConfig:
    """Return ELF's recipe: 512 rows per step, 5 epochs, Muon at 1e-3 * 512/256, constant after warm-up, no decay.

    ELF has published no settings for LM1B and OWT-128: those of OpenWebText are assumed for them.
    """
    batch, accumulation = (16, 4) if base.preset == "owt1024" else (64, 1)  # on 8 devices
    budget = {"epochs": 5, "batch": batch, "accumulation": accumulation, "devices": 8, "warmup": WARMUP[base.preset]}
    muon = {"optimizer": "muon", "lr": 2e-3, "weight_decay": 0.0, "schedule": "constant"}
    return replace(base.train, **budget, **muon, ema=0.9999, ema_warmup=False)
