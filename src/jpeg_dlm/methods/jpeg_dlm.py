"""JPEG-DLM: a compressor, a flow matching model and a decoding module trained together (Algorithms 1 and 2).

Symbols of the paper: E encoder, C context compressor, C-bar target compressor, f shared network, D decompressor,
W token projection; h features, z_tgt clean target, z_c corrupted view, z_t noisy embedding, w guidance scale.
Shapes: B batch, L tokens, N latents, D latent width, F feature width, V vocabulary.

Options that the paper does not have say so in their help; with the paper's presets none of them acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.flow.guidance import Guidance
from jpeg_dlm.flow.path import SC_PROB, guidance_scale, guided_target, interpolate, logit_normal, per_row, per_sample
from jpeg_dlm.flow.sampler import Watch, sample
from jpeg_dlm.methods.base import Batch, linear_ramp
from jpeg_dlm.methods.jpeg_dlm_config import SamplerConfig
from jpeg_dlm.methods.jpeg_dlm_networks import JpegDlmNetworks
from jpeg_dlm.methods.regularizers import latent_regularizers
from jpeg_dlm.nn.dit import Context, Memory
from jpeg_dlm.nn.token_loss import linear_cross_entropy
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.rng import RowNoise, chosen_rows


@dataclass(frozen=True)
class Noisy:
    """Rows of the denoise branch; the `chosen` ones are self-conditioned on s, which is zero in the others."""

    z_1: Tensor
    z_t: Tensor
    t: Tensor
    s: Tensor
    w: Tensor
    chosen: Tensor
    memory: Memory | None = None


class JpegDlm(JpegDlmNetworks):
    """The whole system. `encoder` is frozen and may be None for a model that only samples."""

    # ------------------------------------------------------------ Algorithm 1

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        o = self.config.objective
        h = self.features(batch)  # h <- E(x)
        z_1 = self.target_latents(h, batch.mask_BL, noise.step)  # z_tgt <- sg(C-bar(h)), standardized

        # decode branch (t = 1), of the same text (paper)
        text, h, z_tgt = self.decoded_text(batch, h, z_1, noise)
        z_c = self.compressor(self.corrupted(h, noise), text.mask_BL)  # z_c <- C(h + sigma eps_h)

        # denoise branch: t ~ pi, eps ~ N(0, I), z_t <- t z_tgt + (1 - t) eps
        noisy = self.noisy_embeddings(z_1, batch, noise)

        zhat_tgt, zhat_1 = self.both_branches(self.standardize(z_c), noisy)  # f(z_c, t = 1) and f(z_t, t)
        hhat = self.decompressed(zhat_tgt)  # hhat <- D(zhat_tgt)
        terms = {
            "jep": F.mse_loss(zhat_tgt, z_tgt),  # Equation 3
            "feat": text.token_mean((hhat - h.detach()).square().mean(-1)),  # Equation 5
            "ce": self.token_loss(hhat, text),  # Equation 4
            "flow": self.flow_loss(zhat_1, noisy),  # Equation 2
            **latent_regularizers(z_c, o, self.config.train.steps, noise),  # appendix
        }
        if o.ce_time_min < 1:  # ablation
            first, late = len(h), noisy.t[: len(h)] >= o.ce_time_min
            terms["ce_noisy"] = self.token_loss(self.decompressed(zhat_1[:first]), batch, late)
        return terms

    def corrupted(self, h: Tensor, noise: RowNoise) -> Tensor:
        """Return h + sigma eps_h."""
        return h + self.config.objective.sigma * noise.normal("feature", *h.shape[1:])

    def noisy_embeddings(self, z_1: Tensor, batch: Batch, noise: RowNoise) -> Noisy:
        """Return `flow_draws` copies of a batch (paper: 1) on the linear path (Equation 1), with their self-conditioning."""
        draws = self.config.objective.flow_draws
        z_1, noise = z_1.repeat(draws, 1, 1), noise.repeated(draws)
        t = self.draw_times(noise)  # t ~ pi
        z_t = interpolate(z_1, noise.normal("latent", *z_1.shape[1:]), t)
        w = guidance_scale(noise.uniform("scale"))
        chosen, rows = chosen_rows(noise.coins("self_condition", SC_PROB), z_t.device)
        memory = self.draw_context(batch, noise)
        return Noisy(z_1, z_t, t, self.self_condition(z_t, t, w, rows, memory), w, chosen, memory)

    def draw_times(self, noise: RowNoise) -> Tensor:
        """Draw t ~ pi: logit-normal (paper), optionally mixed with a share of uniform times."""
        o = self.config.objective
        t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
        if not o.time_uniform:
            return t
        chance, uniform = noise.uniform("time_uniform", 2).unbind(1)
        return torch.where(chance < o.time_uniform, uniform, t)

    @torch.no_grad()
    def self_condition(self, z_t: Tensor, t: Tensor, w: Tensor, rows: Tensor, memory: Memory | None) -> Tensor:
        """Return s: a first prediction f(z_t, t; 0, w) for the chosen rows, and zeros for the others (appendix)."""
        s = torch.zeros_like(z_t)
        if len(rows):
            s[rows] = self.dit(z_t[rows], t[rows], None, w[rows], memory=memory.of(rows) if memory else None)
        return s

    def both_branches(self, z_c: Tensor, n: Noisy) -> tuple[Tensor, Tensor]:
        """Return (zhat_tgt, zhat_1) = (f(z_c, t=1) in decode mode, f(z_t, t; s, w)), in one pass if the network is shared."""
        rows = len(z_c)
        w_c = n.w[:rows]  # the decode branch has the w of a row's first draw
        if self.predictor is not None or n.memory is not None:  # decoding is about a single block
            return self.decode_latents(z_c, w_c), self.dit(n.z_t, n.t, n.s, n.w, memory=n.memory)
        z, t = torch.cat([z_c, n.z_t]), torch.cat([torch.ones_like(w_c), n.t])
        s, w = torch.cat([torch.zeros_like(z_c), n.s]), torch.cat([w_c, n.w])
        both = self.dit(z, t, s, w, decode_rows=rows)
        return both[:rows], both[rows:]

    def flow_loss(self, zhat_1: Tensor, n: Noisy) -> Tensor:
        """Return the error of the clean embedding; chosen rows have the guided target (appendix, Self-Conditioning)."""
        guided = guided_target(n.z_1, zhat_1.detach(), n.s, n.w)
        return (zhat_1 - torch.where(per_row(n.chosen, n.z_1), guided, n.z_1)).square().mean()

    def token_loss(self, hhat: Tensor, batch: Batch, rows_B: Tensor | None = None) -> Tensor:
        """Return the mean of -log p(token) over real tokens, of the rows `rows_B` alone if given."""
        share_BL = batch.token_shares
        if rows_B is not None:
            share_BL = share_BL * rows_B[:, None]
            share_BL = share_BL / all_mean(share_BL.sum()).clamp_min(torch.finfo(share_BL.dtype).tiny)
        x, head = F.gelu(self.unembed_proj(hhat)).flatten(0, 1), self.lm_head
        chunk = self.config.objective.ce_chunk
        return linear_cross_entropy(x, head.weight, head.bias, batch.tokens_BL.flatten(), share_BL.flatten(), chunk)

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        """Update theta-bar <- m theta-bar + (1 - m) theta, with m rising linearly (appendix; ramp as in I-JEPA)."""
        o = self.config.objective
        m = linear_ramp(o.target_ema_start, o.target_ema_end, step, total)
        torch._foreach_lerp_(list(self.target.parameters()), list(self.compressor.parameters()), 1 - m)

    # ------------------------------------------------------------ Algorithm 2: the loop is `flow.sampler.sample`

    noise_scale, v_floor = 1.0, 0.0  # z ~ N(0, I), and velocities are (x - z) / (1 - t)

    def sample(
        self,
        sampler: SamplerConfig,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        guidance: Guidance | None = None,
        context: Context | None = None,
        context_scale: float = 1.0,
        source: Batch | None = None,
    ) -> Tensor:
        if source is not None:
            context, context_scale = self.source_context(source), sampler.source_scale
        memory = None if context is None else self.dit.read(context)
        denoise = partial(self.denoise, memory=memory, context_scale=context_scale)
        return sample(self, sampler, noise, watch, fixed_BL, guidance, denoise)

    def denoise(
        self, z: Tensor, t: float, s: Tensor | None, w: float, memory: Memory | None = None, context_scale: float = 1.0
    ) -> Tensor:
        """Return x = f(z, t; s, w) in denoise mode; after a context, with classifier-free guidance if the scale is not 1."""
        t_B, w_B = per_sample(t, z), per_sample(w, z)
        x = self.dit(z, t_B, s, w_B, memory=memory)
        return x if memory is None or context_scale == 1 else torch.lerp(self.dit(z, t_B, s, w_B), x, context_scale)

    def tokens(self, z: Tensor, w: float) -> Tensor:
        """Return the most probable tokens of one decode evaluation."""
        return self.greedy(self.decode_latents(z, per_sample(w, z)))

    def logits(self, z: Tensor, w: float) -> Tensor:
        """Return the logits of one decode evaluation, for guides, differentiable in the latents."""
        return self.project(self.decompressed(self.decode_latents(z, per_sample(w, z))))
