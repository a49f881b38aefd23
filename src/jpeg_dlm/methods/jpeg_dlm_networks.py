"""The networks of JPEG-DLM: how they are built, its codec on its own, and the layout of its files.

What Algorithm 1 does with texts beyond the paper is here too: random words in the decode branch, and blocks of context.
Shapes: B batch, L tokens, N latents, D latent width, K blocks of context, C their latents.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.flow.path import per_sample
from jpeg_dlm.methods.base import (
    FROZEN,
    GUIDE,
    GUIDE_LONG,
    Batch,
    LatentModel,
    Likelihood,
    Method,
    ParameterGroup,
    linear_time,
    rounded_up_share,
)
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS, JpegDlmConfig, JpegDlmModel, JpegDlmObjective
from jpeg_dlm.methods.latent_likelihood import latent_likelihood
from jpeg_dlm.methods.layout import CheckpointSignature, copy_tensors, repeated, shapes_of
from jpeg_dlm.methods.regularizers import VARIANCE_FLOOR, Standardization
from jpeg_dlm.nn.dit import Context, DiT, Memory
from jpeg_dlm.nn.perceiver import Compressor, Decompressor
from jpeg_dlm.nn.token_loss import most_probable
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.rng import RowNoise

STATISTICS_MOMENTUM = 0.99  # of the latent statistics (paper)
SOURCE_DROP = 0.1  # share of rows that are trained without their source (ELF)
CONTEXT_DROP = 0.15  # share of rows that are trained without their context (assumed)


def swap_tokens(batch: Batch, share: float, vocab_size: int, noise: RowNoise) -> Batch:
    """Return the batch with this share of its real tokens drawn uniformly from the vocabulary, without cached features."""
    chance_BL, word_BL = noise.uniform("swap", 2, batch.tokens_BL.shape[1]).unbind(1)
    random_BL = (word_BL * vocab_size).long().clamp_max(vocab_size - 1)
    tokens_BL = torch.where((chance_BL < share) & batch.real_BL, random_BL, batch.tokens_BL)
    return replace(batch, tokens_BL=tokens_BL, features_BLF=None)


class JpegDlmNetworks(Standardization, Method):
    """Compressor C, target compressor C-bar, shared network f, decompressor D and token projection W."""

    latent_updates: Tensor

    title = "JPEG-DLM"
    groups = GROUPS
    signature = CheckpointSignature(not_in_tensors=(), preset="lm1b")
    uses_encoder = True
    uses_context = True
    sources = "beside"
    learns_latents = True
    supports = GUIDE_LONG

    def __init__(self, config: JpegDlmConfig, encoder: nn.Module | None = None) -> None:
        super().__init__()
        m: JpegDlmModel = config.model
        o: JpegDlmObjective = config.objective
        length, width = config.data.token_len, config.encoder.feature_dim
        self.config = config
        self.supports = GUIDE_LONG if m.context_blocks else GUIDE
        reads_features = config.data.source_len and m.source == "features"
        sources = config.data.source_len if reads_features else m.latent_len if config.data.source_len else 0
        self.encoder = encoder
        self.compressor = Compressor(m, length, width)
        self.target = copy.deepcopy(self.compressor).requires_grad_(False)
        self.dit = DiT(m, sources or m.context_blocks * m.latent_len, width if reads_features else 0)
        self.predictor = None if m.shared else DiT(m)  # the 'sep. nets' ablation; decoding has no context
        if self.predictor is not None:
            # The unused heads never run, and distributed training would wait for their gradients forever.
            self.dit.decode_head.requires_grad_(False)
            self.predictor.denoise_head.requires_grad_(False)
        self.decompressor = Decompressor(m, length, width)
        self.unembed_proj = nn.Linear(width, m.proj_dim)
        self.lm_head = nn.Linear(m.proj_dim, config.data.vocab_size)
        self.latent_shape = (m.latent_len, m.latent_dim)
        self.start_statistics(m.latent_dim)
        self.register_buffer("latent_updates", torch.zeros((), dtype=torch.int64))
        self.loss_weights = {"jep": o.jep_weight, "flow": 1.0, "feat": o.feat_weight, "ce": 1.0, "ce_noisy": 1.0}
        self.loss_weights |= {"sigreg": o.sigreg_weight, "var": o.var_weight, "cov": o.cov_weight}

    def parameter_groups(self) -> list[ParameterGroup]:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        # assumed: what makes tokens of features is grouped with the DiT
        with_dit = ("dit.", "predictor.", "unembed_proj.", "lm_head.")
        flow = {name: p for name, p in trained.items() if name.startswith(with_dit)}
        codec = {name: p for name, p in trained.items() if name not in flow}
        return [ParameterGroup(name, group) for name, group in (("flow", flow), ("codec", codec)) if group]

    # ------------------------------------------------------------ the codec

    @torch.no_grad()
    def target_latents(self, h: Tensor, mask: Tensor | None, step: int | None = None) -> Tensor:
        """Return standardized clean latents of the target compressor; the first training steps also update the statistics."""
        z = self.target(h, mask)
        if self.training and step is not None and step < self.standardize_steps:
            self.update_statistics(z)
        return self.standardize(z)

    @property
    def standardize_steps(self) -> int:
        """The number of steps after which the latent statistics freeze."""
        return self.config.objective.standardize_steps or rounded_up_share(self.config.train.steps, 0.1, most=2000)

    @torch.no_grad()
    def update_statistics(self, z: Tensor) -> None:
        """Update the running per-channel mean and variance over all processes; the first batch sets them."""
        z = z.float().flatten(0, 1)
        mean = all_mean(z.mean(0))
        variance = all_mean(((z - mean) ** 2).mean(0))
        # The trainer rejects a step that is not finite, and running statistics would never recover; the device decides.
        finite = (mean + variance).isfinite().all()
        m = STATISTICS_MOMENTUM * (self.latent_updates > 0)
        scale = (m * self.latent_scale**-2 + (1 - m) * variance).clamp_min(VARIANCE_FLOOR).rsqrt()
        self.latent_mean.copy_(torch.where(finite, m * self.latent_mean + (1 - m) * mean, self.latent_mean))
        self.latent_scale.copy_(torch.where(finite, scale, self.latent_scale))
        self.latent_updates += finite

    @torch.no_grad()
    def encode(self, batch: Batch) -> Tensor:
        """Encode clean text to standardized latents (B, N, D) with the target compressor."""
        return self.target_latents(self.features(batch), batch.mask_BL)

    def decode_latents(self, z: Tensor, w: Tensor) -> Tensor:
        """Return f(z, t=1) in decode mode, without self-conditioning but with w (released)."""
        network = self.dit if self.predictor is None else self.predictor
        return network(z, torch.ones_like(w), None, w, decode_rows=len(z))

    def decompressed(self, z: Tensor) -> Tensor:
        """Return hhat = D(z) of standardized latents."""
        return self.decompressor(self.unstandardize(z))

    def project(self, h: Tensor) -> Tensor:
        """Return W(h): logits through two linears and a GELU."""
        return self.lm_head(F.gelu(self.unembed_proj(h)))

    def greedy(self, z: Tensor) -> Tensor:
        """Return the most probable tokens of standardized latents straight through D and W."""
        return most_probable(self.project, self.decompressed(z), self.config.data.vocab_size)

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor:
        """Return the share of real tokens that the decode branch reconstructs from their own latents."""
        z = self.encode(batch)
        return batch.accuracy(self.greedy(self.decode_latents(z, per_sample(sampler.w if sampler else 1.0, z))))

    def latent_model(self, memory: Memory | None = None) -> LatentModel:
        """Return the functions of its latent space, in which predictions may be after a source."""

        def predict(z_t: Tensor, ratio: float) -> Tensor:
            return self.dit(z_t, per_sample(linear_time(ratio), z_t), None, per_sample(1.0, z_t), memory=memory)

        def branch(z: Tensor) -> Tensor:
            return self.decode_latents(z, per_sample(1.0, z))

        def logits(z: Tensor) -> Tensor:
            return self.project(self.decompressed(branch(z)))

        return LatentModel(self.encode, predict, self.greedy, logits, branch=branch)

    @torch.no_grad()
    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Estimate a bound from one code of each row, after its source if it has one."""
        memory = None if batch.source is None else self.dit.read(self.source_context(batch.source))
        return latent_likelihood(self.latent_model(memory), batch, noise)

    # ------------------------------------------------------------ texts beyond the paper

    def decoded_text(self, batch: Batch, h: Tensor, z_tgt: Tensor, noise: RowNoise) -> tuple[Batch, Tensor, Tensor]:
        """Return the text of the decode branch, its features and its latents: the same text, or one with random tokens."""
        if not (self.config.objective.swap and self.training):
            return batch, h, z_tgt
        text = swap_tokens(batch, self.config.objective.swap, self.config.data.vocab_size, noise)
        h = self.features(text)
        return text, h, self.target_latents(h, text.mask_BL)

    def draw_context(self, batch: Batch, noise: RowNoise) -> Memory | None:
        """Return what each draw of a row remembers of its source or of the blocks before: nothing, for a share of them."""
        if batch.source is not None:
            context, share = self.source_context(batch.source), SOURCE_DROP
        elif batch.before is not None:
            context, share = self.blocks_before(batch), CONTEXT_DROP
        else:
            return None
        memory = self.dit.read(context).repeated(noise.copies)
        kept_B1 = (noise.uniform("context_drop") >= share)[:, None]
        return replace(memory, present_BC=memory.present_BC & kept_B1)

    def blocks_before(self, batch: Batch) -> Context:
        """Return the clean latents of the blocks before each row; before the beginning of a text they are zero."""
        assert batch.before is not None and batch.present_BK is not None
        z_BKND = self.encode(batch.before).view(*batch.present_BK.shape, *self.latent_shape)
        z_BCD = torch.where(batch.present_BK[..., None, None], z_BKND, 0.0).flatten(1, 2)
        return Context(z_BCD, torch.ones_like(z_BCD[..., 0], dtype=torch.bool))

    @torch.no_grad()
    def source_context(self, source: Batch) -> Context:
        """Return what the network reads of sources: their features, or their latents."""
        if self.config.model.source == "features":
            return Context(self.features(source), source.real_BL)
        z_BND = self.encode(source)
        return Context(z_BND, torch.ones_like(z_BND[..., 0], dtype=torch.bool))

    # ------------------------------------------------------------ files

    def export_state(self) -> dict[str, Tensor]:
        """Return the released layout, 383 tensors at the paper's sizes; `compressor.*` holds the target compressor."""
        inner = ("target.", "compressor.", FROZEN, "latent_updates")
        state = self.state_dict()
        kept = {name: t for name, t in state.items() if not name.startswith(inner)}
        return kept | {"compressor." + n.removeprefix("target."): t for n, t in state.items() if n.startswith("target.")}

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        copy_tensors(self.export_state(), tensors, origin)
        self.compressor.load_state_dict(self.target.state_dict())
        self.latent_updates.fill_(1)  # fine-tuning goes on from these statistics: its first batch does not replace them

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        shape = shapes_of(tensors, "the released layout")
        latent_len, dim = shape("compressor.latents")
        token_len, _ = shape("decompressor.pos_emb.weight")
        hidden = shape("dit.t_emb_tokens", 3)[2]
        proj_dim, feature_dim = shape("unembed_proj.weight")
        model = replace(
            base.model,
            latent_len=latent_len,
            latent_dim=dim,
            bottleneck_dim=shape("compressor.in_proj.down.weight")[0],
            codec_layers=repeated(tensors, "compressor.layers"),
            codec_heads=dim // shape("compressor.layers.0.attn.q_norm.gamma", 1)[0],
            proj_dim=proj_dim,
            hidden=hidden,
            depth=repeated(tensors, "dit.blocks"),
            heads=hidden // shape("dit.blocks.0.attn.q_norm.weight", 1)[0],
            freq_dim=shape("dit.t_embedder.mlp_0.weight")[1],
            time_tokens=shape("dit.t_emb_tokens", 3)[1],
            sc_tokens=shape("dit.sc_tokens", 3)[1],
            mode_tokens=shape("dit.mode_tokens", 3)[1],
            shared=not any(name.startswith("predictor.") for name in tensors),
        )
        data = replace(base.data, token_len=token_len, vocab_size=shape("lm_head.weight")[0])
        return replace(base, data=data, model=model, encoder=replace(base.encoder, feature_dim=feature_dim))
