"""JPEG-DLM: a compressor, a flow matching model and a decoding module trained together (Algorithms 1 and 2).

Symbols of the paper: E encoder, C context compressor, C-bar target compressor, f shared network, D decompressor,
W token projection; h features, z_tgt clean target, z_c corrupted view, z_t noisy embedding, w guidance scale.
Shapes: B batch, L tokens, N latents, D latent width, F feature width, V vocabulary.

Options that the paper does not have are modules of `methods.common`; with the paper's presets none of them acts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.known import Known, known_spans
from jpeg_dlm.flow.latent_sampler import Denoise, LatentSampler, Watch
from jpeg_dlm.flow.path import guidance_scale, guided_target, interpolate, per_row, per_sample
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.methods.base import (
    FROZEN,
    GUIDED,
    GUIDED_LONG,
    Batch,
    Latents,
    LatentView,
    Method,
    ParameterGroup,
    Publication,
    copy_tensors,
    linear_ramp,
    linear_time,
    masked_mean,
)
from jpeg_dlm.methods.common.context_blocks import drawn_context
from jpeg_dlm.methods.common.flow_gradient import blurred, latents_with_flow_gradient
from jpeg_dlm.methods.common.flow_times import AdaptiveTimes, drawn_times, weighted
from jpeg_dlm.methods.common.learned_features import LearnedFeatures
from jpeg_dlm.methods.common.regularizers import latent_regularizers
from jpeg_dlm.methods.common.released_layout import released_config
from jpeg_dlm.methods.common.standardization import RunningStandardization
from jpeg_dlm.methods.common.token_decoding import TokenReader, build_token_decoder
from jpeg_dlm.methods.common.word_swaps import swapped
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel, JpegDlmObjective
from jpeg_dlm.nn.dit import Context, DiT
from jpeg_dlm.nn.perceiver import Compressor, Decompressor
from jpeg_dlm.nn.token_decoder import TokenProjection
from jpeg_dlm.rng import RowNoise, chosen_rows


def build_dit(config: Config, context_blocks: int = 0) -> DiT:
    m: JpegDlmModel = config.model
    return DiT(
        m.latent_len, m.latent_dim, m.bottleneck_dim, m.hidden, m.depth, m.heads, m.mlp_ratio, m.freq_dim, m.time_tokens,
        m.sc_tokens, m.mode_tokens, m.dropout, m.denoise_skip, context_blocks * m.latent_len,
        m.codec == "causal",
    )  # fmt: skip


@dataclass(frozen=True)
class Noisy:
    """Rows of the denoise branch; the `chosen` ones, with numbers `rows`, are self-conditioned on s, zero in the others."""

    z_1: Tensor
    z_t: Tensor
    t: Tensor
    s: Tensor
    w: Tensor
    chosen: Tensor
    rows: Tensor
    context: Context | None = None


class JpegDlm(RunningStandardization, Method):
    """The whole system. `encoder` is frozen and may be None for a model that only samples."""

    title = "JPEG-DLM"
    publication = Publication(untold=(), preset="lm1b")
    uses_encoder = True
    uses_context = True
    supports = GUIDED_LONG

    @classmethod
    def needs_encoder(cls, config: Config) -> bool:
        return config.encoder.kind != "none"

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        m: JpegDlmModel = config.model
        o: JpegDlmObjective = config.objective
        vocab, width = config.data.vocab_size, config.encoder.feature_dim
        self.config = config
        self.supports = GUIDED_LONG if m.context_blocks else GUIDED
        self.encoder = encoder
        codec_sizes = (
            config.data.token_len, m.latent_len, width, m.latent_dim, m.bottleneck_dim,
            m.codec_layers, m.codec_heads, m.codec_mlp_ratio, m.dropout, m.position_scale, m.codec == "causal",
        )  # fmt: skip
        self.compressor = Compressor(*codec_sizes)
        self.target = copy.deepcopy(self.compressor).requires_grad_(False)
        self.dit = build_dit(config, m.context_blocks)
        self.predictor = None if m.shared else build_dit(config)  # the 'sep. nets' ablation; decoding has no context
        if self.predictor is not None:
            # The unused heads never run, and distributed training would wait for their gradients forever.
            self.dit.decode_head.requires_grad_(False)
            self.predictor.denoise_head.requires_grad_(False)
        self.decompressor = Decompressor(*codec_sizes)
        self.unembed_proj = nn.Linear(width, m.proj_dim)
        self.lm_head = nn.Linear(m.proj_dim, vocab)
        self.embedding = None if self.needs_encoder(config) else LearnedFeatures(vocab, width)
        self.adaptive = AdaptiveTimes() if o.time_adaptive else None
        self.start_statistics(m.latent_dim)
        self.loss_weights = {
            "jep": o.jep_weight, "flow": o.flow_weight, "feat": o.feat_weight, "ce": o.ce_weight,
            "ce_noisy": o.ce_weight, "sigreg": o.sigreg_weight, "var": o.var_weight, "cov": o.cov_weight,
            "ce_first": o.ce_weight,
        }  # fmt: skip
        self.token_decoder = build_token_decoder(config)  # last, so that the other weights do not depend on it

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the target compressor stays in eval mode, since dropout would corrupt clean latents."""
        super().train(mode)
        self.target.eval()
        return self

    # ------------------------------------------------------------ Algorithm 1

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o = self.config.objective
        h = self.features(batch)  # h <- E(x)
        z_tgt = self.target_latents(h, batch.mask_BL, noise.step)  # z_tgt <- sg(C-bar(h)), standardized
        z_1 = self.flow_latents(z_tgt, h, batch, noise.step)  # z_tgt (paper)

        # decode branch (t = 1), of the same text (paper)
        text = batch
        if o.swap and self.training:
            text = swapped(batch, o.swap, self.config.data.vocab_size, noise)
            h = self.features(text)
            z_tgt = self.target_latents(h, text.mask_BL)
        z_raw = self.compressor(self.corrupted(h, noise), text.mask_BL)  # z_c <- C(h + sigma eps_h)
        z_c = self.standardize(z_raw)

        # denoise branch: t ~ pi, eps ~ N(0, I), z_t <- t z_1 + (1 - t) eps
        noisy = self.noisy_embeddings(z_1, batch, noise)

        zhat_tgt, zhat_1 = self.both_branches(z_c, noisy)  # f(z_c, t = 1) and f(z_t, t)
        hhat = self.decompressed(blurred(zhat_tgt, o.decoder_noise if self.training else 0.0, noise))  # hhat <- D(zhat_tgt)
        terms = {
            "jep": F.mse_loss(zhat_tgt, z_tgt),  # Equation 3
            "feat": masked_mean(((hhat - h.detach()) ** 2).mean(-1), text.mask_BL),  # Equation 5
            **self.reader.losses(hhat, text, noise),  # Equation 4, as `ce`
            "flow": self.flow_loss(zhat_1, self.flow_target(noisy, zhat_1), noisy.t),  # Equation 2
            **latent_regularizers(z_raw if o.reg_space == "raw" else z_c, o, self.config.train.steps, noise),  # appendix
        }
        if o.ce_time_min < 1:  # ablation
            hhat_1 = self.decompressed(zhat_1[: len(h)])
            terms["ce_noisy"] = self.reader.late_loss(hhat_1, noisy.t[: len(h)], batch, noise)
        return terms

    def features(self, batch: Batch) -> Tensor:
        """Return h = E(x), or learned embeddings if there is no encoder."""
        return super().features(batch) if self.embedding is None else self.embedding(batch.tokens_BL)

    @torch.no_grad()
    def target_latents(self, h: Tensor, mask: Tensor | None, step: int | None = None) -> Tensor:
        """Return standardized clean latents of the target compressor; the first training steps also update the statistics."""
        z = self.target(h, mask)
        if self.training and step is not None and step < self.standardize_steps:
            self.update_statistics(z)
        return self.standardize(z)

    def corrupted(self, h: Tensor, noise: RowNoise) -> Tensor:
        """Return h + sigma eps_h."""
        return h + self.config.objective.sigma * noise.normal("feature", *h.shape[1:])

    def flow_latents(self, z_tgt: Tensor, h: Tensor, batch: Batch, step: int) -> Tensor:
        """Return z_tgt, or with `flow_to_compressor` latents that carry the gradient of the flow loss."""
        o = self.config.objective
        if not o.flow_to_compressor:
            return z_tgt
        z_raw = self.compressor(h, batch.mask_BL)
        return latents_with_flow_gradient(o, z_tgt, z_raw, self.standardize(z_raw), step / max(1, self.config.train.steps))

    def noisy_embeddings(self, z_1: Tensor, batch: Batch, noise: RowNoise) -> Noisy:
        """Return `flow_draws` copies of a batch (paper: 1) on the linear path (Equation 1), with their self-conditioning."""
        o = self.config.objective
        z_1, noise = z_1.repeat(o.flow_draws, 1, 1), noise.repeated(o.flow_draws)
        t = drawn_times(o, noise, self.adaptive if self.training else None)  # t ~ pi
        z_t = interpolate(z_1, noise.normal("latent", *z_1.shape[1:]), t)
        w = guidance_scale(noise.uniform("scale"), o.w_min, o.w_max)
        chosen, rows = chosen_rows(noise.coins("self_condition", o.sc_prob), z_t.device)
        context = drawn_context(self.config, batch, self.encode, noise)
        noisy = Noisy(z_1, z_t, t, torch.zeros_like(z_t), w, chosen, rows, context)
        return replace(noisy, s=self.self_condition(noisy))

    @torch.no_grad()
    def self_condition(self, noisy: Noisy) -> Tensor:
        """Return f(z_t, t; s, w) without dropout (ELF) for the chosen rows, and zeros for the others."""
        n, rows, out = noisy, noisy.rows, torch.zeros_like(noisy.z_t)
        if len(rows):
            training = self.dit.training
            self.dit.train(training and not self.config.model.dropout)  # compiled code depends on the mode
            context = None if n.context is None else n.context.of(rows)
            out[rows] = self.dit(n.z_t[rows], n.t[rows], n.s[rows], n.w[rows], context=context)
            self.dit.train(training)
        return out

    def both_branches(self, z_c: Tensor, noisy: Noisy) -> tuple[Tensor, Tensor]:
        """Return (zhat_tgt, zhat_1) = (f(z_c, t=1) in decode mode, f(z_t, t; s, w)), in one pass if the network is shared."""
        n, rows = noisy, len(z_c)  # the decode branch has the w of a row's first draw
        if self.predictor is not None:
            return self.decode_latents(z_c, n.w[:rows]), self.dit(n.z_t, n.t, n.s, n.w, context=n.context)
        out = self.dit(
            torch.cat([z_c, n.z_t]), torch.cat([torch.ones_like(n.t[:rows]), n.t]), torch.cat([torch.zeros_like(z_c), n.s]),
            torch.cat([n.w[:rows], n.w]), decode_rows=rows, context=n.context,
        )  # fmt: skip
        return self.with_residual(out[:rows], z_c), out[rows:]

    def decode_latents(self, z: Tensor, w: Tensor) -> Tensor:
        """Return f(z, t=1) in decode mode, without self-conditioning but with w (released)."""
        network = self.dit if self.predictor is None else self.predictor
        return self.with_residual(network(z, torch.ones_like(w), None, w, decode_rows=len(z)), z)

    def with_residual(self, predicted: Tensor, z: Tensor) -> Tensor:
        """Return zhat = z + head if `decode_residual`, so that an untrained zero head is the identity; not in the paper."""
        return predicted + z if self.config.model.decode_residual else predicted

    def flow_target(self, noisy: Noisy, zhat_1: Tensor) -> Tensor:
        """Return z_1, but the guided target of two predictions for the chosen rows (appendix, Self-Conditioning)."""
        o, n = self.config.objective, noisy
        z_1 = n.z_1 if o.flow_to_compressor_side == "both" else n.z_1.detach()  # z_tgt has no gradient anyway (paper)
        # The second prediction is f(z_t, t; s, w) without dropout; if dropout is 0, that is zhat_1.
        second = self.self_condition(n) if self.config.model.dropout else zhat_1.detach()
        return torch.where(per_row(n.chosen, z_1), guided_target(z_1, second, n.s, n.w), z_1)

    def flow_loss(self, predicted: Tensor, target: Tensor, t: Tensor) -> Tensor:
        """Return the x-loss (paper), or the same error with another weight of each time."""
        error = (predicted - target) ** 2
        if self.adaptive is not None and self.training:
            self.adaptive.update(t, error.mean((1, 2)))
        return weighted(error, t, self.config.objective).mean()

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        """Update theta-bar <- m theta-bar + (1 - m) theta, with m rising linearly (appendix; ramp as in I-JEPA)."""
        o = self.config.objective
        m = linear_ramp(o.target_ema_start, o.target_ema_end, step, total)
        torch._foreach_lerp_(list(self.target.parameters()), list(self.compressor.parameters()), 1 - m)

    # ------------------------------------------------------------ Algorithm 2: evaluations here, loop in `flow.latent_sampler`

    def sample(
        self, sampler: SamplerConfig, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor:  # fmt: skip
        return self.latent_sampler.sample(sampler, noise, watch, given_BL, control)

    @property
    def latent_sampler(self) -> LatentSampler:
        """z ~ N(0, I), then z <- z + (t' - t) v along the grid with x = f(z, t; s, w) and s <- x, then tokens of z."""
        return LatentSampler(
            self.title, self.config, self.device, self.denoiser, self.tokens, self, self.supports, self.logits,
            self.known_latents if self.config.model.codec == "causal" else None,
        )  # fmt: skip

    def denoiser(self, times: Sequence[float], w: float, context: Context | None = None) -> Denoise:
        """Return f(z, t; s, w) in denoise mode, at any times, after a context."""
        return lambda z, t, s: self.dit(z, per_sample(t, z), s, per_sample(w, z), context=context)

    def tokens(self, z: Tensor, w: float, given_BL: Tensor | None = None) -> Tensor:
        """Return the most probable tokens of one decode evaluation; a contextual decoder reads given ids, not its own."""
        return self.greedy(self.decode_latents(z, per_sample(w, z)), given_BL)

    def logits(self, z: Tensor, w: float, given_BL: Tensor | None = None) -> Tensor:
        """Return the logits of one decode evaluation, for guides, differentiable in the latents."""
        return self.reader.logits(self.decompressed(self.decode_latents(z, per_sample(w, z))), given_BL)

    def greedy(self, z: Tensor, given_BL: Tensor | None = None) -> Tensor:
        """Return the most probable tokens of standardized latents straight through D and W."""
        return self.reader.tokens(self.decompressed(z), given_BL)

    def decompressed(self, z: Tensor) -> Tensor:
        """Return hhat = D(z) of standardized latents."""
        return self.decompressor(self.unstandardize(z))

    def project(self, h: Tensor) -> Tensor:
        """Return W(h): logits through two linears and a GELU."""
        return self.reader.W(h)

    @property
    def reader(self) -> TokenReader:
        return TokenReader(TokenProjection(self.unembed_proj, self.lm_head), self.token_decoder, self.config.objective)

    # ------------------------------------------------------------ the codec on its own

    @torch.no_grad()
    def encode(self, batch: Batch) -> Tensor:
        """Encode clean text to standardized latents (B, N, D) with the target compressor."""
        return self.target_latents(self.features(batch), batch.mask_BL)

    def known_latents(self, given_BL: Tensor) -> Known | None:
        """Return the latents of complete spans at the beginning of rows, with a causal codec; None if there are none."""
        return known_spans(given_BL, self.config.model.latent_len, lambda ids, held: self.encode(Batch(ids, held)))

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: SamplerConfig | None = None) -> Tensor:
        """Return the share of real tokens that the decode branch reconstructs from their own latents."""
        return batch.accuracy(self.tokens(self.encode(batch), sampler.w if sampler else 1.0))

    def latent_space(self, batch: Batch) -> Latents:
        logits = None if self.token_decoder is None else self.forced_logits
        return Latents(self.encode(batch), lambda z: self.tokens(z, 1.0), self.predict_once, logits)

    def forced_logits(self, z: Tensor, tokens_BL: Tensor) -> Tensor:
        """Return logits at w = 1 under teacher forcing; the two-pass decoder reads its own tokens."""
        return self.project(self.reader.corrected(self.decompressed(self.decode_latents(z, per_sample(1.0, z))), tokens_BL))

    def latent_view(self) -> LatentView:
        return LatentView(
            self.encode, lambda z_t, ratio: self.predict_once(z_t, linear_time(ratio)), self.greedy,
            branch=lambda z: self.decode_latents(z, per_sample(1.0, z)),
        )  # fmt: skip

    def predict_once(self, z_t: Tensor, t: float) -> Tensor:
        """Return the prediction of clean latents at w = 1, without self-conditioning."""
        return self.denoiser([t], 1.0)(z_t, t, None)

    # ------------------------------------------------------------ files and optimization

    def export_state(self) -> dict[str, Tensor]:
        """Return the released layout, 383 tensors at the paper's sizes; `compressor.*` holds the target compressor."""
        inner = ("target.", "compressor.", FROZEN, "latent_updates", "adaptive.")
        state = self.state_dict()
        kept = {name: t for name, t in state.items() if not name.startswith(inner)}
        return kept | {"compressor." + n.removeprefix("target."): t for n, t in state.items() if n.startswith("target.")}

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        copy_tensors(self.export_state(), tensors, origin)
        self.compressor.load_state_dict(self.target.state_dict())
        self.latent_updates.fill_(1)  # fine-tuning goes on from these statistics: its first batch does not replace them

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        return released_config(tensors, base)

    def parameter_groups(self) -> list[ParameterGroup]:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        # assumed: what makes tokens of features is grouped with the DiT
        with_dit = ("dit.", "predictor.", "unembed_proj.", "lm_head.", "token_decoder.")
        flow = {name: p for name, p in trained.items() if name.startswith(with_dit)}
        codec = {name: p for name, p in trained.items() if name not in flow}
        return [ParameterGroup(name, group) for name, group in (("flow", flow), ("codec", codec)) if group]
