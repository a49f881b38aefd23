"""The latent DiT f: a transformer over [time, scale and mode tokens, N latents] with two heads (paper, after ELF).

Its latents may also attend to a context, which the paper does not have: the source of a pair, or the blocks before in the
same document. A context attends to itself alone, so that it is read once for all times and draws of a row.
`export.onnx_networks` mirrors the DiT: a change here belongs there too.
Shapes: B batch, N latents, C positions of the context, D latent width, H hidden width, P prefix tokens, S = P + N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.layers import attend, fp32_island, rotary_angles, scalar_embedding

NORM_EPS = 1e-6  # (released)
MLP_RATIO = 4  # of the SwiGLU, before the two-thirds rule (paper)


@dataclass(frozen=True)
class Context:
    """Features of a source, or clean latents of the blocks before, oldest first, and a mask of those that are given."""

    z_BCD: Tensor
    present_BC: Tensor


KeysValues = tuple[Tensor, Tensor]  # of one layer (B, heads, S, head_dim)


@dataclass(frozen=True)
class Memory:
    """A context as the layers have read it: keys and values of each layer, and a mask of the positions that are given."""

    layers: list[KeysValues]
    present_BC: Tensor

    def of(self, rows: Tensor) -> Memory:
        """Return the memory of these rows."""
        return Memory([(k[rows], v[rows]) for k, v in self.layers], self.present_BC[rows])

    def repeated(self, copies: int) -> Memory:
        """Return so many copies of all rows, one after the other."""
        layers = [(k.repeat(copies, 1, 1, 1), v.repeat(copies, 1, 1, 1)) for k, v in self.layers]
        return Memory(layers, self.present_BC.repeat(copies, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last axis; the tables hold each angle twice."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # faster (measured), but a compiler cannot fuse it
        turns = torch.complex(cos[..., ::2], sin[..., ::2])
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-odd, even], dim=-1).flatten(-2) * sin


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
    """Self-attention with RMS-normed q and k, then rotary positions; bidirectional."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm = nn.RMSNorm(hidden // heads, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(hidden // heads, eps=NORM_EPS)
        self.proj = nn.Linear(hidden, hidden)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, memory: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Attend to the memory and to x where the mask allows; also return the keys and values of x."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B heads S head_dim
        v, gains = qkv[2], torch.stack([self.q_norm.weight, self.k_norm.weight])[:, None, None, None]
        normed = F.rms_norm(qkv[:2].float(), v.shape[-1:], eps=NORM_EPS) * gains
        q, k = rotate(normed, cos, sin).to(v.dtype)
        keys, values = (torch.cat(pair, 2) for pair in zip(memory, (k, v), strict=True)) if memory else (k, v)
        return self.proj(attend(q, keys, values, mask).transpose(1, 2).flatten(2)), (k, v)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = int(MLP_RATIO * hidden * 2 / 3)
        self.w12 = nn.Linear(hidden, 2 * inner)
        self.w3 = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class DitBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.attn = Attention(hidden, heads)
        self.norm2 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.mlp = SwiGLU(hidden)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, memory: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        y, own = self.attn(self.norm1(x), cos, sin, mask, memory)
        x = x + y
        return x + self.mlp(self.norm2(x)), own


class Head(nn.Module):
    """RMSNorm and a linear layer initialized to zero, so that the first prediction is 0 (released)."""

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__()
        self.norm_final = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.linear = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm_final(x))


class LatentTransformer(nn.Module):
    """The DiT without its heads, with the sizes of the options `m`. A subclass adds them and then calls `initialize`."""

    rope_cos: Tensor
    rope_sin: Tensor
    context_cos: Tensor
    context_sin: Tensor

    def __init__(self, m: Any, latent_len: int, dim: int, context_len: int = 0, source_dim: int = 0) -> None:
        super().__init__()
        self.context_len, hidden = context_len, m.hidden
        # Features of a source have a projection of their own; latents of a context have that of the latents.
        self.source_proj = nn.Linear(source_dim, hidden) if source_dim else None
        self.prefix = m.time_tokens + m.sc_tokens + m.mode_tokens
        self.t_emb_tokens = nn.Parameter(torch.empty(1, m.time_tokens, hidden))
        self.sc_tokens = nn.Parameter(torch.empty(1, m.sc_tokens, hidden))
        self.mode_tokens = nn.Parameter(torch.empty(1, m.mode_tokens, hidden))
        self.self_cond_proj = nn.Linear(2 * dim, dim)
        self.in_proj = InputProjection(dim, m.bottleneck_dim, hidden)
        self.t_embedder = ScalarEmbedder(m.freq_dim, hidden)
        self.sc_embedder = ScalarEmbedder(m.freq_dim, hidden)
        self.blocks = nn.ModuleList(DitBlock(hidden, m.heads) for _ in range(m.depth))
        if context_len:
            self.context_kind = nn.Parameter(torch.empty(1, 1, hidden))
        # Latents start at 0, a context ends at -1, as in one long sequence; prefix tokens are not rotated.
        own = torch.cat([torch.zeros(self.prefix), torch.arange(latent_len)])
        for name, positions in (("rope", own), ("context", torch.arange(-context_len, 0))):
            angles = rotary_angles(positions.float(), hidden // m.heads).repeat_interleave(2, dim=-1)
            self.register_buffer(f"{name}_cos", angles.cos(), persistent=False)
            self.register_buffer(f"{name}_sin", angles.sin(), persistent=False)

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
        context = [self.context_kind] if self.context_len else []
        for tokens in (self.t_emb_tokens, self.sc_tokens, self.mode_tokens, *context):
            nn.init.normal_(tokens, std=0.02)
        for module in self.modules():
            if isinstance(module, Head):
                nn.init.zeros_(module.linear.weight)

    def read(self, context: Context) -> Memory:
        """Return a context as latents attend to it; its inputs get no gradient."""
        z_BCD = context.z_BCD.detach()
        with fp32_island(z_BCD):
            z_BCD = z_BCD.float()
            if self.source_proj is not None:
                x_BCH = self.source_proj(z_BCD) + self.context_kind
            else:
                x_BCH = self.in_proj(self.self_cond_proj(torch.cat([z_BCD, torch.zeros_like(z_BCD)], -1))) + self.context_kind
        # A softmax over no keys would be NaN: in a row without any context all positions see each other, and nothing sees them.
        present_BC = context.present_BC | ~context.present_BC.any(1, keepdim=True)
        layers = []
        for block in self.blocks:
            x_BCH, own = block(x_BCH, self.context_cos, self.context_sin, present_BC[:, None, None])
            layers.append(own)
        return Memory(layers, context.present_BC)

    def states(
        self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None, w_B: Tensor, decode_B: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """Return fp32 hidden states (B, N, H) of the latents; rows with `decode_B` are in decode mode."""
        with fp32_island(z_BND):
            z_BND = z_BND.float()
            s_BND = torch.zeros_like(z_BND) if s_BND is None else s_BND.float()
            x_BNH = self.in_proj(self.self_cond_proj(torch.cat([z_BND, s_BND], dim=-1)))
            x_BSH = torch.cat([self._prefix(t_B, w_B, decode_B), x_BNH], dim=1)
        mask = None
        if memory:
            mask = torch.cat([memory.present_BC, memory.present_BC.new_ones(x_BSH.shape[:2])], 1)[:, None, None]
        cos, sin = (table[: x_BSH.shape[1]] for table in (self.rope_cos, self.rope_sin))  # ELF reads targets alone too
        for i, block in enumerate(self.blocks):
            x_BSH, _ = block(x_BSH, cos, sin, mask, memory.layers[i] if memory else None)
        return x_BSH[:, self.prefix :].float()

    def _prefix(self, t_B: Tensor, w_B: Tensor, decode_B: Tensor) -> Tensor:
        time = self.t_emb_tokens + self.t_embedder(t_B)[:, None]
        scale = self.sc_tokens + self.sc_embedder(w_B)[:, None]
        # In denoise mode the mode tokens are zero, but stay in the sequence and are attended to (released).
        return torch.cat([time, scale, self.mode_tokens * decode_B.to(time.dtype)[:, None, None]], dim=1)


class DiT(LatentTransformer):
    """f(z, t; s, w) in two modes: denoise (flow matching) and decode (joint-embedding prediction at t = 1)."""

    def __init__(self, m: Any, context_len: int = 0, source_dim: int = 0) -> None:
        super().__init__(m, m.latent_len, m.latent_dim, context_len, source_dim)
        self.denoise_skip, self.decode_residual = m.denoise_skip, m.decode_residual
        self.denoise_head = Head(m.hidden, m.latent_dim)
        self.decode_head = Head(m.hidden, m.latent_dim)
        self.initialize()

    def forward(
        self,
        z_BND: Tensor,
        t_B: Tensor,
        s_BND: Tensor | None,
        w_B: Tensor,
        decode_rows: int = 0,
        memory: Memory | None = None,
    ) -> Tensor:
        """Predict the clean embedding; the first `decode_rows` rows are in decode mode, the rest in denoise mode."""
        decode_B = torch.arange(len(t_B), device=t_B.device) < decode_rows
        x_BNH = self.states(z_BND, t_B, s_BND, w_B, decode_B, memory)
        with fp32_island(x_BNH):
            if not decode_rows:
                return self.denoised(x_BNH, z_BND.float(), t_B)
            decoded = self.decoded(x_BNH[:decode_rows], z_BND[:decode_rows].float())
            if decode_rows == len(x_BNH):
                return decoded
            return torch.cat([decoded, self.denoised(x_BNH[decode_rows:], z_BND[decode_rows:].float(), t_B[decode_rows:])])

    def decoded(self, x_BNH: Tensor, z_BND: Tensor) -> Tensor:
        """Return the head (paper), or z_c plus the head if `decode_residual`: an untrained zero head is then the identity."""
        return self.decode_head(x_BNH) + z_BND if self.decode_residual else self.decode_head(x_BNH)

    def denoised(self, x_BNH: Tensor, z_BND: Tensor, t_B: Tensor) -> Tensor:
        """Return the head F (paper), or x = c_skip(t) z_t + c_out(t) F, so that F learns only the nonlinear part."""
        if not self.denoise_skip:
            return self.denoise_head(x_BNH)
        c_skip, c_out = linear_estimate(t_B.float()[:, None, None])
        return c_skip * z_BND + c_out * self.denoise_head(x_BNH)
