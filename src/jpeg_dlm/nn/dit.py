"""The latent DiT f: a transformer over [time, scale and mode tokens, context, N latents] with two heads (paper, after ELF).

The context, which the paper does not have, is the clean latents of the blocks before in the same document.
`sampling.folded` mirrors the DiT for sampling: a change here belongs there too.
Shapes: B batch, N latents, C latents of the context, D latent width, H hidden width, P prefix tokens with the context,
S = P + N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.attention import attend
from jpeg_dlm.nn.lean import norm_linear, rms_norm, swiglu_linear
from jpeg_dlm.nn.precision import fp32_island
from jpeg_dlm.nn.spans import sequence_mask

NORM_EPS = 1e-6  # (released)


@dataclass(frozen=True)
class Context:
    """Clean standardized latents of the blocks before, oldest first, and a mask of those that are given."""

    z_BCD: Tensor
    present_BC: Tensor

    def of(self, rows: Tensor) -> Context:
        """Return the context of these rows."""
        return Context(self.z_BCD[rows], self.present_BC[rows])


def scalar_frequencies(dim: int, device: torch.device, period: float = 10_000.0) -> Tensor:
    """Return `dim / 2` frequencies from 1 down to 1 / period (released: 1e-4)."""
    half = dim // 2
    return torch.exp(-math.log(period) * torch.arange(half, device=device, dtype=torch.float32) / half)


def scalar_embedding(x_B: Tensor, dim: int, period: float = 10_000.0) -> Tensor:
    """Return cosines then sines of x at all frequencies; x is not multiplied by 1000 (released)."""
    angles = x_B.float()[:, None] * scalar_frequencies(dim, x_B.device, period)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope_table(prefix: int, length: int, head_dim: int, before: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin (S, head_dim) for interleaved pairs; the prefix is not rotated, latents start at 0 (released).

    The `before` latents of a context have the positions up to -1, as in one long sequence.
    """
    inv = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(-before, length, dtype=torch.float32), inv).repeat_interleave(2, dim=-1)
    angles = torch.cat([torch.zeros(prefix, head_dim), angles])
    return angles.cos(), angles.sin()


def linear_estimate(t_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (c_skip, c_out): c_skip z_t is the best linear estimate of a unit-variance z_1, c_out its error's deviation.

    This is EDM's preconditioning for the path z_t = t z_1 + (1 - t) eps.
    """
    variance = t_B**2 + (1 - t_B) ** 2
    return t_B / variance, (1 - t_B) * variance.rsqrt()


class ScalarEmbedder(nn.Module):
    """Embeds a scalar: sinusoids through a two-layer SiLU network."""

    def __init__(self, freq_dim: int, hidden: int) -> None:
        super().__init__()
        self.freq_dim = freq_dim
        self.mlp_0 = nn.Linear(freq_dim, hidden)
        self.mlp_2 = nn.Linear(hidden, hidden)

    def forward(self, x_B: Tensor) -> Tensor:
        return self.mlp_2(F.silu(self.mlp_0(scalar_embedding(x_B, self.freq_dim))))


class InputProjection(nn.Module):
    def __init__(self, dim: int, bottleneck: int, hidden: int) -> None:
        super().__init__()
        self.proj1 = nn.Linear(dim, bottleneck, bias=False)
        self.proj2 = nn.Linear(bottleneck, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj2(self.proj1(x))


class Attention(nn.Module):
    """Self-attention with RMS-normed q and k, then rotary positions; bidirectional, unless a mask is given."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm = nn.RMSNorm(hidden // heads, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(hidden // heads, eps=NORM_EPS)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Norm x with `gain`, then attend."""
        (qkv,) = norm_linear(x, gain, NORM_EPS, (self.qkv.weight, self.qkv.bias))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)  # B S heads head_dim
        rope = cos[:, None], sin[:, None]
        q = rms_norm(q, self.q_norm.weight, NORM_EPS, rope).to(v.dtype)
        k = rms_norm(k, self.k_norm.weight, NORM_EPS, rope).to(v.dtype)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
        return self.proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, ratio: float) -> None:
        super().__init__()
        inner = int(int(hidden * ratio) * 2 / 3)
        self.w12 = nn.Linear(hidden, 2 * inner)
        self.w3 = nn.Linear(inner, hidden)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        """Norm x with `gain`, then apply the MLP."""
        (gate_up,) = norm_linear(x, gain, NORM_EPS, (self.w12.weight, self.w12.bias))
        return swiglu_linear(gate_up, self.w3.weight, self.w3.bias)


class DitBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ratio: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.attn = Attention(hidden, heads)
        self.norm2 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.mlp = SwiGLU(hidden, ratio)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + F.dropout(self.attn(x, self.norm1.weight, cos, sin, seen), self.dropout, self.training)
        return x + F.dropout(self.mlp(x, self.norm2.weight), self.dropout, self.training)


class Head(nn.Module):
    """RMSNorm and a linear layer initialized to zero, so that the first prediction is 0 (released)."""

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__()
        self.norm_final = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.linear = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = norm_linear(x, self.norm_final.weight, NORM_EPS, (self.linear.weight, self.linear.bias))
        return y


class LatentTransformer(nn.Module):
    """The DiT without its heads. A subclass adds them and then calls `initialize`."""

    def __init__(
        self, latent_len: int, dim: int, bottleneck: int, hidden: int, depth: int, heads: int, ratio: float,
        freq_dim: int, time_tokens: int, sc_tokens: int, mode_tokens: int, dropout: float, context_len: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.context_len = context_len
        self.prefix = time_tokens + sc_tokens + mode_tokens + context_len
        self.t_emb_tokens = nn.Parameter(torch.empty(1, time_tokens, hidden))
        self.sc_tokens = nn.Parameter(torch.empty(1, sc_tokens, hidden))
        self.mode_tokens = nn.Parameter(torch.empty(1, mode_tokens, hidden))
        self.self_cond_proj = nn.Linear(2 * dim, dim)
        self.in_proj = InputProjection(dim, bottleneck, hidden)
        self.t_embedder = ScalarEmbedder(freq_dim, hidden)
        self.sc_embedder = ScalarEmbedder(freq_dim, hidden)
        self.blocks = nn.ModuleList(DitBlock(hidden, heads, ratio, dropout) for _ in range(depth))
        if context_len:
            self.context_kind = nn.Parameter(torch.empty(1, 1, hidden))
            self.no_context = nn.Parameter(torch.empty(1, context_len, hidden))
        cos, sin = rope_table(self.prefix - context_len, latent_len, hidden // heads, context_len)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def initialize(self) -> None:
        """Set Xavier-uniform weights and zero biases, N(0, 0.02) embedders and tokens, and zero heads (released)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embedder in (self.t_embedder, self.sc_embedder):
            nn.init.normal_(embedder.mlp_0.weight, std=0.02)
            nn.init.normal_(embedder.mlp_2.weight, std=0.02)
        context = (self.context_kind, self.no_context) if self.context_len else ()
        for tokens in (self.t_emb_tokens, self.sc_tokens, self.mode_tokens, *context):
            nn.init.normal_(tokens, std=0.02)
        for module in self.modules():
            if isinstance(module, Head):
                nn.init.zeros_(module.linear.weight)

    def states(
        self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None, w_B: Tensor, decode_B: Tensor, context: Context | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return fp32 hidden states (B, N, H) of the latents; rows with `decode_B` are in decode mode."""
        with fp32_island(z_BND):
            z_BND = z_BND.float()
            s_BND = torch.zeros_like(z_BND) if s_BND is None else s_BND.float()
            x_BNH = self.in_proj(self.self_cond_proj(torch.cat([z_BND, s_BND], dim=-1)))
            before = [self._context(len(z_BND), context)] if self.context_len else []
            x_BSH = torch.cat([self._prefix(t_B, w_B, decode_B), *before, x_BNH], dim=1)
        for block in self.blocks:
            x_BSH = block(x_BSH, self.rope_cos, self.rope_sin, seen)
        return x_BSH[:, self.prefix :].float()

    def _prefix(self, t_B: Tensor, w_B: Tensor, decode_B: Tensor) -> Tensor:
        time = self.t_emb_tokens + self.t_embedder(t_B)[:, None]
        scale = self.sc_tokens + self.sc_embedder(w_B)[:, None]
        # In denoise mode the mode tokens are zero, but stay in the sequence and are attended to (released).
        return torch.cat([time, scale, self.mode_tokens * decode_B.to(time.dtype)[:, None, None]], dim=1)

    def _context(self, rows: int, context: Context | None) -> Tensor:
        """Return the positions (B, C, H) of the context; the first rows have none if it has fewer rows.

        A latent that is not given has a learned vector in its place, so that every row has the same cost.
        """
        none_BCH = self.no_context.expand(rows, -1, -1)
        if context is None:
            return none_BCH
        z_BCD = context.z_BCD.detach().float()
        x_BCH = self.in_proj(self.self_cond_proj(torch.cat([z_BCD, torch.zeros_like(z_BCD)], dim=-1))) + self.context_kind
        without = rows - len(z_BCD)
        return torch.cat([none_BCH[:without], torch.where(context.present_BC[..., None], x_BCH, none_BCH[without:])])


class DiT(LatentTransformer):
    """f(z, t; s, w) in two modes: denoise (flow matching) and decode (joint-embedding prediction at t = 1).

    With `causal`, in decode mode a latent attends to the prefix and the latents up to itself, and the prefix to itself.
    """

    decode_seen: Tensor | None

    def __init__(
        self, latent_len: int, dim: int, bottleneck: int, hidden: int, depth: int, heads: int, ratio: float,
        freq_dim: int, time_tokens: int, sc_tokens: int, mode_tokens: int, dropout: float, denoise_skip: bool = False,
        context_len: int = 0, causal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            latent_len, dim, bottleneck, hidden, depth, heads, ratio,
            freq_dim, time_tokens, sc_tokens, mode_tokens, dropout, context_len,
        )  # fmt: skip
        self.denoise_skip = denoise_skip
        self.denoise_head = Head(hidden, dim)
        self.decode_head = Head(hidden, dim)
        self.register_buffer("decode_seen", sequence_mask(self.prefix, latent_len) if causal else None, persistent=False)
        self.initialize()

    def forward(
        self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None, w_B: Tensor, decode_rows: int = 0,
        context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Predict the clean embedding; the first `decode_rows` rows are in decode mode, the rest in denoise mode.

        `context` is that of the rows in denoise mode: decoding is about a single block.
        """
        decode_B = torch.arange(len(t_B), device=t_B.device) < decode_rows
        seen = self.decode_seen if decode_rows else None
        if seen is not None and decode_rows < len(t_B):
            seen = seen | ~decode_B[:, None, None, None]
        x_BNH = self.states(z_BND, t_B, s_BND, w_B, decode_B, context, seen)
        with fp32_island(x_BNH):
            if decode_rows == len(x_BNH):
                return self.decode_head(x_BNH)
            x_BND = self.with_skip(self.denoise_head(x_BNH[decode_rows:]), z_BND[decode_rows:].float(), t_B[decode_rows:])
            return torch.cat([self.decode_head(x_BNH[:decode_rows]), x_BND]) if decode_rows else x_BND

    def with_skip(self, out_BND: Tensor, z_BND: Tensor, t_B: Tensor) -> Tensor:
        """Return x = c_skip(t) z_t + c_out(t) F, so that F learns only the nonlinear part; or x = F as in the paper."""
        if not self.denoise_skip:
            return out_BND
        c_skip, c_out = linear_estimate(t_B.float()[:, None, None])
        return c_skip * z_BND + c_out * out_BND
