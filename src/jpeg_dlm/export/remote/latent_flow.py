"""Flow matching in latents, as JPEG-DLM and ELF have it: the DiT, the frozen encoder that reads sources, and Algorithm 2.

z latents, s the prediction before (self-conditioning), w its guidance scale, t from 0 (noise) to 1 (clean).
Shapes: B batch, L tokens, N latents, D latent width, F feature width, H hidden width, S tokens of a source, V vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .text_diffusion import FREE, Noise, TextDiffusion

KeysValues = tuple[Tensor, Tensor]  # of one layer (B, heads, S, head width)


def named(**layers: nn.Module) -> nn.Sequential:
    """Return layers that follow each other, by the names of their weights."""
    return nn.Sequential(OrderedDict(layers))


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """Return the parts of the last axis, each (B, heads, positions, head width)."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def rotary_angles(positions: Tensor, width: int) -> Tensor:
    """Return the angles (positions, width / 2)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    return torch.outer(positions.float(), 10_000.0**-exponents)


def sinusoids(x_B: Tensor, dim: int) -> Tensor:
    """Return cosines, then sines (B, dim) at frequencies from 1 down to 1 / 10,000."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float32, device=x_B.device) / half)
    angles = x_B[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


# ---------------------------------------------------------------- E: the frozen encoder


class EncoderBlock(nn.Module):
    """x += Attention(norm(x)); x += SwiGLU(norm(x)), with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner, self.heads = 8 * math.ceil(width / 3), heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        def rotate(y: Tensor) -> Tensor:  # channel i of the first half together with i of the second
            first, second = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        q, k, v = split_heads(self.qkv(self.norm_attention(x)), 3, self.heads)
        x = x + self.out(attend(rotate(q), rotate(k), v, mask))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Encoder(nn.Module):
    """Tokens (B, S) to features (B, S, F), with every channel standardized."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.width, self.heads, self.layer = c.feature_dim, c.encoder_heads, c.encoder_layer
        self.embedding = nn.Embedding(c.vocab_size + 1, c.feature_dim)  # its training has a mask token
        self.blocks = nn.ModuleList(EncoderBlock(c.feature_dim, c.encoder_heads) for _ in range(c.encoder_depth))
        self.final_norm = nn.RMSNorm(c.feature_dim, eps=1e-6)
        self.register_buffer("feature_mean", torch.zeros(c.feature_dim))
        self.register_buffer("feature_std", torch.ones(c.feature_dim))

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.width**0.5
        angles = rotary_angles(torch.arange(tokens.shape[1], device=tokens.device), self.width // self.heads).repeat(1, 2)
        for block in self.blocks[: self.layer]:
            x = block(x, angles, present[:, None, None])
        x = self.final_norm(x) if self.layer == len(self.blocks) else x
        return (x - self.feature_mean) / self.feature_std


# ---------------------------------------------------------------- f: the DiT


class DitBlock(nn.Module):
    """Attention with normed, rotated q and k, then SwiGLU, both on normed inputs."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        inner, width, self.heads = int(4 * hidden * 2 / 3), hidden // heads, heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)})
        self.attn.update({"q_norm": nn.RMSNorm(width, eps=1e-6), "k_norm": nn.RMSNorm(width, eps=1e-6)})
        self.mlp = nn.ModuleDict({"w12": nn.Linear(hidden, 2 * inner), "w3": nn.Linear(inner, hidden)})

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None, memory: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Attend to the keys and values of a source, if there is one, and to x; also return those of x."""

        def rotate(y: Tensor) -> Tensor:  # neighbouring channels together
            return y * angles.cos() + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) * angles.sin()

        q, k, v = split_heads(self.attn["qkv"](self.norm1(x)), 3, self.heads)
        q, k = rotate(self.attn["q_norm"](q)), rotate(self.attn["k_norm"](k))
        keys, values = (torch.cat(pair, 2) for pair in zip(memory, (k, v), strict=True)) if memory else (k, v)
        x = x + self.attn["proj"](attend(q, keys, values, mask))
        gate, up = self.mlp["w12"](self.norm2(x)).chunk(2, -1)
        return x + self.mlp["w3"](F.silu(gate) * up), (k, v)


def head(hidden: int, dim: int) -> nn.Sequential:
    return named(norm_final=nn.RMSNorm(hidden, eps=1e-6), linear=nn.Linear(hidden, dim))


class LatentTransformer(nn.Module):
    """f(z, t; s, w) over [time, scale and mode tokens, N latents]; it predicts clean latents through `denoise_head`.

    Where a source is read, the latents attend to it too. It attends to itself alone, so that it is read once for all times.
    """

    def __init__(self, c: Any, dim: int, source_len: int = 0) -> None:
        super().__init__()
        hidden, self.freq_dim, self.head_width = c.hidden, c.freq_dim, c.hidden // c.heads
        tokens = (nn.Parameter(torch.zeros(1, n, hidden)) for n in (c.time_tokens, c.sc_tokens, c.mode_tokens))
        self.t_emb_tokens, self.sc_tokens, self.mode_tokens = tokens
        self.self_cond_proj = nn.Linear(2 * dim, dim)
        self.in_proj = named(proj1=nn.Linear(dim, c.bottleneck_dim, bias=False), proj2=nn.Linear(c.bottleneck_dim, hidden))
        self.t_embedder, self.sc_embedder = (
            named(mlp_0=nn.Linear(c.freq_dim, hidden), act=nn.SiLU(), mlp_2=nn.Linear(hidden, hidden)) for _ in range(2)
        )
        self.blocks = nn.ModuleList(DitBlock(hidden, c.heads) for _ in range(c.depth))
        self.denoise_head = head(hidden, dim)
        if source_len:
            self.source_proj, self.context_kind = nn.Linear(c.feature_dim, hidden), nn.Parameter(torch.zeros(1, 1, hidden))

    def read(self, features: Tensor, present: Tensor) -> list[KeysValues]:
        """Return the keys and values of a source in each layer; its last position is -1."""
        x, memory = self.source_proj(features) + self.context_kind, []
        angles = self.angles(torch.arange(-x.shape[1], 0, device=x.device))
        for block in self.blocks:
            x, own = block(x, angles, present[:, None, None], None)
            memory.append(own)
        return memory

    def angles(self, positions: Tensor) -> Tensor:
        return rotary_angles(positions, self.head_width).repeat_interleave(2, -1)

    def embedded(self, x: float, learned: Tensor, embedder: nn.Module, z: Tensor) -> Tensor:
        """Return learned tokens (B, *, H) that carry a number."""
        return learned + embedder(sinusoids(z.new_full((len(z),), x), self.freq_dim))[:, None]

    def states(
        self,
        z: Tensor,
        t: float,
        s: Tensor,
        w: float,
        decode: bool = False,
        memory: list[KeysValues] | None = None,
        present: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, N, H) of the latents, in the mode that denoises or the one that decodes at t = 1."""
        time = self.embedded(t, self.t_emb_tokens, self.t_embedder, z)
        scale = self.embedded(w, self.sc_tokens, self.sc_embedder, z)
        mode = (self.mode_tokens * decode).expand(len(z), -1, -1)  # zero, but attended to, when denoising
        prefix = torch.cat([time, scale, mode], 1)
        x = torch.cat([prefix, self.in_proj(self.self_cond_proj(torch.cat([z, s], -1)))], 1)
        angles = self.angles(F.pad(torch.arange(z.shape[1], device=z.device), (prefix.shape[1], 0)))  # the prefix is at 0
        mask = None if present is None else torch.cat([present, present.new_ones(x.shape[:2])], 1)[:, None, None]
        for i, block in enumerate(self.blocks):
            x, _ = block(x, angles, mask, memory[i] if memory else None)
        return x[:, prefix.shape[1] :]


# ---------------------------------------------------------------- Algorithm 2


class LatentFlow(TextDiffusion):
    """A model that goes from noise to clean latents in steps, and decodes them once."""

    noise_scale, least_rest = 1.0, 0.0  # deviation of the noise, and the smallest 1 - t in a velocity
    latent_shape: tuple[int, int]

    def read(self, source: Tensor) -> Any:
        """Return what `denoise` and `decode` need of sources (B, S)."""
        raise NotImplementedError

    def denoise(self, z: Tensor, t: float, s: Tensor, o: SimpleNamespace, seen: Any) -> Tensor:
        """Return x = f(z, t; s, w), the prediction of clean latents; `o.source_scale` is the guidance over a source."""
        raise NotImplementedError

    def decode(self, z: Tensor, w: float, seen: Any) -> Tensor:
        """Return the inputs of `project` (B, L, *) for clean latents."""
        raise NotImplementedError

    def project(self, h: Tensor) -> Tensor:
        """Return logits (..., V)."""
        raise NotImplementedError

    def forward(self, z: Tensor, w: float = 1.0, seen: Any = None) -> Tensor:
        """Return logits (B, L, V) of clean latents."""
        return self.project(self.decode(z, w, seen))

    def sample(self, o: SimpleNamespace, noise: Noise, given: Tensor | None) -> Tensor:
        seen, fixed = (self.read(given), None) if self.c.source_len and given is not None else (None, given)
        z = self.noise_scale * o.noise_scale * noise.normal("sample", *self.latent_shape)
        s, times = torch.zeros_like(z), times_of(o, noise)
        for step, (t, u) in enumerate(pairwise(times), start=1):
            if o.solver == "sde" and u < 1:  # go back in time with fresh noise, where the network can mend earlier errors
                a = min(1.0, max(0.0, 1 - o.gamma * (u - t)))
                z, t = a * z + (1 - a) * (self.noise_scale * noise.normal(f"sde@{step}", *self.latent_shape)), a * t
            s = self.denoise(z, t, s, o, seen)
            if fixed is not None:  # moves must be long early, where the text is decided
                s, _ = self.moved(s, o.w, fixed, 1.3 + (0.1 - 1.3) * t)
            z = z + (u - t) * ((s - z) / max(1 - t, self.least_rest))
        for _ in range(16):
            z, moving = (z, False) if fixed is None else self.moved(z, o.w, fixed, 0.1)
            if not moving:
                break
        h = self.decode(z, o.w, seen)
        parts = h.flatten(0, 1).split(max(1, (1 << 23) // self.c.vocab_size))  # few logits at once
        tokens = torch.cat([self.project(part).argmax(-1) for part in parts]).view(h.shape[:2])
        return tokens if fixed is None else torch.where(fixed == FREE, tokens, fixed)

    def moved(self, x: Tensor, w: float, fixed: Tensor, length: float) -> tuple[Tensor, bool]:
        """Move clean latents against the gradient of a prompt's -log p, and say if any row still had to."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            loss_B = self.prompt_loss(self(x, w), fixed)
            (gradient,) = torch.autograd.grad(loss_B.sum(), x)
        x, loss_B = x.detach(), loss_B.detach()
        share_B = loss_B.clamp(0, 1) * (loss_B >= 0.01) / gradient.flatten(1).norm(dim=1).clamp_min(1e-12)
        return x - length * math.sqrt(x[0].numel()) * share_B[:, None, None] * gradient, bool((loss_B >= 0.01).any())

    def prompt_loss(self, logits: Tensor, fixed: Tensor) -> Tensor:
        """Return the mean of -log p over given tokens (B); where rows end, no end token shall stand before them."""
        kept = fixed != FREE
        nll = F.cross_entropy(logits.transpose(1, 2), fixed.clamp_min(0), reduction="none") * kept
        if self.c.rows_end:
            before = ~kept & (kept.flip(1).cumsum(1).flip(1) > 0)
            ends = logits.log_softmax(-1)[..., self.c.eos_token_id]
            nll = nll - torch.log1p(-ends.exp().clamp_max(1 - 1e-6)) * before
        return nll.sum(1) / kept.sum(1).clamp_min(1)


def times_of(o: SimpleNamespace, noise: Noise) -> list[float]:
    """Return the times 0 = t_0 < ... < t_K = 1: even, or quantiles or sorted draws of a logit-normal law."""
    if o.grid == "uniform":
        return torch.linspace(0.0, 1.0, o.steps + 1, dtype=torch.float64).float().tolist()
    if o.grid == "quantile":
        normal = torch.special.ndtri(torch.arange(1, o.steps, dtype=torch.float64) / o.steps)
    else:
        normal = torch.randn(o.steps - 1, generator=torch.Generator().manual_seed(noise.key("grid")))
    inner = torch.sigmoid(o.grid_mean + o.grid_std * normal).sort().values
    return [0.0, *inner.float().tolist(), 1.0]
