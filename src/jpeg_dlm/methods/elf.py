"""ELF (embedded language flows): flow matching on full-length features of a frozen encoder, one latent per token.

JPEG-DLM's DiT derives from this network, which has one head for the clean features x and a factored unembedding to
tokens. Each row of a batch trains one of two modes: denoise (x from the noisy z_t) or decode (tokens from features with a
different amount of noise per token). (ELF) marks values of its paper and code.
Shapes: B batch, L tokens, F feature width, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.flow.control import Control, keep_given, steering
from jpeg_dlm.flow.grids import make_grid
from jpeg_dlm.flow.path import guidance_scale, guided_target, logit_normal, per_row, per_sample
from jpeg_dlm.flow.solvers import step_back
from jpeg_dlm.methods.base import (
    FROZEN,
    GUIDED,
    Batch,
    LatentView,
    Method,
    Publication,
    Watch,
    copy_tensors,
    linear_time,
    masked_mean,
)
from jpeg_dlm.methods.common.released_layout import repeated, shapes_of
from jpeg_dlm.methods.elf_config import GROUPS, ElfSampler, elf_preset
from jpeg_dlm.nn.dit import Head, LatentTransformer
from jpeg_dlm.nn.precision import fp32_island
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.rng import RowNoise, chosen_rows


def euler_step(z: Tensor, x: Tensor, t: float, u: float, floor: float) -> Tensor:
    """Step from t to u along v = (x - z) / max(1 - t, floor)."""
    return z + (u - t) * (x - z) / max(1 - t, floor)


class ElfNetwork(LatentTransformer):
    """f(z, t; s, w): predicts clean features, and hidden states that `logits` maps to tokens."""

    def __init__(self, config: Config) -> None:
        m, width = config.model, config.encoder.feature_dim
        super().__init__(
            config.data.token_len, width, m.bottleneck_dim, m.hidden, m.depth, m.heads, m.mlp_ratio,
            m.freq_dim, m.time_tokens, m.sc_tokens, m.mode_tokens, dropout=0.0,
        )  # fmt: skip
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
    publication = Publication(tensors=("unembed_kernel",), untold=("data.token_len",))
    groups = GROUPS
    uses_encoder = True
    supports = GUIDED

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.dit = ElfNetwork(config)
        self.loss_weights = {"flow": 1.0, "ce": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return elf_preset(base)

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Return `flow` and `ce`, each summed over the rows of its mode and divided by the tokens of all rows (ELF)."""
        o = self.config.objective
        x = self.features(batch)
        decodes = noise.coins("mode", o.decode_prob)
        decode, rows = chosen_rows(decodes, x.device)
        t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
        z = self.corrupted(x, t, decode, noise)
        w = guidance_scale(noise.uniform("scale"), o.w_min, o.w_max)
        _, conditioned = chosen_rows(~decodes & noise.coins("self_condition", o.sc_prob), x.device)
        s, target = self.self_condition(x, z, t, w, conditioned)

        xhat, hidden = self.dit(z, torch.where(decode, 1.0, t), s, w, decode)

        # The error of the velocity (x - z) / (1 - t): z cancels.
        error = ((xhat - target) ** 2).mean(-1) / ((1 - t).clamp_min(o.v_floor) ** 2)[:, None]
        # If no row decodes, the unembedding gets an empty input but stays in the graph, so its gradient exists.
        nll = torch.zeros_like(error)
        nll[rows] = token_nll(self.dit.logits, hidden[rows], batch.tokens_BL[rows], o.ce_chunk)
        return {
            "flow": masked_mean(error * ~decode[:, None], batch.mask_BL),
            "ce": masked_mean(nll, batch.mask_BL),
        }

    def corrupted(self, x: Tensor, t: Tensor, decode: Tensor, noise: RowNoise) -> Tensor:
        """Return the network's input: one time per row in denoise mode, one share lambda per token in decode mode."""
        o = self.config.objective
        share = logit_normal(noise.normal("decode_share", x.shape[1]), o.decode_mean, o.decode_std)
        clean = torch.where(decode[:, None], share, t[:, None])[..., None]
        scale = torch.where(decode, o.decode_noise_scale, o.noise_scale)
        return clean * x + (1 - clean) * per_row(scale, x) * noise.normal("latent", *x.shape[1:])

    @torch.no_grad()
    def self_condition(self, x: Tensor, z: Tensor, t: Tensor, w: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return (s, target): the first prediction and the guided target for the chosen rows, zeros and x for the others."""
        s, target = torch.zeros_like(x), x.clone()
        if len(rows):
            denoise = torch.zeros_like(rows, dtype=torch.bool)
            first, _ = self.dit(z[rows], t[rows], None, w[rows], denoise)
            second, _ = self.dit(z[rows], t[rows], first, w[rows], denoise)
            s[rows], target[rows] = first, guided_target(x[rows], second, first, w[rows])
        return s, target

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: ElfSampler, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor:  # fmt: skip
        """Write rows; `watch` sees what the features themselves decode to."""
        o, shape = self.config.objective, (self.config.data.token_len, self.config.encoder.feature_dim)
        z = o.noise_scale * noise.normal("sample", *shape)
        # One grid for all rows of a seed; the authors draw one per batch, so a text depends on its batch.
        grid = make_grid(sampler.grid, sampler.steps, sampler.grid_mean, sampler.grid_std, noise.shared("grid"))
        w = torch.full((len(z),), sampler.w, device=z.device)
        logits = partial(self.logits, w=w)
        if control and control.origin:
            z, grid = control.origin.state(control.origin.clean(logits), z), control.origin.rest(grid)
        steer, steps = steering(logits, given_BL, control), len(grid) - 1
        streams = noise.streams("sde")
        s: Tensor | None = None
        for k, (t, u) in enumerate(pairwise(grid.tolist())):
            if sampler.solver == "sde" and k < steps - 1:
                z, t = step_back(z, t, u, sampler.gamma, o.noise_scale * streams.normal(*shape))
            x = self.predict(z, t, s, w)
            s = x = steer.moved(x, t) if steer else x
            if watch:
                watch(k, steps, t, lambda x=x: self.greedy(x, w))
            z = euler_step(z, x, t, u, o.v_floor)
        tokens = self.greedy(steer.refined(z) if steer else z, w)
        if watch:
            watch(steps, steps, 1.0, lambda: tokens)
        return keep_given(tokens, given_BL)

    def predict(self, z: Tensor, t: float, s: Tensor | None, w: Tensor) -> Tensor:
        """Predict clean features from the state at time t."""
        return self.dit(z, torch.full_like(w, t), s, w, torch.zeros_like(w, dtype=torch.bool))[0]

    def greedy(self, z: Tensor, w: Tensor) -> Tensor:
        """Return the most probable token at every position."""
        return self.logits(z, w).argmax(-1)

    def logits(self, z: Tensor, w: Tensor) -> Tensor:
        """Decode at t = 1 without self-conditioning."""
        _, hidden = self.dit(z, torch.ones_like(w), None, w, torch.ones_like(w, dtype=torch.bool))
        return self.dit.logits(hidden)

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: ElfSampler | None = None) -> Tensor:
        """Return the share of real tokens that are reconstructed from their own clean features."""
        x = self.features(batch)
        return batch.accuracy(self.greedy(x, per_sample(1.0, x)))

    def latent_view(self) -> LatentView:
        """Return the functions that studies use, on the encoder's features as latents (not in the paper)."""

        def time(ratio: float) -> float:
            return linear_time(ratio / self.config.objective.noise_scale)  # the noise has this deviation at t = 0

        return LatentView(
            self.features,
            predict=lambda z_t, ratio: self.predict(z_t, time(ratio), None, per_sample(1.0, z_t)),
            decode=lambda z: self.greedy(z, per_sample(1.0, z)),
            noisy=lambda z, eps, ratio: time(ratio) * (z + ratio * eps),
        )

    # ------------------------------------------------------------ files and optimization

    def export_state(self) -> dict[str, Tensor]:
        """Return the tensors in the published layout: flat names, and the matrices of the unembedding as (in, out)."""
        return {
            published_name(name): t.mT if name in ("dit.proj.weight", "dit.unembed.weight") else t
            for name, t in self.state_dict().items()
            if not name.startswith(FROZEN)
        }

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        copy_tensors(self.export_state(), tensors, origin)  # transposed tensors are views, so they are filled too

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return the config of a published checkpoint (`ema_params1` of the torch files); row length and MLP ratio stay."""
        shape = shapes_of(tensors, "ELF's layout")
        hidden, proj_dim = shape("proj_kernel")
        bottleneck_dim, feature_dim = shape("text_proj.proj1.weight")
        model = replace(
            base.model, bottleneck_dim=bottleneck_dim, proj_dim=proj_dim, hidden=hidden, depth=repeated(tensors, "blocks"),
            heads=hidden // shape("blocks.0.attn.q_norm.weight", 1)[0], freq_dim=shape("t_embedder.mlp_0.weight")[1],
            time_tokens=shape("t_emb_tokens", 3)[1], sc_tokens=shape("self_cond_cfg_tokens", 3)[1],
            mode_tokens=shape("mode_tokens", 3)[1],
        )  # fmt: skip
        data = replace(base.data, vocab_size=shape("unembed_kernel")[1])
        return replace(base, data=data, model=model, encoder=replace(base.encoder, feature_dim=feature_dim))


PUBLISHED = {
    "in_proj.": "text_proj.", "sc_embedder.": "self_cond_cfg_embedder.", "sc_tokens": "self_cond_cfg_tokens",
    "denoise_head.": "final_layer.", "proj.weight": "proj_kernel", "proj.bias": "proj_bias",
    "unembed.weight": "unembed_kernel", "unembed.bias": "unembed_bias",
}  # fmt: skip


def published_name(name: str) -> str:
    """Return the name of one of our tensors in ELF's checkpoints."""
    name = name.removeprefix("dit.")
    for ours, theirs in PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
