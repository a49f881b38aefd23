"""JPEG-DLM: a compressor, a flow matching model and a decoding module trained together (Algorithms 1 and 2).

Symbols of the paper: E encoder, C context compressor, C-bar target compressor, f shared network, D decompressor,
W token projection; h features, z_tgt clean target, z_c corrupted view, z_t noisy embedding, w guidance scale.
Shapes: B batch, L tokens, N latents, D latent width, F feature width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.known import Known
from jpeg_dlm.flow.latent_sampler import Denoise, LatentSampler, Watch
from jpeg_dlm.flow.path import guidance_scale, guided_target, interpolate, logit_normal, mixed_times, per_row, per_sample
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.machine.collectives import all_mean
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
    rounded_up_share,
)
from jpeg_dlm.methods.common.flow_gradient import AdaptiveTimes, batch_standardized, warmup_factor, with_gradient_of
from jpeg_dlm.methods.common.regularizers import sigreg, unit_directions, variance_covariance
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel, JpegDlmObjective
from jpeg_dlm.methods.token_decoding import build_token_decoder, decoder_sizes
from jpeg_dlm.nn.dit import Context, DiT, linear_estimate
from jpeg_dlm.nn.perceiver import Compressor, Decompressor
from jpeg_dlm.nn.spans import complete_spans
from jpeg_dlm.nn.token_decoder import TokenProjection
from jpeg_dlm.nn.token_loss import linear_cross_entropy
from jpeg_dlm.rng import RowNoise

VARIANCE_FLOOR = 1e-4  # assumed: keeps standardization from blowing up a dead channel


def build_dit(config: Config, context_blocks: int = 0) -> DiT:
    m: JpegDlmModel = config.model
    return DiT(
        m.latent_len, m.latent_dim, m.bottleneck_dim, m.hidden, m.depth, m.heads, m.mlp_ratio, m.freq_dim, m.time_tokens,
        m.sc_tokens, m.mode_tokens, m.dropout, m.denoise_skip, context_blocks * m.latent_len,
        m.codec == "causal",
    )  # fmt: skip


def learns_features(config: Config) -> bool:
    """Return True if a token embedding takes the place of the frozen encoder."""
    return config.encoder.kind == "none"


def swiglu_ratio(inner: int, hidden: int) -> float:
    """Return the MLP ratio whose two-thirds rule results in `inner`."""
    for expanded in range(inner * 3 // 2, inner * 3 // 2 + 3):
        if int(expanded * 2 / 3) == inner and int(hidden * (expanded / hidden)) == expanded:
            return expanded / hidden
    raise CheckpointError(f"A SwiGLU width of {inner} does not fit a hidden width of {hidden}.")


def token_shares(tokens_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the weight of each position in `masked_mean`."""
    if mask_BL is None:
        return torch.full(tokens_BL.shape, 1 / tokens_BL.numel(), device=tokens_BL.device)
    return mask_BL / all_mean(mask_BL.float().sum()).clamp_min(1)


class JpegDlm(Method):
    """The whole system. `encoder` is frozen and may be None for a model that only samples."""

    title = "JPEG-DLM"
    publication = Publication(untold=(), preset="lm1b")
    uses_encoder = True
    uses_context = True
    supports = GUIDED_LONG
    latent_mean: Tensor
    latent_scale: Tensor
    latent_updates: Tensor

    @classmethod
    def needs_encoder(cls, config: Config) -> bool:
        return not learns_features(config)

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        m: JpegDlmModel = config.model
        o: JpegDlmObjective = config.objective
        self.config = config
        self.supports = GUIDED_LONG if m.context_blocks else GUIDED
        self.encoder = encoder
        codec_sizes = (
            config.data.token_len, m.latent_len, config.encoder.feature_dim, m.latent_dim, m.bottleneck_dim,
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
        self.unembed_proj = nn.Linear(config.encoder.feature_dim, m.proj_dim)
        self.lm_head = nn.Linear(m.proj_dim, config.data.vocab_size)
        self.embedding = nn.Embedding(config.data.vocab_size, config.encoder.feature_dim) if learns_features(config) else None
        self.adaptive = AdaptiveTimes() if o.time_adaptive else None
        self.register_buffer("latent_mean", torch.zeros(m.latent_dim))
        self.register_buffer("latent_scale", torch.ones(m.latent_dim))
        self.register_buffer("latent_updates", torch.zeros((), dtype=torch.int64))
        self.loss_weights = {
            "jep": o.jep_weight, "flow": o.flow_weight, "feat": o.feat_weight, "ce": o.ce_weight,
            "ce_noisy": o.ce_weight, "sigreg": o.sigreg_weight, "var": o.var_weight, "cov": o.cov_weight,
            "ce_first": o.ce_weight,
        }  # fmt: skip
        self.token_decoder = build_token_decoder(config)  # last, so that the other weights do not depend on it

    # ------------------------------------------------------------ Algorithm 1

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o = self.config.objective
        h = self.features(batch)  # h <- E(x)
        z_tgt = self.target_latents(h, batch.mask_BL, noise.step)  # z_tgt <- sg(C-bar(h)), standardized

        # decode branch (t = 1): a corrupted view of the features, compressed
        z_raw = self.compressor(self.corrupted(h, noise), batch.mask_BL)
        z_c = self.standardize(z_raw)

        # denoise branch: noisy embeddings on the linear path (Equation 1), and their self-conditioning
        z_1, z_t, t, w, chosen = self.noisy_embeddings(self.flow_latents(z_tgt, h, batch.mask_BL, noise.step), noise)
        context = self.context(batch, noise)
        s = self.self_condition(z_t, t, w, chosen, context=context)

        zhat_tgt, zhat_1 = self.both_branches(z_c, z_t, t, s, w, context)
        z_flow = self.flow_target(z_1, zhat_1, chosen, z_t, t, s, w, context)
        if o.flow_to_compressor and o.flow_to_compressor_side == "both":
            z_flow = with_gradient_of(z_flow, z_1)  # the guided target is z_1 and a constant
        hhat = self.decompressor(self.unstandardize(self.blurred(zhat_tgt, noise)))  # hhat <- D(zhat_tgt)

        return {
            "jep": F.mse_loss(zhat_tgt, z_tgt),  # Equation 3
            "flow": self.flow_loss(zhat_1, z_flow, t),  # Equation 2
            "feat": masked_mean(((hhat - h.detach()) ** 2).mean(-1), batch.mask_BL),  # Equation 5
            "ce": self.token_loss(hhat, batch, noise=noise),  # Equation 4
            **({} if self.token_decoder is None else {"ce_first": self.projected_loss(self.read_by_tokens(hhat), batch)}),
            **self.noisy_token_loss(zhat_1[: len(h)], t[: len(h)], batch, noise),
            **self.regularizers(z_raw if o.reg_space == "raw" else z_c, noise),
        }

    @torch.no_grad()
    def target_latents(self, h: Tensor, mask: Tensor | None, step: int | None = None) -> Tensor:
        """Return standardized clean latents of the target compressor; the first training steps also update the statistics."""
        z = self.target(h, mask)
        if self.training and step is not None and step < self.standardize_steps:
            self.update_statistics(z)
        return self.standardize(z)

    def corrupted(self, h: Tensor, noise: RowNoise) -> Tensor:
        """Return h + sigma eps, the corrupted view of the features for the decode branch."""
        return h + self.config.objective.sigma * noise.normal("feature", *h.shape[1:])

    def features(self, batch: Batch) -> Tensor:
        """Return h = E(x): frozen features, or learned embeddings of unit root mean square, which cannot shrink."""
        if self.embedding is None:
            return super().features(batch)
        return F.rms_norm(self.embedding(batch.tokens_BL).float(), (self.embedding.embedding_dim,))

    def flow_latents(self, z_tgt: Tensor, h: Tensor, mask: Tensor | None, step: int) -> Tensor:
        """Return the clean latents of the flow loss: z_tgt, or with `flow_to_compressor` ones that carry its gradient."""
        o = self.config.objective
        if not o.flow_to_compressor:
            return z_tgt
        z_raw = self.compressor(h, mask)
        z = self.standardize(z_raw)
        value = z if o.flow_to_compressor_values == "context" else z_tgt
        source = batch_standardized(z_raw, VARIANCE_FLOOR) if o.flow_to_compressor_norm == "batch" else z
        factor = warmup_factor(step / max(1, self.config.train.steps), o.flow_to_compressor_warmup)
        return with_gradient_of(value, source, o.flow_to_compressor * factor)

    def blurred(self, z: Tensor, noise: RowNoise) -> Tensor:
        """Return latents with `decoder_noise` in training, and as they are elsewhere."""
        deviation = self.config.objective.decoder_noise
        return z + deviation * noise.normal("decoder", *z.shape[1:]) if deviation and self.training else z

    def noisy_embeddings(self, z_tgt: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (z_1, z_t, t, w, chosen for self-conditioning) of the denoise branch, for `flow_draws` copies of a batch."""
        o = self.config.objective
        z_1, draws = z_tgt.repeat(o.flow_draws, 1, 1), noise.repeated(o.flow_draws)
        t = self.times(draws)
        z_t = interpolate(z_1, draws.normal("latent", *z_1.shape[1:]), t)
        w = guidance_scale(draws.uniform("scale"), o.w_min, o.w_max)
        return z_1, z_t, t, w, draws.uniform("self_condition") < o.sc_prob

    def context(self, batch: Batch, noise: RowNoise) -> Context | None:
        """Return the clean latents of the blocks before each row, for `flow_draws` copies; a share of rows has none."""
        if batch.before is None or batch.present_BK is None:
            return None
        o, m = self.config.objective, self.config.model
        z_BCD = self.encode(batch.before).view(len(batch.tokens_BL), -1, m.latent_dim)
        present_BC = batch.present_BK.repeat_interleave(m.latent_len, dim=1).repeat(o.flow_draws, 1)
        kept = noise.repeated(o.flow_draws).uniform("context_drop") >= o.context_drop
        return Context(z_BCD.repeat(o.flow_draws, 1, 1), present_BC & kept[:, None])

    def times(self, noise: RowNoise) -> Tensor:
        """Draw t ~ pi: logit-normal (paper), optionally mixed with a share of uniform times."""
        o = self.config.objective
        if self.adaptive is not None and self.training:
            return self.adaptive.draw(noise.uniform("time"))
        t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
        if o.time_uniform:
            chance, uniform = noise.uniform("time_uniform", 2).unbind(1)
            t = mixed_times(t, chance, uniform, o.time_uniform)
        return t

    def both_branches(
        self, z_c: Tensor, z_t: Tensor, t: Tensor, s: Tensor, w: Tensor, context: Context | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (zhat_tgt, zhat_1) = (f(z_c, t=1) in decode mode, f(z_t, t; s, w)), in one pass if the network is shared.

        The decode branch uses the w of the first draw of each row.
        """
        rows = len(z_c)
        if self.predictor is not None:
            return self.decode_latents(z_c, w[:rows]), self.dit(z_t, t, s, w, context=context)
        out = self.dit(
            torch.cat([z_c, z_t]), torch.cat([torch.ones_like(t[:rows]), t]), torch.cat([torch.zeros_like(z_c), s]),
            torch.cat([w[:rows], w]), decode_rows=rows, context=context,
        )  # fmt: skip
        return self.with_residual(out[:rows], z_c), out[rows:]

    def decode_latents(self, z: Tensor, w: Tensor) -> Tensor:
        """Return f(z, t=1) in decode mode, without self-conditioning but with w (released)."""
        network = self.dit if self.predictor is None else self.predictor
        return self.with_residual(network(z, torch.ones_like(w), None, w, decode_rows=len(z)), z)

    def with_residual(self, predicted: Tensor, z: Tensor) -> Tensor:
        """Return zhat = z + head if `decode_residual`, so that an untrained zero head is the identity; not in the paper."""
        return predicted + z if self.config.model.decode_residual else predicted

    @torch.no_grad()
    def self_condition(
        self, z_t: Tensor, t: Tensor, w: Tensor, chosen: Tensor, s: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        """Return f(z_t, t; s, w) without dropout (ELF) for the chosen rows, and zeros for the others."""
        out, rows = torch.zeros_like(z_t), chosen.nonzero().squeeze(1)
        if len(rows):
            training = self.dit.training
            self.dit.eval()
            before = None if context is None else context.of(rows)
            out[rows] = self.dit(z_t[rows], t[rows], None if s is None else s[rows], w[rows], context=before)
            self.dit.train(training)
        return out

    @torch.no_grad()
    def flow_target(
        self, z_tgt: Tensor, zhat_1: Tensor, chosen: Tensor, z_t: Tensor, t: Tensor, s: Tensor, w: Tensor,
        context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the flow target: the guided target of two predictions for the chosen rows, z_tgt for the others (ELF)."""
        # The second prediction is f(z_t, t; s, w) without dropout; if dropout is 0, that is zhat_1.
        second = self.self_condition(z_t, t, w, chosen, s, context) if self.config.model.dropout else zhat_1
        return torch.where(per_row(chosen, z_tgt), guided_target(z_tgt, second, s, w), z_tgt)

    def flow_loss(self, predicted: Tensor, target: Tensor, t: Tensor) -> Tensor:
        """Return the x-loss, the v-loss, which weights the same error by (1 - t)**-2 (appendix), or EDM's weighting."""
        error, o = (predicted - target) ** 2, self.config.objective
        if self.adaptive is not None and self.training:
            self.adaptive.update(t, error.mean((1, 2)))
        if o.flow_loss == "v":
            error = error / per_row((1 - t).clamp_min(o.v_floor) ** 2, error)
        elif o.flow_weighting == "residual":
            error = error / per_row(linear_estimate(t)[1].clamp_min(o.v_floor) ** 2, error)
        return error.mean()

    def token_loss(
        self, hhat: Tensor, batch: Batch, rows_B: Tensor | None = None, noise: RowNoise | None = None
    ) -> Tensor:  # fmt: skip
        """Return `projected_loss` behind the contextual decoder, if any, which reads the real tokens, partly replaced."""
        hhat = self.read_by_tokens(hhat)
        if self.token_decoder is not None:
            hhat = self.token_decoder(hhat, batch.tokens_BL, self.projection, noise)
        return self.projected_loss(hhat, batch, rows_B)

    def read_by_tokens(self, hhat: Tensor) -> Tensor:
        """Return the features as the token loss reads them: without a gradient if it must not train the codec."""
        return hhat if self.config.objective.ce_to_codec else hhat.detach()

    def projected_loss(self, hhat: Tensor, batch: Batch, rows_B: Tensor | None = None) -> Tensor:
        """Return the mean of -log p(token) over real tokens; rows outside `rows_B` count as zeros in the mean."""
        share_BL = token_shares(batch.tokens_BL, batch.mask_BL)
        share_BL = share_BL if rows_B is None else share_BL * rows_B[:, None]
        x = F.gelu(self.unembed_proj(hhat)).flatten(0, 1)
        head, chunk = self.lm_head, self.config.objective.ce_chunk
        return linear_cross_entropy(x, head.weight, head.bias, batch.tokens_BL.flatten(), share_BL.flatten(), chunk)

    def noisy_token_loss(
        self, zhat_1: Tensor, t: Tensor, batch: Batch, noise: RowNoise | None = None
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the token loss of denoise predictions with t in [ce_time_min, 1] (ablation)."""
        if self.config.objective.ce_time_min >= 1:
            return {}
        late = t >= self.config.objective.ce_time_min
        hhat = self.decompressor(self.unstandardize(zhat_1))
        loss = self.token_loss(hhat, batch, late, noise)  # a mean over all rows, in which the others are zeros
        if self.config.objective.ce_time_mean == "late":
            share = (token_shares(batch.tokens_BL, batch.mask_BL) * late[:, None]).sum()
            loss = loss / all_mean(share).clamp_min(torch.finfo(share.dtype).tiny)
        return {"ce_noisy": loss}

    def regularizers(self, z: Tensor, noise: RowNoise) -> dict[str, Tensor]:
        """Return the SIGReg, variance and covariance terms of the context compressor's vectors (appendix)."""
        o, u = self.config.objective, self.regularized(z, noise)
        terms = {}
        if o.sigreg_weight:
            directions = unit_directions(u.shape[1], o.sigreg_slices, noise.shared("sigreg"))
            terms["sigreg"] = sigreg(u, directions, o.sigreg_knots, o.sigreg_t_max) * self.sigreg_growth(noise.step)
        terms["var"], terms["cov"] = variance_covariance(u)
        return terms

    def sigreg_growth(self, step: int) -> float:
        """Return the growth of SIGReg's weight: the compressor first learns to keep tokens, then to fill its space."""
        o, steps = self.config.objective, self.config.train.steps
        if not o.sigreg_late:
            return 1.0
        return 1 + (o.sigreg_late / o.sigreg_weight - 1) * min(1.0, max(0.0, 10 * step / max(1, steps) - 0.5))

    def regularized(self, z: Tensor, noise: RowNoise) -> Tensor:
        """Return the vectors (R, D) for the regularizers."""
        most = self.config.objective.reg_max_rows
        kept = max(1, most // (noise.total or len(z))) if most else z.shape[1]
        if kept < z.shape[1]:  # equally many per row, so that the choice does not depend on how a batch is split
            chosen = noise.uniform("reg_rows", z.shape[1]).argsort(1)[:, :kept]
            z = z.gather(1, chosen[..., None].expand(-1, -1, z.shape[2]))
        return z.flatten(0, 1).float()

    # ------------------------------------------------------------ latent standardization (appendix)

    @property
    def standardize_steps(self) -> int:
        given = self.config.objective.standardize_steps
        return given or rounded_up_share(self.config.train.steps, 0.1, most=2000)

    def standardize(self, z: Tensor) -> Tensor:
        return (z.float() - self.latent_mean) * self.latent_scale

    def unstandardize(self, z: Tensor) -> Tensor:
        return z / self.latent_scale + self.latent_mean

    @torch.no_grad()
    def update_statistics(self, z: Tensor) -> None:
        """Update the running per-channel mean and variance over all processes; the first batch sets them."""
        z = z.float().flatten(0, 1)
        mean = all_mean(z.mean(0))
        variance = all_mean(((z - mean) ** 2).mean(0))
        if not bool((mean + variance).isfinite().all()):
            return  # the trainer rejects this step, and the running statistics would never recover
        m = self.config.objective.standardize_momentum if int(self.latent_updates) else 0.0
        self.latent_mean.mul_(m).add_(mean, alpha=1 - m)
        variance = m * self.latent_scale**-2 + (1 - m) * variance
        self.latent_scale.copy_(variance.clamp_min(VARIANCE_FLOOR).rsqrt())
        self.latent_updates += 1

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
        """f(z, t; s, w) in denoise mode, at any times, after a context."""
        return lambda z, t, s: self.dit(z, per_sample(t, z), s, per_sample(w, z), context=context)

    def tokens(self, z: Tensor, w: float, given_BL: Tensor | None = None) -> Tensor:
        """One decode evaluation at t = 1, then greedy tokens; a contextual decoder reads given ids in place of its own."""
        return self.greedy(self.decode_latents(z, per_sample(w, z)), given_BL)

    def logits(self, z: Tensor, w: float, given_BL: Tensor | None = None) -> Tensor:
        """The logits of one decode evaluation at t = 1, for guides: those of `decoded`."""
        return self.decoded(self.decode_latents(z, per_sample(w, z)), given_BL)

    def decoded(self, z_standardized: Tensor, given_BL: Tensor | None = None) -> Tensor:
        """Latents straight through D and W to logits, differentiable in the latents.

        Those of a contextual decoder are the logits after its own greedy tokens, or after the given ids where there are
        any (negative: free): a guide moves the latents, and at every move the tokens are read anew.
        """
        hhat = self.decompressor(self.unstandardize(z_standardized))
        return self.project(hhat) if self.token_decoder is None else self.token_decoder.logits(hhat, self.projection, given_BL)

    def greedy(self, z_standardized: Tensor, given_BL: Tensor | None = None) -> Tensor:
        """Latents straight through D and W to the most probable tokens; a contextual decoder goes by its own or given ids."""
        if self.token_decoder is None:
            return self.decoded(z_standardized).argmax(-1)
        return self.token_decoder.written(self.decompressor(self.unstandardize(z_standardized)), self.projection, given_BL)

    def project(self, h: Tensor) -> Tensor:
        """W: features to logits through two linears and a GELU."""
        return self.projection(h)

    @property
    def projection(self) -> TokenProjection:
        return TokenProjection(self.unembed_proj, self.lm_head)

    # ------------------------------------------------------------ the codec on its own

    @torch.no_grad()
    def encode(self, batch: Batch) -> Tensor:
        """Encode clean text to standardized latents (B, N, D) with the target compressor."""
        return self.target_latents(self.features(batch), batch.mask_BL)

    def known_latents(self, given_BL: Tensor) -> Known | None:
        """Return the latents of complete spans at the beginning of rows, with a causal codec; None if there are none."""
        there_BN, held_BL = complete_spans(given_BL >= 0, self.config.model.latent_len)
        if not there_BN.any():
            return None
        return Known(self.encode(Batch(given_BL.clamp_min(0), held_BL)), there_BN, held_BL)

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: SamplerConfig | None = None) -> Tensor:
        """Return the share of real tokens that the decode branch reconstructs from their own latents."""
        z = self.encode(batch)
        same = self.tokens(z, sampler.w if sampler else 1.0) == batch.tokens_BL
        return masked_mean(same.float(), batch.mask_BL)

    def latent_space(self, batch: Batch) -> Latents:
        logits = None if self.token_decoder is None else self.forced_logits
        return Latents(self.encode(batch), lambda z: self.tokens(z, 1.0), self.predict_once, logits)

    def forced_logits(self, z: Tensor, tokens_BL: Tensor) -> Tensor:
        """The logits of a contextual decoder at w = 1 under teacher forcing; the two-pass decoder reads its own tokens."""
        assert self.token_decoder is not None
        hhat = self.decompressor(self.unstandardize(self.decode_latents(z, per_sample(1.0, z))))
        return self.project(self.token_decoder(hhat, tokens_BL, self.projection))

    def latent_view(self) -> LatentView:
        return LatentView(
            self.encode,
            predict=lambda z_t, ratio: self.predict_once(z_t, linear_time(ratio)),
            decode=self.greedy,
            branch=lambda z: self.decode_latents(z, per_sample(1.0, z)),
        )

    def predict_once(self, z_t: Tensor, t: float) -> Tensor:
        """The prediction of clean latents at w = 1, with no earlier one to go by."""
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

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return `base` with the sizes of a checkpoint in the released layout."""

        def shape(name: str, dims: int = 2) -> tuple[int, ...]:
            if name not in tensors:
                raise CheckpointError(f"The file is not in the released layout: it lacks the tensor '{name}'.")
            found = tuple(tensors[name].shape)
            if len(found) != dims or 0 in found:
                raise CheckpointError(f"The file is not in the released layout: '{name}' has the shape {found}.")
            return found

        def layers(prefix: str) -> int:
            return len({name.split(".")[2] for name in tensors if name.startswith(prefix)})

        latent_len, dim = shape("compressor.latents")
        token_len, _ = shape("decompressor.pos_emb.weight")
        hidden = shape("dit.t_emb_tokens", 3)[2]
        proj_dim, feature_dim = shape("unembed_proj.weight")
        model = replace(
            base.model,
            latent_len=latent_len,
            latent_dim=dim,
            bottleneck_dim=shape("compressor.in_proj.down.weight")[0],
            codec_layers=layers("compressor.layers."),
            codec_heads=dim // shape("compressor.layers.0.attn.q_norm.gamma", 1)[0],
            codec_mlp_ratio=shape("compressor.layers.0.ffn.net.1.weight")[0] / dim,
            proj_dim=proj_dim,
            hidden=hidden,
            depth=layers("dit.blocks."),
            heads=hidden // shape("dit.blocks.0.attn.q_norm.weight", 1)[0],
            mlp_ratio=swiglu_ratio(shape("dit.blocks.0.mlp.w3.weight")[1], hidden),
            freq_dim=shape("dit.t_embedder.mlp_0.weight")[1],
            time_tokens=shape("dit.t_emb_tokens", 3)[1],
            sc_tokens=shape("dit.sc_tokens", 3)[1],
            mode_tokens=shape("dit.mode_tokens", 3)[1],
            shared=not any(name.startswith("predictor.") for name in tensors),
            **decoder_sizes(tensors),
            context_blocks=shape("dit.no_context", 3)[1] // latent_len if "dit.no_context" in tensors else 0,
        )
        data = replace(base.data, token_len=token_len, vocab_size=shape("lm_head.weight")[0])
        kind = "none" if "embedding.weight" in tensors else base.encoder.kind
        return replace(base, data=data, model=model, encoder=replace(base.encoder, kind=kind, feature_dim=feature_dim))

    def parameter_groups(self) -> list[ParameterGroup]:
        # assumed: what makes tokens of features is grouped with the DiT
        flow = ("dit.", "predictor.", "unembed_proj.", "lm_head.", "token_decoder.")
        groups: dict[str, dict[str, nn.Parameter]] = {"flow": {}, "codec": {}}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                groups["flow" if name.startswith(flow) else "codec"][name] = parameter
        return [ParameterGroup(name, parameters) for name, parameters in groups.items() if parameters]
